"""Turn one window's texts into token ids and batches of them, and write the plan down."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from pipeline.errors import ItemError
from pipeline.language.batching import plan_text_batches
from pipeline.planning.windows import Window
from pipeline.runs.manifest import read_range
from pipeline.runs.receipts import receipt_to_json
from pipeline.schema import Receipt, Request
from pipeline.stages.context import StageContext
from pipeline.stages.outcomes import count_codes, failure_row, pool_batch_receipts
from pipeline.stages.texts import cut

TEXT_SCHEMA = pa.schema(
    [
        ("window", pa.int32()),
        ("batch", pa.int32()),
        ("digest", pa.string()),
        ("receipt", pa.string()),
        (
            "items",
            pa.list_(
                pa.struct(
                    [
                        ("item_index", pa.int64()),
                        ("part", pa.int32()),
                        ("input_ids", pa.list_(pa.int32())),
                    ]
                )
            ),
        ),
    ]
)


def pool_plan_name(window: int) -> str:
    """The written plan of a window's pool pass."""
    return f"_run/plans/pool-{window:06d}.json"


@dataclass(frozen=True)
class PlanTextWindow:
    """Stage: window rows (`index, start, stop`) → text batches still to be done, and receipts of finished ones."""

    context: StageContext

    def __call__(self, windows: pa.Table) -> Iterator[pa.Table]:
        """One table (`TEXT_SCHEMA`) a window."""
        for row in windows.to_pylist():
            yield self._rows(Window(**row))

    def _rows(self, window: Window) -> pa.Table:
        started = time.perf_counter()
        pieces, failures = self._pieces(window)
        folder, name = self.context.folder, pool_plan_name(window.index)
        if not folder.exists(name):
            folder.write_json(name, self._plan(window, pieces, failures, started))
        plan = folder.read_json(name)
        done = pool_batch_receipts(folder, window.index)
        rows = [{**_place(window, -1, ""), "receipt": plan["receipt"]}]
        for number, batch in enumerate(plan["batches"]):
            digest = batch["digest"]
            row = _place(window, number, digest)
            if (number, digest) in done:
                rows.append({**row, "receipt": done[number, digest][1]})
            else:
                rows.append({**row, "items": [pieces[index] for index in batch["pieces"]]})
        return pa.Table.from_pylist(rows, TEXT_SCHEMA)

    def _pieces(self, window: Window) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Pieces of all texts, in order, and failure rows of items whose texts cannot be embedded."""
        pieces: list[dict[str, Any]] = []
        failures: list[dict[str, Any]] = []
        for request in read_range(self.context.folder, window.start, window.stop):
            try:
                pieces += [
                    {"item_index": request.item_index, "part": piece.part, "input_ids": piece.input_ids}
                    for piece in self._cut(request)
                ]
            except ItemError as error:
                failures.append(failure_row(request.item_index, None, error))
        return pieces, failures

    def _cut(self, request: Request) -> list[Any]:
        if request.text is not None and request.media:
            raise ItemError(
                "tokenize", "media_and_text", "an item is embedded by its text or by its media, it has both"
            )
        if request.text is None and len(request.media) != 1:
            found = f"{len(request.media)} media items" if request.media else "neither text nor media"
            raise ItemError("tokenize", "not_one_vector", f"an item has one vector, and this one has {found}")
        if request.media and not self.context.checked.verdicts:
            raise ItemError(
                "admit", "modality_not_supported", f"{self.context.config.model} embeds texts, the item is media"
            )
        return [] if request.text is None else list(cut(self.context, request.text))

    def _plan(
        self, window: Window, pieces: list[dict[str, Any]], failures: list[dict[str, Any]], started: float
    ) -> dict[str, Any]:
        section = self.context.config.text
        batches = plan_text_batches(
            [len(piece["input_ids"]) for piece in pieces],
            max_batch_tokens=section.max_batch_tokens,
            max_batch_items=section.max_batch_items,
        )
        planned = []
        for number, positions in enumerate(batches):
            terms = [[pieces[p]["item_index"], pieces[p]["part"], pieces[p]["input_ids"]] for p in positions]
            digest = hashlib.sha256(json.dumps([window.index, number, terms]).encode()).hexdigest()[:16]
            planned.append({"digest": digest, "pieces": positions})
        receipt = Receipt(
            stage="tokenize",
            window=window.index,
            batch=-1,
            digest=hashlib.sha256(repr([batch["digest"] for batch in planned]).encode()).hexdigest()[:16],
            counts={"batches": len(planned), "items": window.stop - window.start},
            seconds={"tokenize": time.perf_counter() - started},
            quarantine=count_codes(failure["code"] for failure in failures),
        )
        return {"batches": planned, "failures": failures, "receipt": receipt_to_json(receipt)}


def _place(window: Window, batch: int, digest: str) -> dict[str, Any]:
    return {"window": window.index, "batch": batch, "digest": digest, "items": []}
