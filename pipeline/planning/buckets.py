"""Encoder batches of one shape under a token budget. Pure and deterministic.

Version 1: exact shapes, filled greedily in item order, so that no batch holds a padded token.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.schema import Geometry, Modality

MAX_FRAME_BYTES = 64 * 2**20  # of a batch: a worker holds a few, and the object store some for every worker


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapedMedia:
    """What the planner needs to know of one media item; `position` is the caller's own index of it."""

    position: int
    modality: Modality
    num_frames: int
    geometry: Geometry
    identity: str

    @property
    def shape(self) -> tuple[str, int, int, int]:
        """Modality, frames, height and width of the tensor the encoder will be handed."""
        return (self.modality, self.num_frames, *self.geometry.shown_size)

    @property
    def frame_bytes(self) -> int:
        """Bytes of its resized `uint8` frames."""
        height, width = self.geometry.shown_size
        return self.num_frames * height * width * 3


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchBudget:
    """What one encoder batch may hold. An item above a limit by itself travels alone."""

    max_items: int
    max_tokens: int
    max_frame_bytes: int = MAX_FRAME_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedBatch:
    """Items of one bucket. `digest` names the batch: equal items, shapes and order give equal digests."""

    window: int
    batch: int
    items: tuple[ShapedMedia, ...]

    @property
    def digest(self) -> str:
        """16 hex digits."""
        terms = [[*item.shape, item.identity] for item in self.items]
        return hashlib.sha256(json.dumps([self.window, self.batch, terms]).encode()).hexdigest()[:16]

    @property
    def computed_tokens(self) -> int:
        """Patches the tower works on."""
        t, h, w = self.items[0].geometry.grid
        return len(self.items) * t * h * w


def plan_window(window: int, probed: Sequence[ShapedMedia], budget: BatchBudget) -> list[PlannedBatch]:
    """Every item in exactly one batch; batches of one shape; largest shapes first (a straggler starts early)."""
    by_shape: dict[tuple[str, int, int, int], list[ShapedMedia]] = defaultdict(list)
    for item in probed:
        by_shape[item.shape].append(item)
    shapes = sorted(by_shape, key=lambda shape: (-by_shape[shape][0].frame_bytes, shape))
    groups = [chunk for shape in shapes for chunk in _fill(by_shape[shape], budget)]
    return [PlannedBatch(window=window, batch=number, items=chunk) for number, chunk in enumerate(groups)]


def _fill(items: list[ShapedMedia], budget: BatchBudget) -> list[tuple[ShapedMedia, ...]]:
    t, h, w = items[0].geometry.grid
    size = max(
        1, min(budget.max_items, budget.max_tokens // (t * h * w), budget.max_frame_bytes // items[0].frame_bytes)
    )
    return [tuple(items[i : i + size]) for i in range(0, len(items), size)]
