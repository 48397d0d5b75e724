"""What the plans of the passes after encoding have in common: rows of batches, and the receipt that announces them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import pyarrow as pa

from pipeline.planning.windows import Window
from pipeline.schema import Receipt
from pipeline.stages.outcomes import count_codes


def batches_schema(item: Sequence[tuple[str, pa.DataType]], *more: tuple[str, pa.DataType]) -> pa.Schema:
    """Rows of planned batches: `items` of the fields `item`; a row with a `receipt` has none, and is passed on."""
    return pa.schema(
        [
            ("window", pa.int32()),
            ("batch", pa.int32()),
            ("digest", pa.string()),
            ("receipt", pa.string()),
            ("items", pa.list_(pa.struct(list(item)))),
            *more,
        ]
    )


def _batch_row(window: Window, batch: int, digest: str) -> dict[str, Any]:
    """A row without items or receipt yet; the plan's own is batch -1."""
    return {"window": window.index, "batch": batch, "digest": digest, "items": []}


def batch_digest(window: Window, number: int, terms: Sequence[Any]) -> str:
    """16 hex digits over a batch's place and what is in it: what tells a batch of one plan from that of another."""
    return hashlib.sha256(json.dumps([window.index, number, terms]).encode()).hexdigest()[:16]


def rows_to_do(
    window: Window,
    plan: Mapping[str, Any],
    done: Mapping[tuple[int, str], tuple[Receipt, str]],
    work: Callable[[dict[str, Any]], dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    """The written plan's receipt, then of each of its batches the receipt, if `done`, or a row with its `work`."""
    yield {**_batch_row(window, -1, ""), "receipt": plan["receipt"]}
    for number, batch in enumerate(plan["batches"]):
        digest = batch["digest"]
        known = done.get((number, digest))
        yield {**_batch_row(window, number, digest), **(work(batch) if known is None else {"receipt": known[1]})}


def ready_receipt(window: Window) -> Receipt:
    """Says that a window has no batches: all that its rows are made of is there."""
    return Receipt(stage="ready", window=window.index, batch=-1, digest="", counts={"batches": 0})


def plan_receipt(
    stage: Literal["prompt", "tokenize"],
    window: Window,
    digests: Sequence[str],
    *,
    counts: Mapping[str, int],
    spent: Mapping[str, Any],
    failures: Sequence[Mapping[str, Any]],
) -> Receipt:
    """Says how many batches follow, by their digests; `spent` as `Spending.spent` says it."""
    return Receipt(
        stage=stage,
        window=window.index,
        batch=-1,
        digest=hashlib.sha256(repr(list(digests)).encode()).hexdigest()[:16],
        counts={"batches": len(digests), **counts},
        seconds={stage: spent["seconds"]},
        cpu_seconds={stage: spent["cpu_seconds"]},
        quarantine=count_codes(failure["code"] for failure in failures),
    )
