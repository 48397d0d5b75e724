"""Encoder batches filled to a token budget, as the tower takes its items. Pure and deterministic.

The budget is what a batch holds in memory: activations grow with its computed tokens, padding included, and attention,
which is within an item, never takes more than of one item of as many tokens.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pipeline.planning.bounds import bucket_bounds
from pipeline.planning.geometry import PatchRule, SizeRule
from pipeline.planning.image_size import MaxPatches
from pipeline.schema import Geometry, Modality

MAX_FRAME_BYTES = 64 * 2**20  # of a batch: a worker holds a few, and the object store some for every worker
# Of a padded tower in a window. Web images at native sizes, 4,096 a window and 65,536 patches a batch (`scripts/bench/
# padding`): 0.8 % padding and 96 % fill with 8, which 16 and 32 make 0.78 % at the least, in batches less full.
MAX_SHAPES = 8
# As few bounds as pad no more than this: before each a batch ends that is not full.
_ENOUGH_PADDING = 0.02
# A batch goes on across a bound as long as no more of it than this is padding.
_MAX_PADDING_ACROSS = 0.05

# How a tower takes a batch. Packed: items one after another, of any shapes, nothing is padded. Padded: each frame is
# padded to the longest one. Fixed: frames, or tiles, of one shape only, however many of them an item has.
Layout = Literal["fixed", "packed", "padded"]


def tower_layout(rule: SizeRule | None) -> Layout:
    """Of a tower whose processor sizes by `rule`; None: by arithmetic that is not known."""
    if isinstance(rule, PatchRule):
        return "packed"
    return "padded" if rule is not None and isinstance(rule.resize, MaxPatches) else "fixed"


def computed_tokens(layout: Layout, geometries: Sequence[Geometry]) -> int:
    """Patches that a tower works on for a batch, those of padding included."""
    if layout == "padded":
        return sum(g.grid[0] for g in geometries) * max(g.grid[1] * g.grid[2] for g in geometries)
    return sum(g.grid[0] * g.grid[1] * g.grid[2] for g in geometries)


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
    def tokens(self) -> int:
        """Patches of its own."""
        t, h, w = self.geometry.grid
        return t * h * w

    @property
    def frame_bytes(self) -> int:
        """Bytes of its resized `uint8` frames."""
        height, width = self.geometry.shown_size
        return self.num_frames * height * width * 3


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchBudget:
    """What one encoder batch may hold. An item above a limit by itself travels alone.

    `layouts` of the tower by modality; one that is not named is fixed. A padded tower has at most `max_shapes` bounds
    a window.
    """

    max_items: int
    max_tokens: int
    max_frame_bytes: int = MAX_FRAME_BYTES
    layouts: Mapping[Modality, Layout] = field(default_factory=dict)
    max_shapes: int = MAX_SHAPES


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedBatch:
    """Items of one modality, largest first. `digest` names the batch: equal items, shapes and order give equal digests.

    `computed_tokens` are the patches that the tower works on, `padded_tokens` those of them that are padding.
    """

    window: int
    batch: int
    items: tuple[ShapedMedia, ...]
    computed_tokens: int

    @property
    def digest(self) -> str:
        """16 hex digits."""
        terms = [[*item.shape, item.identity] for item in self.items]
        return hashlib.sha256(json.dumps([self.window, self.batch, terms]).encode()).hexdigest()[:16]

    @property
    def padded_tokens(self) -> int:
        """Patches that no item has."""
        return self.computed_tokens - sum(item.tokens for item in self.items)


def plan_window(window: int, probed: Sequence[ShapedMedia], budget: BatchBudget) -> list[PlannedBatch]:
    """Every item in exactly one batch, whatever the order they come in; largest first (a straggler starts early)."""
    groups: dict[tuple[Layout, Modality, int, int], list[ShapedMedia]] = defaultdict(list)
    for item in sorted(probed, key=_size_order):
        layout = budget.layouts.get(item.modality, "fixed")
        _, h, w = item.geometry.grid
        groups[(layout, item.modality, *((h, w) if layout == "fixed" else (0, 0)))].append(item)
    batches: list[tuple[Layout, list[ShapedMedia]]] = []
    for (layout, *_), items in groups.items():
        filled = _fill_padded(items, budget) if layout == "padded" else _fill(items, budget)
        batches += ((layout, batch) for batch in filled)
    batches.sort(key=lambda each: (-each[1][0].frame_bytes, each[1][0].position))
    return [
        PlannedBatch(
            window=window,
            batch=number,
            items=tuple(items),
            computed_tokens=computed_tokens(layout, [item.geometry for item in items]),
        )
        for number, (layout, items) in enumerate(batches)
    ]


def _size_order(item: ShapedMedia) -> tuple[int, int, int, int, int]:
    """Largest first, equal shapes side by side."""
    t, h, w = item.geometry.grid
    return (-t * h * w, h, w, item.num_frames, item.position)


def _fill(items: Iterable[ShapedMedia], budget: BatchBudget) -> list[list[ShapedMedia]]:
    """Of items, largest first, each batch takes the largest one that is left, and then the largest that still fit.

    So sizes that are near each other come together, and only the room behind them goes to smaller ones.
    """
    waiting: dict[int, list[ShapedMedia]] = defaultdict(list)
    for item in items:
        # Tokens and bytes as one number: the larger of an item's shares of the two limits.
        waiting[max(item.tokens * budget.max_frame_bytes, item.frame_bytes * budget.max_tokens)].append(item)
    loads = sorted(waiting)
    for same in waiting.values():
        same.reverse()  # the first of them are taken off the end
    batches = []
    while loads:
        batch: list[ShapedMedia] = []
        room = budget.max_tokens * budget.max_frame_bytes
        index = len(loads) - 1
        while index >= 0 and len(batch) < budget.max_items:
            load = loads[index]
            same = waiting[load]
            count = max(1, min(len(same), budget.max_items - len(batch), room // load))
            batch += reversed(same[-count:])
            del same[-count:]
            if not same:
                del loads[index]
            room -= count * load
            index = bisect_right(loads, room) - 1
        batches.append(batch)
    return batches


def _fill_padded(items: Sequence[ShapedMedia], budget: BatchBudget) -> list[list[ShapedMedia]]:
    """Each batch takes the longest frames that are left and still fit, and ends where the next lie behind a bound.

    Unless they would cost it little padding: else what is left of each bucket would be a batch that is not full.
    """
    waiting: dict[int, list[ShapedMedia]] = defaultdict(list)  # by number of frames, the longest last
    rows: dict[int, int] = defaultdict(int)
    for item in sorted(reversed(items), key=_length):
        waiting[item.geometry.grid[0]].append(item)
        rows[_length(item)] += item.geometry.grid[0]
    bounds = bucket_bounds(rows, budget.max_shapes, max_padding=_ENOUGH_PADDING)
    batches = []
    while waiting:
        count = max(waiting, key=lambda count: (_length(waiting[count][-1]), count))
        longest = _length(waiting[count][-1])
        bound = bounds[bisect_left(bounds, longest) - 1] if longest > bounds[0] else 0
        batch: list[ShapedMedia] = []
        frames = tokens = num_bytes = 0
        while count:
            item = waiting[count][-1]
            frames, tokens, num_bytes = frames + count, tokens + item.tokens, num_bytes + item.frame_bytes
            padding = frames * longest - tokens
            is_behind = _length(item) <= bound and padding > _MAX_PADDING_ACROSS * frames * longest
            if batch and (num_bytes > budget.max_frame_bytes or is_behind):
                break
            batch.append(waiting[count].pop())
            if not waiting[count]:
                del waiting[count]
            room = budget.max_tokens // longest - frames if len(batch) < budget.max_items else 0
            fitting = [count for count in waiting if count <= room]
            count = max(fitting, key=lambda count: (_length(waiting[count][-1]), count), default=0)
        batches.append(batch)
    return batches


def _length(item: ShapedMedia) -> int:
    """Patches of a frame."""
    return item.geometry.grid[1] * item.geometry.grid[2]
