"""Turn one window's texts into token ids and batches of them, and write the plan down."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.language.batching import plan_text_batches
from pipeline.planning.windows import Window
from pipeline.runs.receipts import receipt_to_json
from pipeline.stages.context import StageContext
from pipeline.stages.forecast import forecast_counts, planned_text_work
from pipeline.stages.outcomes import pool_batch_receipts
from pipeline.stages.planned import batch_digest, batches_schema, plan_receipt, rows_to_do
from pipeline.stages.spending import Spending
from pipeline.stages.texts import Piece, WindowTexts, read_texts

TEXT_SCHEMA = batches_schema(
    [
        ("item_index", pa.int64()),
        ("part", pa.int32()),
        ("input_ids", pa.list_(pa.int32())),
    ],
)


_CHUNKS = pa.schema(
    [
        ("item_index", pa.int64()),
        ("text", pa.string()),
        ("source_id", pa.string()),
        ("chunks", pa.list_(pa.list_(pa.int32()))),
    ]
)


def pool_plan_name(window: int) -> str:
    """The written plan of a window's pool pass."""
    return f"_run/plans/pool-{window:06d}.json"


@dataclass(frozen=True)
class PlanTextWindow:
    """Stage: window rows (`index, start, stop`) → text batches still to be done, and receipts of finished ones."""

    context: StageContext
    max_batch_tokens: int

    def __call__(self, windows: pa.Table) -> Iterator[pa.Table]:
        """One table (`TEXT_SCHEMA`) a window."""
        for row in windows.to_pylist():
            with self.context.logging(window=row["index"]):
                planned = self._rows(Window(**row))
            yield planned

    def _rows(self, window: Window) -> pa.Table:
        spending = Spending(self._children)
        found = read_texts(self.context, window)
        pieces = [_piece_row(index, piece) for index, item in found.items.items() for piece in item.pieces]
        folder, name = self.context.folder, pool_plan_name(window.index)
        if not folder.exists(name):
            _write_chunks(self.context, window, found)
            folder.write_json(name, self._plan(window, pieces, found, spending))
        plan = folder.read_json(name)
        work = rows_to_do(
            window,
            plan,
            pool_batch_receipts(folder, window.index),
            lambda batch: {"items": [pieces[index] for index in batch["pieces"]]},
        )
        return pa.Table.from_pylist(list(work), TEXT_SCHEMA)

    def _children(self) -> list[int]:
        probers = self.context.probers  # read the text of pages
        return [] if probers is None else probers.children

    def _plan(
        self, window: Window, pieces: list[dict[str, Any]], found: WindowTexts, spending: Spending
    ) -> dict[str, Any]:
        section = self.context.config.text
        batches = plan_text_batches(
            [len(piece["input_ids"]) for piece in pieces],
            max_batch_tokens=self.max_batch_tokens,
            max_batch_items=section.max_batch_items,
        )
        work = planned_text_work(self.context, [[len(pieces[p]["input_ids"]) for p in batch] for batch in batches])
        planned: list[dict[str, Any]] = []
        for number, positions in enumerate(batches):
            terms = [[pieces[p]["item_index"], pieces[p]["part"], pieces[p]["input_ids"]] for p in positions]
            planned.append({"digest": batch_digest(window, number, terms), "pieces": positions})
        spent = spending.spent(found.bytes_fetched)
        receipt = plan_receipt(
            "tokenize",
            window,
            [batch["digest"] for batch in planned],
            counts={
                "items": window.stop - window.start,
                "fetches": found.counter.fetches,
                "bytes_fetched": found.counter.bytes_fetched,
                "fetch_retries": found.counter.retries,
                "items_carried": len(found.carried),
                **forecast_counts(work),
            },
            spent=spent,
            failures=found.failures,
        )
        return {
            "batches": planned,
            "failures": found.failures,
            "carried": {str(item): [place.window, place.row] for item, place in found.carried.items()},
            "spent": spent,
            "receipt": receipt_to_json(receipt),
        }


def chunks_name(window: int) -> str:
    """The texts of a window's items, and where their chunks lie."""
    return f"_work/texts/window-{window:06d}.parquet"


def read_chunks(context: StageContext, window: int) -> dict[int, dict[str, Any]]:
    """Item → its `text` and `source_id`, and `chunks`, [start_char, end_char] of each piece that was embedded."""
    with context.folder.open(chunks_name(window)) as file:
        return {row["item_index"]: row for row in pq.read_table(file).to_pylist()}


def _write_chunks(context: StageContext, window: Window, found: WindowTexts) -> None:
    rows = [
        {
            "item_index": index,
            "text": item.text,
            "source_id": item.source_id,
            "chunks": [[piece.start_char, piece.end_char] for piece in item.pieces],
        }
        for index, item in found.items.items()
    ]
    with context.folder.writing(chunks_name(window.index)) as file:
        pq.write_table(pa.Table.from_pylist(rows, _CHUNKS), file, compression="zstd")


def _piece_row(item_index: int, piece: Piece) -> dict[str, Any]:
    return {"item_index": item_index, "part": piece.part, "input_ids": piece.input_ids}
