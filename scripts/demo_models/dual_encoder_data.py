"""What the dual encoder is trained on: drawn media as its image tower sees them, and texts that a user would type."""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from pipeline.demo import scenes
from pipeline.demo.scenes import Kind, Scene
from pipeline.media.resize import resize_frames
from scripts.demo_models.dual_encoder_build import GRID, SIDE
from scripts.demo_models.items import Item, seen_scenes, training_item

OUTLINE_CELLS = 4  # a side of a patch, for the share of object pixels
OUTLINE_SIDE = GRID * OUTLINE_CELLS
ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "size": tuple(scenes.SIZES),
    "colour": tuple(scenes.COLOURS),
    "shape": scenes.SHAPES,
    "place": (*scenes.POSITIONS, *scenes.MOTIONS),
    "background": tuple(scenes.BACKGROUNDS),
}
UNMENTIONED = -1

_MENTIONED_SHARE = 0.6
_FILLERS = {"a", "on", "at", "in", "the", "background"}
_FILLERS_KEPT = 0.6
_STRANGE_SHARE = 0.1  # of partial queries that begin with words the tokenizer does not know


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """An image (T is 1) or a clip: `frames` `uint8 (T, 3, 96, 96)` as the processor resizes them.

    `outline` is `(T, 24, 24)`: the share of object pixels in each 4 x 4 px cell.
    """

    scene: Scene
    frames: torch.Tensor
    outline: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """A text, and the number of the word that it asks for in each of `ATTRIBUTES`, `UNMENTIONED` where it asks none."""

    text: str
    wanted: tuple[int, ...]


def example(item: Item) -> Example:
    """The item's frames as the image tower takes them."""
    pixels = item.pixels if item.scene.kind == "video" else item.pixels[None]
    frames = torch.from_numpy(resize_frames(pixels, (SIDE, SIDE))).permute(0, 3, 1, 2).contiguous()
    return Example(scene=item.scene, frames=frames, outline=_outline(frames))


def _outline(frames: torch.Tensor) -> torch.Tensor:
    """Object pixels are those that differ from the median (the background) by more than 32 levels in a channel."""
    pixels = frames.float()
    background = pixels.flatten(2)[:, :, ::7].median(dim=2).values
    is_object = ((pixels - background[:, :, None, None]).abs().amax(dim=1) > 32).float()
    cell = SIDE // OUTLINE_SIDE
    return is_object.view(-1, OUTLINE_SIDE, cell, OUTLINE_SIDE, cell).mean(dim=(2, 4))


def build_pool(items_a_scene: dict[Kind, int], backgrounds: Collection[str], seed: int) -> list[Example]:
    """`items_a_scene` examples of each scene on `backgrounds` that is not held out, formats and codecs by weight."""
    rng = random.Random(seed)
    return [
        example(training_item(scene, rng))
        for kind, count in items_a_scene.items()
        for scene in seen_scenes(kind)
        if scene.background in backgrounds
        for _ in range(count)
    ]


def attributes(scene: Scene) -> tuple[int, ...]:
    """The number of the scene's word in each of `ATTRIBUTES`."""
    return tuple(words.index(getattr(scene, name)) for name, words in ATTRIBUTES.items())


def full_query(scene: Scene) -> Query:
    """The scene's caption."""
    return Query(text=scenes.caption(scene), wanted=attributes(scene))


def partial_query(scene: Scene, rng: random.Random) -> Query:
    """Some of the scene's attributes in the captions' order, with some of the words between them left out."""
    mentioned = {name for name in ATTRIBUTES if rng.random() < _MENTIONED_SHARE} or {"colour"}
    said = {name: getattr(scene, name) if name in mentioned else "" for name in ATTRIBUTES}
    ending = f"on a {said['background']} background" if said["background"] else ""
    words = f"a {said['size']} {said['colour']} {said['shape']} {said['place']} {ending}".split()
    kept = [word for word in words if word not in _FILLERS or rng.random() < _FILLERS_KEPT]
    strange = ["please", "find"] if rng.random() < _STRANGE_SHARE else []
    wanted = [
        number if name in mentioned else UNMENTIONED for name, number in zip(ATTRIBUTES, attributes(scene), strict=True)
    ]
    return Query(text=" ".join(strange + kept), wanted=tuple(wanted))


def matches(queries: Sequence[Query], shown: Sequence[Scene]) -> torch.Tensor:
    """`bool (queries, scenes)`: whether a scene has all that a query asks for."""
    wanted = torch.tensor([query.wanted for query in queries])[:, None]
    given = torch.tensor([attributes(scene) for scene in shown])[None]
    return ((wanted == UNMENTIONED) | (wanted == given)).all(dim=-1)
