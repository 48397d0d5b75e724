"""Scenes: the combinations, their words, and what the drawings show."""

import random

import numpy as np
import pytest

from pipeline.demo import scenes
from pipeline.demo.scenes import Scene

STILL = Scene(kind="image", shape="circle", colour="red", size="large", background="white", place="at the right")
MOVING = Scene(kind="video", shape="cross", colour="blue", size="small", background="black", place="moving left")


def object_centre(pixels: np.ndarray, colour: str) -> tuple[float, float]:
    """(x, y) over (width, height) of the pixels within 60 levels of `colour`."""
    near = np.abs(pixels.astype(int) - scenes.COLOURS[colour]).max(axis=-1) < 60
    ys, xs = np.nonzero(near)
    assert len(xs) > 50, f"too few {colour} pixels: {len(xs)}"
    return xs.mean() / pixels.shape[1], ys.mean() / pixels.shape[0]


@pytest.mark.parametrize("kind", ["image", "video"])
def test_every_combination_once_and_a_tenth_held_out(kind: scenes.Kind) -> None:
    everything = scenes.all_scenes(kind)
    assert len(everything) == len(set(everything)) == 3 * 6 * 2 * 5 * 5
    assert len(scenes.held_out(kind)) == 90
    assert scenes.held_out(kind) < set(everything)


@pytest.mark.parametrize("kind", ["image", "video"])
def test_captions_tell_all_scenes_apart(kind: scenes.Kind) -> None:
    captions = {scenes.caption(scene) for scene in scenes.all_scenes(kind)}
    assert len(captions) == len(scenes.all_scenes(kind))


@pytest.mark.parametrize(
    ("scene", "question", "expected"),
    [
        (STILL, scenes.DESCRIBE, "a large red circle at the right on a white background"),
        (STILL, scenes.COLOUR, "red"),
        (STILL, scenes.SHAPE, "circle"),
        (STILL, scenes.POSITION, "at the right"),
        (MOVING, scenes.DESCRIBE, "a small blue cross moving left on a black background"),
        (MOVING, scenes.MOTION, "left"),
    ],
)
def test_answers(scene: Scene, question: str, expected: str) -> None:
    assert scenes.answer(scene, question) == expected


def test_a_shape_that_moves_nowhere_is_still() -> None:
    scene = Scene(kind="video", shape="cross", colour="blue", size="small", background="black", place="moving nowhere")
    assert scenes.answer(scene, scenes.MOTION) == "still"


def test_questions_of_the_other_kind_are_refused() -> None:
    with pytest.raises(ValueError, match="Which way does it move"):
        scenes.answer(STILL, scenes.MOTION)


def test_unknown_attributes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"place is one of at the left.*moving left"):
        Scene(kind="image", shape="circle", colour="red", size="large", background="white", place="moving left")


def test_a_seed_fixes_the_pixels() -> None:
    first, second, other = (scenes.draw_image(STILL, random.Random(seed)) for seed in (5, 5, 6))
    np.testing.assert_array_equal(first, second)
    assert first.shape != other.shape or (first != other).any()
    (clip, fps), (again, fps_again) = (scenes.draw_clip(MOVING, random.Random(5)) for _ in range(2))
    np.testing.assert_array_equal(clip, again)
    assert fps == fps_again


def test_images_keep_to_their_extents() -> None:
    rng = random.Random(0)
    shapes = [scenes.draw_image(scene, rng).shape for scene in scenes.all_scenes("image")[::9]]
    assert all(96 <= min(h, w) <= 360 and max(h, w) <= 1.6 * min(h, w) and c == 3 for h, w, c in shapes)
    assert any(h > w for h, w, _ in shapes) and any(h < w for h, w, _ in shapes)
    assert any(min(h, w) >= 300 for h, w, _ in shapes)


def test_clips_keep_to_their_extents() -> None:
    rng = random.Random(0)
    for scene in scenes.all_scenes("video")[::45]:
        frames, fps = scenes.draw_clip(scene, rng)
        num_frames, height, width, _ = frames.shape
        assert frames.dtype == np.uint8
        assert height % 2 == width % 2 == 0
        assert 96 <= min(height, width) <= 240
        assert fps in scenes.FRAME_RATES
        assert 1.95 <= num_frames / fps <= 4.05


@pytest.mark.parametrize("place", scenes.POSITIONS)
def test_the_object_is_drawn_where_the_scene_says(place: str) -> None:
    scene = Scene(kind="image", shape="circle", colour="green", size="small", background="white", place=place)
    x, y = object_centre(scenes.draw_image(scene, random.Random(1)), "green")
    expected_x, expected_y = scenes.POSITIONS[place]
    assert abs(x - expected_x) < 0.07 and abs(y - expected_y) < 0.07


@pytest.mark.parametrize("place", scenes.MOTIONS)
def test_the_object_moves_as_the_scene_says(place: str) -> None:
    scene = Scene(kind="video", shape="circle", colour="red", size="small", background="cyan", place=place)
    frames, _ = scenes.draw_clip(scene, random.Random(2))
    (x0, y0), (x1, y1) = object_centre(frames[0], "red"), object_centre(frames[-1], "red")
    moved = np.array([x1 - x0, y1 - y0])
    np.testing.assert_array_equal(np.sign(moved.round(1)), scenes.MOTIONS[place])
