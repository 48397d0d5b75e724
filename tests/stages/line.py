"""A run's stages called one after another in this process, without Ray."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from pipeline.config import Config
from pipeline.models.language_model import GeneratedText, PromptedItem
from pipeline.planning.windows import plan_windows
from pipeline.runs.receipts import receipt_from_json
from pipeline.runs.run import start_run
from pipeline.schema import Receipt
from pipeline.stages.checked_model import checked_model
from pipeline.stages.context import StageContext
from pipeline.stages.decode import DecodeBatches
from pipeline.stages.encode import EncodeBatches
from pipeline.stages.encode_finish import finish_encode_window
from pipeline.stages.encode_plan import PlanEncodeWindow
from pipeline.stages.generate import GenerateBatches
from pipeline.stages.generate_finish import finish_generate_window
from pipeline.stages.prompt import PlanPromptWindow
from pipeline.stages.rows import receipts_apart


class RecordingGenerator(GenerateBatches):
    """Keeps the token ids that parts do not show."""

    def __init__(self, context: StageContext, device: str) -> None:
        super().__init__(context, device)
        self.token_ids: dict[int, tuple[int, ...]] = {}

    def _answers(
        self, ready: dict[int, PromptedItem], seconds: dict[str, float], counts: dict[str, int]
    ) -> list[GeneratedText]:
        answers = super()._answers(ready, seconds, counts)
        self.token_ids.update(zip(ready, (answer.token_ids for answer in answers), strict=True))
        return answers


class Line:
    """What running `config` through every stage gave."""

    def __init__(self, config: Config, *, device: str = "cpu") -> None:
        self.receipts: list[Receipt] = []
        with start_run(config) as run:
            self.context = StageContext(
                config=config, run_url=run.folder.url, checked=checked_model(config, device), device=device
            )
            windows = plan_windows(
                run.manifest.num_items,
                first_items=config.ray.first_window_items,
                full_items=config.window_items,
            )
            encoder, self.generator = EncodeBatches(self.context, device), RecordingGenerator(self.context, device)
            for window in windows:
                row = pa.table({"index": [window.index], "start": [window.start], "stop": [window.stop]})
                for planned in PlanEncodeWindow(self.context)(row):
                    for decoded in DecodeBatches(self.context)(planned):
                        self._run(encoder, decoded)
                finish_encode_window(self.context, window)
                for prompted in PlanPromptWindow(self.context)(row):
                    self._run(self.generator, prompted)
                finish_generate_window(self.context, window)
            encoder.writer.close()
            if encoder.keeper is not None:
                encoder.keeper.writer.close()
            self.context.store.recover()
            self.context.store.frames.recover()
            self.rows = read_parts(self.context)

    def _run(self, stage: Any, blocks: pa.Table) -> None:
        known, batches = receipts_apart(blocks)
        done = [known, *(stage(batches) if batches.num_rows else ())]
        self.receipts += [receipt_from_json(text) for table in done for text in table["receipt"].to_pylist()]

    def count(self, name: str) -> int:
        """A count summed over receipts."""
        return sum(receipt.counts.get(name, 0) for receipt in self.receipts)

    @property
    def token_ids(self) -> list[tuple[int, ...]]:
        """Generated ids by item; of all items, which must be ok."""
        return [self.generator.token_ids[row["item_index"]] for row in self.rows]


def decoded_batches(context: StageContext, num_items: int) -> pa.Table:
    """All batches of the encode pass with their pixels, as one block."""
    batches = []
    for window in plan_windows(num_items, first_items=num_items, full_items=num_items):
        row = pa.table({"index": [window.index], "start": [window.start], "stop": [window.stop]})
        for planned in PlanEncodeWindow(context)(row):
            batches += [receipts_apart(decoded)[1] for decoded in DecodeBatches(context)(planned)]
    return pa.concat_tables([each for each in batches if each.num_rows])


def read_parts(context: StageContext) -> list[dict[str, Any]]:
    """The rows of all parts, in the order of the files."""
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = []
    for name in context.folder.list(suffix=".parquet"):
        with context.folder.open(name) as file:
            rows += pq.read_table(file).to_pylist()
    return rows
