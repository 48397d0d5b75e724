"""The written plan of a window of the encode pass: what it says, and where it is."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.planning.windows import Window
from pipeline.runs.base import Place
from pipeline.runs.manifest import read_range
from pipeline.runs.receipts import receipt_from_json, receipt_to_json
from pipeline.schema import Receipt, Request, fields_of
from pipeline.stages.context import StageContext
from pipeline.stages.rows import PlannedMedia
from pipeline.storage import Folder

_PLANS = "_run/plans"


def plan_name(window: int) -> str:
    """The written plan of a window."""
    return f"{_PLANS}/encode-{window:06d}.json"


def planned_windows(folder: Folder) -> list[int]:
    """Windows that have a written plan, ascending."""
    matches = (re.fullmatch(r"encode-(\d+)\.json", name) for name in folder.list(_PLANS))
    return sorted(int(match[1]) for match in matches if match)


@dataclass(frozen=True, kw_only=True)
class WindowPlan:
    """A window as it was first planned; a resumed run follows it whatever the store holds by then.

    `media` are all that passed admission, and name the shards that keep their frames; `hits` position → (key, shard)
    known at that moment; `same_as` position → the position that is encoded in its place; `batches` positions with
    their digest; `failures` rows of items that are out (`item_index, media_index, stage, code, message`); `carried`
    items that are unchanged since the run that this one goes on from; `learnt` those hits whose source the store does
    not know yet, or as another's. `spent` is as `Spending.spent` says it.
    """

    window: Window
    media: list[PlannedMedia]
    hits: dict[int, tuple[str, str]]
    same_as: dict[int, int]
    batches: list[tuple[str, list[int]]]
    failures: list[dict[str, Any]]
    receipt: Receipt
    carried: dict[int, Place] = field(default_factory=dict)
    learnt: list[int] = field(default_factory=list)
    spent: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As it is written down; inline bytes stay in the manifest."""
        media = [m.to_row() for m in self.media]
        for row in media:
            row["media"]["data"] = None
        return {
            "window": dataclasses.asdict(self.window),
            "media": media,
            "hits": {str(position): list(where) for position, where in self.hits.items()},
            "same_as": {str(position): other for position, other in self.same_as.items()},
            "batches": [{"digest": digest, "positions": positions} for digest, positions in self.batches],
            "failures": self.failures,
            "receipt": receipt_to_json(self.receipt),
            "carried": {str(item): [place.window, place.row] for item, place in self.carried.items()},
            "learnt": self.learnt,
            "spent": self.spent,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any], requests: Sequence[Request]) -> WindowPlan:
        """The inverse of `to_json`; the media themselves come from the frozen listing."""
        window = Window(**value["window"])
        for row in value["media"]:
            row["media"] = fields_of(requests[row["item_index"] - window.start].media[row["media_index"]])
        return cls(
            window=window,
            media=[PlannedMedia.from_row(row) for row in value["media"]],
            hits={int(position): (where[0], where[1]) for position, where in value["hits"].items()},
            same_as={int(position): other for position, other in value["same_as"].items()},
            batches=[(batch["digest"], batch["positions"]) for batch in value["batches"]],
            failures=value["failures"],
            receipt=receipt_from_json(value["receipt"]),
            carried={int(item): Place(window=w, row=r) for item, (w, r) in value.get("carried", {}).items()},
            learnt=value.get("learnt", []),
            spent=value.get("spent", {}),
        )


def load_plan(context: StageContext, window: Window, requests: Sequence[Request] | None = None) -> WindowPlan | None:
    """The written plan; None before there is one. `requests` are the window's, where they have been read already."""
    if not context.folder.exists(plan_name(window.index)):
        return None
    if requests is None:
        requests = read_range(context.folder, window.start, window.stop)
    return WindowPlan.from_json(context.folder.read_json(plan_name(window.index)), requests)
