"""Scenes drawn by rule, with exact captions and answers.

A scene is one shape on a plain background, still (an image) or moving along one axis (a clip). Everything that the
attributes leave open (extent, exact place, shade, grain, duration) comes from the `random.Random` that is passed
in, so a seed fixes every pixel. A tenth of the combinations is held out: the demo models never see it in training.
"""

import functools
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

Kind = Literal["image", "video"]
Colour = tuple[int, int, int]
Pixels = NDArray[np.uint8]

DESCRIBE = "Describe what you see."
COLOUR = "What colour is the shape?"
SHAPE = "Which shape is it?"
POSITION = "Where is the shape?"
MOTION = "Which way does it move?"
QUESTIONS: dict[Kind, tuple[str, ...]] = {
    "image": (DESCRIBE, COLOUR, SHAPE, POSITION),
    "video": (DESCRIBE, COLOUR, SHAPE, MOTION),
}

SHAPES = ("circle", "triangle", "cross")
COLOURS: dict[str, Colour] = {
    "red": (220, 30, 30),
    "green": (30, 160, 50),
    "blue": (40, 70, 225),
    "yellow": (240, 220, 40),
    "purple": (140, 40, 170),
    "orange": (250, 135, 20),
}
BACKGROUNDS: dict[str, Colour] = {
    "white": (250, 250, 250),
    "black": (8, 8, 8),
    "grey": (128, 128, 128),
    "pink": (255, 190, 205),
    "cyan": (120, 225, 235),
}
# Radius over the short side. Radii nearer than these, or a square beside the circle, held a 1.2 M parameter model at
# 0.88-0.91 exact captions.
SIZES = {"small": (0.15, 0.17), "large": (0.25, 0.28)}
# Centre over (width, height).
POSITIONS = {
    "at the left": (0.22, 0.5),
    "at the right": (0.78, 0.5),
    "at the top": (0.5, 0.22),
    "at the bottom": (0.5, 0.78),
    "in the centre": (0.5, 0.5),
}
# Direction along (x, y). One word after "moving" decides among all five: with "staying still" as the fifth wording,
# captions settled on "moving" before the direction had been read.
MOTIONS = {
    "moving left": (-1, 0),
    "moving right": (1, 0),
    "moving up": (0, -1),
    "moving down": (0, 1),
    "moving nowhere": (0, 0),
}
FRAME_RATES = (8.0, 10.0, 12.5, 15.0, 24.0)

_IMAGE_SHORT_SIDE = (96, 360)
_CLIP_SHORT_SIDE = (96, 240)
_WIDEST_ASPECT = 1.6
_CLIP_SECONDS = (2.0, 4.0)
_GRAIN_SIDE = 704  # px; the largest image is 360 x 576
_OVERSAMPLING = 4


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Scene:
    """One combination of attributes; `place` is a key of `POSITIONS` for images and of `MOTIONS` for videos.

    Raises ValueError when an attribute is not one of the known words.
    """

    kind: Kind
    shape: str
    colour: str
    size: str
    background: str
    place: str

    def __post_init__(self) -> None:
        words: dict[str, tuple[str, ...]] = {
            "kind": tuple(QUESTIONS),
            "shape": SHAPES,
            "colour": tuple(COLOURS),
            "size": tuple(SIZES),
            "background": tuple(BACKGROUNDS),
            "place": tuple(places(self.kind)),
        }
        for name, known in words.items():
            if getattr(self, name) not in known:
                raise ValueError(f"a scene's {name} is one of {', '.join(known)}; got {getattr(self, name)!r}")


def places(kind: Kind) -> dict[str, tuple[float, float]] | dict[str, tuple[int, int]]:
    """The words for `Scene.place`: positions for images, motions for videos."""
    return POSITIONS if kind == "image" else MOTIONS


@functools.cache
def all_scenes(kind: Kind) -> tuple[Scene, ...]:
    """Every combination of attributes (900 of each kind), in a fixed order."""
    return tuple(
        Scene(kind=kind, shape=shape, colour=colour, size=size, background=background, place=place)
        for shape, colour, size, background, place in itertools.product(
            SHAPES, COLOURS, SIZES, BACKGROUNDS, places(kind)
        )
    )


@functools.cache
def held_out(kind: Kind) -> frozenset[Scene]:
    """The tenth of `all_scenes(kind)` that no demo model is trained on."""
    scenes = all_scenes(kind)
    return frozenset(random.Random(f"held out {kind}").sample(scenes, len(scenes) // 10))


def caption(scene: Scene) -> str:
    """One sentence with every attribute, e.g. "a small red circle at the left on a grey background"."""
    return f"a {scene.size} {scene.colour} {scene.shape} {scene.place} on a {scene.background} background"


def expected(scene: Scene) -> dict[str, str]:
    """What the answer to `DESCRIBE` has to say, by class; shapes of small ones and of large ones are two classes."""
    return {
        "colour": scene.colour,
        "size": scene.size,
        f"{scene.size} shape": scene.shape,
        "position" if scene.kind == "image" else "motion": scene.place,
    }


def answer(scene: Scene, question: str) -> str:
    """The exact answer to one of `QUESTIONS[scene.kind]`; raises ValueError for any other question."""
    if question not in QUESTIONS[scene.kind]:
        raise ValueError(f"no answer to {question!r} about {scene.kind}s; ask one of {QUESTIONS[scene.kind]}")
    if question == COLOUR:
        return scene.colour
    if question == SHAPE:
        return scene.shape
    if question == POSITION:
        return scene.place
    if question == MOTION:
        direction = scene.place.removeprefix("moving ")
        return "still" if direction == "nowhere" else direction
    return caption(scene)


def draw_image(scene: Scene, rng: random.Random) -> Pixels:
    """`uint8 (H, W, 3)` RGB showing `scene`: short side 96-360 px (mostly below 200), aspect 1 to 1.6 either way."""
    _expect(scene, "image")
    width, height = _extent(rng, _IMAGE_SHORT_SIDE)
    radius = rng.uniform(*SIZES[scene.size]) * min(width, height)
    fraction_x, fraction_y = POSITIONS[scene.place]
    x = _inside(fraction_x + rng.uniform(-0.04, 0.04), width, radius)
    y = _inside(fraction_y + rng.uniform(-0.04, 0.04), height, radius)
    colour, background = _shades(scene, rng)
    canvas = _canvas(width, height, scene.shape, (x, y), radius, colour, background)
    return _with_grain(canvas, rng, rng.randint(2, 8))


def draw_clip(scene: Scene, rng: random.Random) -> tuple[Pixels, float]:
    """`(uint8 (T, H, W, 3) RGB, frames per second)` showing `scene`, 2-4 s, even sides, short side 96-240 px."""
    frames, fps = clip_frames(scene, rng)
    return np.stack(list(frames)), fps


def clip_frames(scene: Scene, rng: random.Random) -> tuple[Iterator[Pixels], float]:
    """`draw_clip`, one frame at a time."""
    _expect(scene, "video")
    width, height = (side - side % 2 for side in _extent(rng, _CLIP_SHORT_SIDE))
    radius = rng.uniform(*SIZES[scene.size]) * min(width, height)
    fps = rng.choice(FRAME_RATES)
    num_frames = round(rng.uniform(*_CLIP_SECONDS) * fps)
    colour, background = _shades(scene, rng)
    grain = rng.randint(2, 6)
    direction_x, direction_y = MOTIONS[scene.place]
    xs = _path(width, radius, direction_x, num_frames, rng)
    ys = _path(height, radius, direction_y, num_frames, rng)
    frames = (
        _with_grain(_canvas(width, height, scene.shape, centre, radius, colour, background), rng, grain)
        for centre in zip(xs, ys, strict=True)
    )
    return frames, fps


def _expect(scene: Scene, kind: Kind) -> None:
    if scene.kind != kind:
        raise ValueError(f"expected a scene of kind {kind!r}, got {scene}")


def _extent(rng: random.Random, short_side: tuple[int, int]) -> tuple[int, int]:
    """(width, height); the square favours short sides near the lower end, which are cheap to encode and to decode."""
    low, high = short_side
    short = low + int((high - low) * rng.random() ** 2)
    long = int(short * rng.uniform(1, _WIDEST_ASPECT))
    return (long, short) if rng.random() < 0.5 else (short, long)


def _shades(scene: Scene, rng: random.Random) -> tuple[Colour, Colour]:
    return _shade(COLOURS[scene.colour], rng, 14), _shade(BACKGROUNDS[scene.background], rng, 8)


def _shade(colour: Colour, rng: random.Random, spread: int) -> Colour:
    red, green, blue = (min(255, max(0, level + rng.randint(-spread, spread))) for level in colour)
    return red, green, blue


def _margin(radius: float) -> float:
    """The reach of the widest outline (a triangle's corner) and one pixel."""
    return radius * 1.1 + 1


def _inside(fraction: float, length: int, radius: float) -> float:
    return min(max(fraction * length, _margin(radius)), length - _margin(radius))


def _path(length: int, radius: float, direction: int, num_frames: int, rng: random.Random) -> list[float]:
    """Centres along one axis, px; a moving shape covers 70-100 % of the free span at a constant speed."""
    low, high = _margin(radius), length - _margin(radius)
    if direction == 0:
        return [rng.uniform(low, high)] * num_frames
    travel = (high - low) * rng.uniform(0.7, 1.0)
    start = rng.uniform(low, high - travel)
    steps = [start + travel * i / (num_frames - 1) for i in range(num_frames)]
    return steps if direction > 0 else steps[::-1]


def _canvas(
    width: int,
    height: int,
    shape: str,
    centre: tuple[float, float],
    radius: float,
    colour: Colour,
    background: Colour,
) -> Image.Image:
    image = Image.new("RGB", (width, height), background)
    left, top = (math.floor(c - _margin(radius)) for c in centre)
    mask = _coverage(shape, (centre[0] - left, centre[1] - top), radius)
    image.paste(colour, (left, top), mask)
    return image


def _coverage(shape: str, centre: tuple[float, float], radius: float) -> Image.Image:
    """The share of each pixel that the shape covers (0-255), on a tile just large enough."""
    tile = math.ceil(2 * _margin(radius)) + 2
    mask = Image.new("L", (tile * _OVERSAMPLING, tile * _OVERSAMPLING), 0)
    draw = ImageDraw.Draw(mask)
    (x, y), r = (c * _OVERSAMPLING for c in centre), radius * _OVERSAMPLING
    if shape == "circle":
        draw.ellipse([x - r, y - r, x + r, y + r], fill=255)
    elif shape == "triangle":
        reach = 1.1 * r
        draw.polygon([(x, y - reach), (x - reach, y + 0.85 * reach), (x + reach, y + 0.85 * reach)], fill=255)
    else:
        reach, arm = 1.05 * r, 0.34 * r
        draw.rectangle([x - reach, y - arm, x + reach, y + arm], fill=255)
        draw.rectangle([x - arm, y - reach, x + arm, y + reach], fill=255)
    return mask.reduce(_OVERSAMPLING)


@functools.cache
def _grain_table() -> NDArray[np.int16]:
    """Noise in [-64, 64]; cutting windows from one table is several times cheaper than drawing noise per frame."""
    return np.random.default_rng(7).integers(-64, 65, (_GRAIN_SIDE, _GRAIN_SIDE, 3), dtype=np.int16)


def _with_grain(image: Image.Image, rng: random.Random, strength: int) -> Pixels:
    """The image with noise of up to +-`strength` levels."""
    top, left = rng.randint(0, _GRAIN_SIDE - image.height), rng.randint(0, _GRAIN_SIDE - image.width)
    grain = _grain_table()[top : top + image.height, left : left + image.width] * strength // 64
    pixels: Pixels = np.clip(np.asarray(image, dtype=np.int16) + grain, 0, 255).astype(np.uint8)
    return pixels
