"""Which arithmetic a processor could follow that is handed frames in their own size, read from its settings.

What is read is a guess: it is for the caller to hold it against what the processor does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from pipeline.planning.geometry import FramePatchRule, OwnSizeRule
from pipeline.planning.tiling import CanvasTiles, EdgeTiles, FixedTiles, Grid, PinpointTiles
from pipeline.schema import Modality

# (frames, height, width) → (tiles, rows, columns) of patches and features: what the processor makes of a blank.
Learn = Callable[[int, int, int], tuple[Grid, int]]
_BLANK = 64  # a side, in pixels


def possible_rules(processor: Any, modality: Modality, learn: Learn) -> Iterator[OwnSizeRule]:
    """Those that the processor's settings allow for, the more particular first."""
    part = getattr(processor, f"{modality}_processor")
    if modality == "video":
        yield from _of_videos(part, learn)
        return
    (tiles, *grid_of_tile), tokens = learn(1, _BLANK, _BLANK)
    rows, columns = grid_of_tile
    common: dict[str, Any] = {"grid_of_tile": (rows, columns)}
    if getattr(part, "image_grid_pinpoints", None):
        yield PinpointTiles(**common, **_pinpoints(processor, part))
    if getattr(part, "max_patches", None) and getattr(part.size, "height", None):
        yield CanvasTiles(
            **common,
            tile_tokens=tokens // tiles,
            tile_pixels=part.size.height * part.size.width,
            min_tiles=part.min_patches,
            max_tiles=part.max_patches,
        )
    if getattr(part, "max_image_size", None) and getattr(part.size, "longest_edge", None):
        yield EdgeTiles(
            **common,
            tile_tokens=tokens // tiles,
            longest_edge=part.size.longest_edge,
            tile_edge=part.max_image_size["longest_edge"],
        )
    yield FixedTiles(**common, tiles_of_frame=tiles, frame_tokens=tokens)


def _of_videos(part: Any, learn: Learn) -> Iterator[OwnSizeRule]:
    names = ("patch_size", "merge_size", "temporal_patch_size")
    if all(getattr(part, name, None) is not None for name in names):
        yield FramePatchRule(
            **{name: getattr(part, name) for name in names},
            min_pixels=part.size["shortest_edge"],
            max_pixels=part.size["longest_edge"],
            max_video_tokens=part.max_video_tokens if getattr(part, "cap_pixels_per_frame", None) else None,
        )
        return
    ((tiles, rows, columns), two), (_, four) = learn(2, _BLANK, _BLANK), learn(4, _BLANK, _BLANK)
    frame_tokens = (four - two) // 2
    yield FixedTiles(
        grid_of_tile=(rows, columns),
        tiles_of_frame=tiles // 2,
        frame_tokens=frame_tokens,
        item_tokens=two - 2 * frame_tokens,
    )


def _pinpoints(processor: Any, part: Any) -> dict[str, Any]:
    edge = _tile_edge(part)
    whole = getattr(processor, "num_image_tokens", None)
    side = edge // processor.patch_size if whole is None else math.isqrt(whole)
    tokens = side**2 + processor.num_additional_image_tokens if whole is None else whole
    pooled_above = re.fullmatch(r"anyres_max_(\d+)", getattr(processor, "vision_aspect_ratio", None) or "")
    return {
        "resolutions": tuple((height, width) for height, width in part.image_grid_pinpoints),
        "tile_edge": edge,
        "token_side": side,
        # `default` leaves out one, that of the class token.
        "whole_tokens": tokens - (processor.vision_feature_select_strategy == "default"),
        "max_tiles": int(pooled_above[1]) if pooled_above else None,
    }


def _tile_edge(part: Any) -> int:
    crop = getattr(part, "crop_size", None)
    return int((crop.height if crop else None) or part.size.height or part.size.shortest_edge)
