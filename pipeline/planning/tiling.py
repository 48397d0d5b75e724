"""Tiles and feature lengths of frames that reach a model's processor in their own size, without pixels. Pure.

The arithmetic is that of the processors themselves (transformers 5.24), with which tests compare it on random sizes;
each class names its file. The helpers that processors have for it (`_get_num_multimodal_tokens`,
`get_number_of_image_patches`) do not do: they count markers as tokens, and Idefics3's takes other sides than its own
resizing does (of 1,000 random sizes 397 came out otherwise where `longest_edge` was not whole tiles).
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from dataclasses import dataclass

Grid = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedTiles:
    """Every frame is shown in so many tiles of one size, and becomes so many features, whatever its own size.

    Fixed towers (LLaVA-1.5), resamplers and pooling projectors with a fixed budget (BLIP-2, Gemma 3), frames of videos
    (LLaVA-OneVision, InternVL). `grid_of_tile` is (rows, columns) of patches; `item_tokens` an item has besides.
    """

    grid_of_tile: tuple[int, int]
    tiles_of_frame: int
    frame_tokens: int
    item_tokens: int = 0

    def counts(self, num_frames: int, height: int, width: int) -> tuple[Grid, int]:
        """(tiles, rows, columns) of patches, and features."""
        grid = (num_frames * self.tiles_of_frame, *self.grid_of_tile)
        return grid, num_frames * self.frame_tokens + self.item_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class CanvasTiles:
    """InternVL: the canvas of `min_tiles` to `max_tiles` whose shape is nearest, and the image once more as a whole.

    `get_optimal_tiled_canvas` of `models/got_ocr2/image_processing_got_ocr2.py`. `tile_pixels` are those of a tile.
    """

    grid_of_tile: tuple[int, int]
    tile_tokens: int
    tile_pixels: int
    min_tiles: int
    max_tiles: int

    def counts(self, num_frames: int, height: int, width: int) -> tuple[Grid, int]:
        """Of an image: (tiles, rows, columns) of patches, and features."""
        ratios, canvases = _canvases(self.min_tiles, self.max_tiles)
        ratio = width / height
        above = bisect_left(ratios, ratio)
        near = [(abs(ratio - ratios[i]), i) for i in (above - 1, above) if 0 <= i < len(ratios)]
        least = min(near)[0]
        # In the processor's order, by tiles: of those that are equally near the first, or a larger one if there is
        # more than half as much of the image.
        equal = sorted(found for distance, i in near if distance == least for found in canvases[i])
        best = equal[0][0]
        for tiles, _ in equal[1:]:
            if width * height > 0.5 * self.tile_pixels * tiles:
                best = tiles
        shown = best if best == 1 else best + 1
        return (shown, *self.grid_of_tile), shown * self.tile_tokens


@functools.cache
def _canvases(least: int, most: int) -> tuple[list[float], list[list[tuple[int, int]]]]:
    """Ratios of width to height, ascending, and of each the canvases: (tiles, columns), by tiles."""
    sides = range(1, most + 1)
    by_ratio: dict[float, list[tuple[int, int]]] = {}
    for columns, rows in ((c, r) for c in sides for r in sides if least <= c * r <= most):
        by_ratio.setdefault(columns / rows, []).append((columns * rows, columns))
    ratios = sorted(by_ratio)
    return ratios, [sorted(by_ratio[ratio]) for ratio in ratios]


@dataclass(frozen=True, kw_only=True, slots=True)
class EdgeTiles:
    """Idefics3, SmolVLM: the longer side becomes `longest_edge`, both are filled up to whole tiles of `tile_edge`.

    An image of more than one tile is shown as a whole besides. `_resize_output_size_rescale_to_max_len`,
    `resize_for_vision_encoder` and `split_images` of `models/idefics3/image_processing_idefics3.py`.
    """

    grid_of_tile: tuple[int, int]
    tile_tokens: int
    longest_edge: int
    tile_edge: int

    def counts(self, num_frames: int, height: int, width: int) -> tuple[Grid, int]:
        """Of an image: (tiles, rows, columns) of patches, and features."""
        tall, wide = _with_longer_side(height, width, self.longest_edge)
        if width >= height:
            tall += tall % 2
        else:
            wide += wide % 2
        tall, wide = max(1, tall), max(1, wide)
        if max(tall, wide) > _MOST_PIXELS:
            tall, wide = (max(1, side) for side in _with_longer_side(tall, wide, _MOST_PIXELS))
        edge = self.tile_edge
        tall, wide = _with_longer_side(tall, wide, math.ceil(max(tall, wide) / edge) * edge)
        tiles = math.ceil(tall / edge) * math.ceil(wide / edge)
        shown = tiles if tiles == 1 else tiles + 1
        return (shown, *self.grid_of_tile), shown * self.tile_tokens


def _with_longer_side(height: int, width: int, edge: int) -> tuple[int, int]:
    """(height, width) with the longer side of `edge` and the same ratio, the other rounded down."""
    ratio = width / height
    return (int(edge / ratio), edge) if width >= height else (edge, int(edge * ratio))


_MOST_PIXELS = 4096  # a side of what Idefics3's processor makes: `MAX_IMAGE_SIZE`


@dataclass(frozen=True, kw_only=True, slots=True)
class PinpointTiles:
    """LLaVA-NeXT, LLaVA-OneVision: tiles at the one of `resolutions` (height, width) that loses least, and the whole.

    Features of the padding are cut off, each row of them ends in one more, and above `max_tiles` they are pooled.
    `select_best_resolution` of `image_processing_utils.py`, `_get_number_of_features` and `_get_unpadded_features` of
    `models/llava_next/processing_llava_next.py` and `models/llava_onevision/processing_llava_onevision.py`.
    `token_side` is features a side of a tile, `whole_tokens` those of the whole image.
    """

    grid_of_tile: tuple[int, int]
    resolutions: tuple[tuple[int, int], ...]
    tile_edge: int
    token_side: int
    whole_tokens: int
    max_tiles: int | None = None

    def counts(self, num_frames: int, height: int, width: int) -> tuple[Grid, int]:
        """Of an image: (tiles, rows, columns) of patches, and features."""
        rows, columns = (side // self.tile_edge for side in _best_resolution(self.resolutions, height, width))
        grid = (1 + rows * columns, *self.grid_of_tile)
        return grid, self.whole_tokens + self._tile_tokens(height, width, rows, columns)

    def _tile_tokens(self, height: int, width: int, rows: int, columns: int) -> int:
        tall, wide = rows * self.token_side, columns * self.token_side
        if width / height > wide / tall:
            shown = int(round(height * (wide / width), 7))
            tall -= (tall - shown) // 2 * 2
        else:
            shown = int(round(width * (tall / height), 7))
            wide -= (wide - shown) // 2 * 2
        if self.max_tiles is not None:
            ratio = math.sqrt(tall * wide / (self.max_tiles * self.token_side**2))
            if ratio > _POOLED_FROM:
                tall, wide = int(tall // ratio), int(wide // ratio)
        return tall * wide + tall


_POOLED_FROM = 1.1


def _best_resolution(resolutions: tuple[tuple[int, int], ...], height: int, width: int) -> tuple[int, int]:
    """What keeps most pixels, and of those that keep as many the smallest."""
    areas, ascending, descending = _by_area(resolutions)
    pixels = height * width
    for tall, wide in ascending[bisect_left(areas, pixels) :]:
        if tall >= height and wide >= width:
            return tall, wide  # it keeps them all
    best, most_kept, least_area = descending[0], 0, areas[-1] + 1
    for tall, wide in descending:
        area = tall * wide
        if area < most_kept:
            break  # it can keep no more than it has
        scale = min(wide / width, tall / height)
        kept = min(int(width * scale) * int(height * scale), pixels)
        if kept > most_kept or (kept == most_kept and area < least_area):
            best, most_kept, least_area = (tall, wide), kept, area
    return best


_Sizes = tuple[tuple[int, int], ...]


@functools.cache
def _by_area(sizes: _Sizes) -> tuple[tuple[int, ...], _Sizes, _Sizes]:
    """Areas, ascending, the sizes as they are, and the largest first; those of one area always in their order."""
    ascending = tuple(sorted(sizes, key=math.prod))
    descending = tuple(sorted(sizes, key=lambda sides: -math.prod(sides)))
    return tuple(map(math.prod, ascending)), ascending, descending


TileRule = FixedTiles | CanvasTiles | EdgeTiles | PinpointTiles
