"""The encode stage prepares the next batch while one is computed, and receipts come out the same."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline.config import Config
from pipeline.runs.receipts import receipt_from_json
from pipeline.runs.run import start_run
from pipeline.stages.checked_model import checked_model
from pipeline.stages.context import StageContext
from pipeline.stages.encode import EncodeBatches
from tests.stages.line import decoded_batches


def test_the_next_batch_is_staged_while_one_is_computed(demo_media: Path, make_config: Callable[..., Config]) -> None:
    config = make_config(demo_media / "manifest.jsonl", encode={"max_batch_items": 4})
    with start_run(config) as run:
        context = StageContext(config=config, run_url=run.folder.url, checked=checked_model(config, "cpu"))
        rows = decoded_batches(context, run.manifest.num_items)
        assert rows.num_rows > 4
        stage = EncodeBatches(context, "cpu")
        receipts = [counts(table) for table in stage(rows)]
        stager = stage.stager = ThreadPoolExecutor(1)  # as on an accelerator
        staged = [threading.Event() for _ in range(rows.num_rows + 1)]
        numbers = iter(range(rows.num_rows))
        waited: list[bool] = []
        compute, prepare = stage.encoder.compute, stage.encoder.stage

        def preparing(*arguments: Any) -> Any:
            prepared = prepare(*arguments)
            staged[next(numbers)].set()
            return prepared

        def computing(batch: Any) -> Any:
            following = len(waited) + 1
            waited.append(following == rows.num_rows or staged[following].wait(timeout=10))
            return compute(batch)

        stage.encoder.stage, stage.encoder.compute = preparing, computing  # type: ignore[method-assign]
        assert [counts(table) for table in stage(rows)] == receipts
        stage.writer.close()
        stager.shutdown()
    assert waited == [True] * rows.num_rows


def counts(table: pa.Table) -> tuple[str, dict[str, int]]:
    """What a receipt says that no clock has a part in."""
    receipt = receipt_from_json(table["receipt"][0].as_py())
    return receipt.digest, receipt.counts
