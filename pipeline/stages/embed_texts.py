"""Text batches → vectors, an outcome file and a receipt."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from pipeline.models.embedder import embed_texts
from pipeline.schema import Receipt
from pipeline.stages.context import StageContext
from pipeline.stages.outcomes import VECTOR_OUTCOME, write_outcome
from pipeline.stages.rows import receipt_table


class EmbedTexts:
    """Stage, one an accelerator: batches (`TEXT_SCHEMA`) → rows of `RECEIPT_SCHEMA`."""

    def __init__(self, context: StageContext, device: str) -> None:
        section = context.config.text
        if device == "cpu":
            # One thread a worker: workers are sized to the cores, and bits must not move with their number.
            torch.set_num_threads(1)
        self.context = context
        self.model = context.text_side.load_model(dtype=section.dtype, device=device, attention=section.attention)

    def __call__(self, batches: pa.Table) -> Iterator[pa.Table]:
        """One table of one receipt for each row, in order."""
        for batch in batches.to_pylist():
            yield receipt_table(self._embed(batch))

    def _embed(self, batch: dict[str, Any]) -> Receipt:
        started = time.perf_counter()
        items = batch["items"]
        lengths = [len(item["input_ids"]) for item in items]
        splits = {"oom_splits": 0}
        vectors = self._splitting([item["input_ids"] for item in items], splits)
        seconds = time.perf_counter() - started
        receipt = Receipt(
            stage="pool",
            window=batch["window"],
            batch=batch["batch"],
            digest=batch["digest"],
            counts={
                "texts_embedded": len(items),
                "text_tokens": sum(lengths),
                "text_padded_tokens": sum(max(lengths) - length for length in lengths),
                **splits,
            },
            seconds={"text_embed": seconds},
        )
        share_ms = 1e3 * seconds / len(items)
        rows = [
            {"item_index": item["item_index"], "part": item["part"], "vector": vector, "text_embed_ms": share_ms}
            for item, vector in zip(items, vectors, strict=True)
        ]
        write_outcome(self.context.folder, receipt, rows, VECTOR_OUTCOME)
        return receipt

    def _splitting(self, token_ids: list[list[int]], splits: dict[str, int]) -> npt.NDArray[np.float32]:
        """Embed a batch, or its halves when the device has no room for it whole."""
        try:
            return embed_texts(self.model, token_ids, self.context.config.text.prompt_name)
        except torch.OutOfMemoryError:
            if len(token_ids) == 1:
                raise
            splits["oom_splits"] += 1
        torch.cuda.empty_cache()
        half = len(token_ids) // 2
        return np.concatenate([self._splitting(token_ids[:half], splits), self._splitting(token_ids[half:], splits)])
