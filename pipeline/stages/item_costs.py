"""An item from the planning of its window to its row: which stage had it when, where it waited, what it cost."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

STAGES = ("plan", "decode", "encode", "prompt", "answer", "publish")
_RESOURCES = (
    ("media_bytes", pa.int64()),
    ("pixels", pa.int64()),
    ("frames", pa.int64()),
    ("media_seconds", pa.float64()),
    ("feature_tokens", pa.int64()),
    ("decode_core_seconds", pa.float64()),
)
# What timings have of every job: the wall time, by stage and by the wait before it; the resource vector of the item's
# media that were planned (`ResourceVector`); and its costs.
COST_COLUMNS = (
    ("wall_seconds", pa.float64()),
    *((f"{stage}_{kind}", pa.float64()) for stage in STAGES for kind in ("wait_seconds", "seconds")),
    *_RESOURCES,
    ("cpu_seconds", pa.float64()),
    ("accelerator_seconds", pa.float64()),
    ("bytes_fetched", pa.int64()),
)


@dataclass(frozen=True, slots=True)
class Step:
    """A stage that had an item: from `started_at`, in seconds since the epoch, for `seconds`."""

    stage: str
    started_at: float
    seconds: float

    @property
    def ended_at(self) -> float:
        return self.started_at + self.seconds


@dataclass(kw_only=True, slots=True)
class ItemCosts:
    """What is known of one item; its steps in order."""

    steps: list[Step] = field(default_factory=list)
    cpu_seconds: float = 0.0
    accelerator_seconds: float = 0.0
    bytes_fetched: int = 0

    def add(self, row: Mapping[str, Any]) -> None:
        """The cost of an outcome's row."""
        self.cpu_seconds += (row.get("cpu_seconds") or 0.0) + (row.get("decode_cpu_seconds") or 0.0)
        self.accelerator_seconds += row.get("accelerator_seconds") or 0.0
        self.bytes_fetched += row.get("bytes_fetched") or 0


def timeline(steps: Sequence[Step]) -> dict[str, float]:
    """`wall_seconds`; of each stage `…_seconds` and, but for the first, `…_wait_seconds` since the one before.

    `steps` follow one another. Clocks of nodes that differ make a wait of less than nothing: it is nothing then, and
    the sum exceeds the wall time by as much.
    """
    found: dict[str, float] = {"wall_seconds": steps[-1].ended_at - steps[0].started_at}
    for number, step in enumerate(steps):
        found[f"{step.stage}_seconds"] = step.seconds
        if number:
            found[f"{step.stage}_wait_seconds"] = max(0.0, step.started_at - steps[number - 1].ended_at)
    return found


def last_steps(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, tuple[str, str]]) -> list[Step]:
    """Of rows of outcomes, one each of an item's media or pieces, the steps of the one that was done last.

    `columns`: stage → those of when it started and how long it took, in order; a stage that a row has not been to is
    left out.
    """
    paths = [
        [Step(stage, row[start], row[took]) for stage, (start, took) in columns.items() if row.get(start) is not None]
        for row in rows
    ]
    return max((path for path in paths if path), key=lambda path: path[-1].ended_at, default=[])


_ENCODE = {"decode": ("decode_started_at", "decode_seconds"), "encode": ("started_at", "seconds")}
_ANSWER = {"answer": ("started_at", "seconds")}


def cost_columns(
    items: Sequence[int],
    *,
    encode_plan: Mapping[str, Any] | None,
    encoded: Iterable[Mapping[str, Any]],
    plan: Mapping[str, Any] | None,
    answered: Iterable[Mapping[str, Any]],
    publishing: Step,
) -> dict[int, dict[str, Any]]:
    """Item → the fields of `COST_COLUMNS`.

    `items` are all of the window. Plans are as they are written; those of an earlier version say nothing of costs.
    `encoded` and `answered` are rows of outcomes with `item_index`. What a window's planning took is shared by all.
    """
    known = {item: ItemCosts() for item in items}
    media, pieces = _by_item(encoded), _by_item(answered)
    resources = _resources(encode_plan)
    for item, costs in known.items():
        _plan_step(costs, item, "plan", encode_plan, len(items))
        costs.steps += last_steps(media[item], _ENCODE)
        _plan_step(costs, item, "prompt", plan, len(items))
        costs.steps += last_steps(pieces[item], _ANSWER)
        for row in (*media[item], *pieces[item]):
            costs.add(row)
    return {
        item: {
            **timeline([*costs.steps, publishing]),
            **resources.get(item, {}),
            "cpu_seconds": costs.cpu_seconds,
            "accelerator_seconds": costs.accelerator_seconds,
            "bytes_fetched": costs.bytes_fetched,
        }
        for item, costs in known.items()
    }


def _by_item(rows: Iterable[Mapping[str, Any]]) -> dict[int, list[Mapping[str, Any]]]:
    found: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        found[row["item_index"]].append(row)
    return found


def _plan_step(costs: ItemCosts, item: int, stage: str, plan: Mapping[str, Any] | None, num_items: int) -> None:
    spent = (plan or {}).get("spent")
    if spent:
        costs.steps.append(Step(stage, spent["started_at"], spent["seconds"]))
        costs.cpu_seconds += spent["cpu_seconds"] / num_items
        costs.bytes_fetched += spent["bytes_fetched"].get(str(item), 0)


def _resources(plan: Mapping[str, Any] | None) -> dict[int, dict[str, Any]]:
    """Item → the sums over its media."""
    found: dict[int, dict[str, Any]] = {}
    for media in (plan or {}).get("media", ()):
        probe, frames = media["probe"], len(media["requested"])
        own = {
            "media_bytes": probe["num_bytes"],
            "pixels": probe["width"] * probe["height"] * frames,
            "frames": frames,
            "media_seconds": probe["duration_seconds"],
            "feature_tokens": media["geometry"]["feature_length"],
            "decode_core_seconds": media.get("decode_seconds", 0.0),
        }
        sums = found.setdefault(media["item_index"], dict.fromkeys(own, 0))
        for name, value in own.items():
            sums[name] += value
    return found


def publishing_since(started_at: float) -> Step:
    """The step that ends now."""
    return Step("publish", started_at, time.time() - started_at)
