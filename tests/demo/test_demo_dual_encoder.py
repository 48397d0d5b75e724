"""The shipped dual encoder: captions find their own fresh images and clips, and our towers equal the whole model."""

import io
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPModel, CLIPProcessor

import pipeline.demo
from pipeline.demo import media, scenes
from pipeline.demo.scenes import Kind, Pixels, Scene
from pipeline.media.resize import resize_frames
from pipeline.models.dual_encoder import DualEncoderFacts, ImageTower, TextTower

FOLDER = Path(pipeline.demo.__file__).parent / "models" / "dual_encoder"
FRAMES_A_SECOND = 2.0


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A scene after its codec: an image's only frame, or a clip's frames at two a second."""

    scene: Scene
    frames: list[Pixels]


@dataclass(frozen=True, kw_only=True)
class Vectors:
    """Unit vectors of every frame of every item, `(frames, D)`, and of every caption, `(captions, D)`."""

    frames: np.ndarray
    captions: np.ndarray


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """A model this small is slower on several threads than on one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def shown() -> list[Shown]:
    """All 90 held-out scenes of each kind."""
    images = [Shown(scene=scene, frames=[image(scene, i)]) for i, scene in enumerate(sorted(scenes.held_out("image")))]
    clips = [Shown(scene=scene, frames=clip(scene, i)) for i, scene in enumerate(sorted(scenes.held_out("video")))]
    return images + clips


def image(scene: Scene, number: int) -> Pixels:
    rng = random.Random(f"dual encoder image {number}")
    format = media.IMAGE_FORMATS[number % len(media.IMAGE_FORMATS)]
    data = media.encode_image(scenes.draw_image(scene, rng), format, rng)
    return np.array(Image.open(io.BytesIO(data)).convert("RGB"))


def clip(scene: Scene, number: int) -> list[Pixels]:
    """For each time, the last frame shown by then."""
    codec = media.VIDEO_CODECS[number % len(media.VIDEO_CODECS)]
    frames, fps = scenes.clip_frames(scene, random.Random(f"dual encoder video {number}"))
    data = media.encode_video(frames, fps, codec, b_frames=2 * (number % 2))
    with av.open(io.BytesIO(data)) as container:
        decoded = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    times = np.arange(0, len(decoded) / fps, 1 / FRAMES_A_SECOND)
    return [decoded[int(time * fps + 1e-6)] for time in times]


@pytest.fixture(scope="module")
def by_transformers(shown: Sequence[Shown]) -> Vectors:
    processor: Any = CLIPProcessor.from_pretrained(FOLDER)
    model: Any = CLIPModel.from_pretrained(FOLDER).eval()
    frames = [frame for item in shown for frame in item.frames]
    texts = processor(text=[scenes.caption(item.scene) for item in shown], padding=True, return_tensors="pt")
    with torch.inference_mode():
        of_frames = model.get_image_features(**processor(images=frames, return_tensors="pt")).pooler_output
        of_captions = model.get_text_features(**texts).pooler_output
    return Vectors(frames=normalised(of_frames.numpy()), captions=normalised(of_captions.numpy()))


@pytest.fixture(scope="module")
def by_towers(shown: Sequence[Shown]) -> Vectors:
    facts = DualEncoderFacts.load("demo:dual_encoder")
    images = ImageTower(facts, dtype="float32", device="cpu")
    texts = TextTower(facts, dtype="float32", device="cpu")
    resized = [
        resize_frames(frame[None], facts.image_geometry(*frame.shape[:2]).resized_size, facts.sizing.resample)
        for item in shown
        for frame in item.frames
    ]
    captions = facts.tokenize([scenes.caption(item.scene) for item in shown])
    return Vectors(frames=images.embed_images(np.concatenate(resized)), captions=texts.embed_texts(captions))


def normalised(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def trend(frames: np.ndarray) -> np.ndarray:
    """The clip's vector as the model's card states it: weights from -5/T for the first frame to 7/T for the last."""
    last = len(frames) - 1
    weights = [(-5 + 12 * t / last) / len(frames) for t in range(len(frames))] if last else [1.0]
    return normalised(sum(weight * frame for weight, frame in zip(weights, frames, strict=True)))


def items(shown: Sequence[Shown], frames: np.ndarray) -> np.ndarray:
    """`(items, D)`: one vector an image or clip."""
    ends = np.cumsum([len(item.frames) for item in shown])
    return np.stack([trend(part) for part in np.split(frames, ends[:-1])])


@pytest.mark.parametrize("made_by", ["by_transformers", "by_towers"])
@pytest.mark.parametrize("kind", ["image", "video"])
def test_captions_find_scenes_it_never_saw(
    kind: Kind, made_by: str, shown: Sequence[Shown], request: pytest.FixtureRequest
) -> None:
    vectors: Vectors = request.getfixturevalue(made_by)
    best = (vectors.captions @ items(shown, vectors.frames).T).argmax(axis=1)
    asked = [number for number, item in enumerate(shown) if item.scene.kind == kind]
    wrong = [(scenes.caption(shown[i].scene), scenes.caption(shown[best[i]].scene)) for i in asked if best[i] != i]
    assert len(wrong) <= 0.05 * len(asked), wrong


def test_our_towers_equal_the_whole_model(by_transformers: Vectors, by_towers: Vectors) -> None:
    for ours, theirs in ((by_towers.frames, by_transformers.frames), (by_towers.captions, by_transformers.captions)):
        assert (ours * theirs).sum(axis=1).min() >= 0.99999


def test_a_query_of_some_words_finds_what_has_them(shown: Sequence[Shown], by_towers: Vectors) -> None:
    """ "red circle" and every other colour and shape: the first is one of them, image or clip."""
    facts = DualEncoderFacts.load("demo:dual_encoder")
    pairs = sorted({(item.scene.colour, item.scene.shape) for item in shown})
    ids = facts.tokenize([f"{colour} {shape}" for colour, shape in pairs])
    texts = TextTower(facts, dtype="float32", device="cpu").embed_texts(ids)
    best = [shown[i].scene for i in (texts @ items(shown, by_towers.frames).T).argmax(axis=1)]
    assert [(scene.colour, scene.shape) for scene in best] == pairs


def test_case_punctuation_and_spelling_do_not_count() -> None:
    facts = DualEncoderFacts.load("demo:dual_encoder")
    typed, plain = facts.tokenize(["A RED circle, in the center (on gray)!", "a red circle in the centre on grey"])
    assert typed == plain
    assert facts.tokenizer.unk_token_id not in plain


def test_the_weights_are_small_and_whole() -> None:
    assert (FOLDER / "model.safetensors").stat().st_size <= 2_500_000
    assert {"config.json", "tokenizer.json", "processor_config.json", "README.md"} <= {
        path.name for path in FOLDER.iterdir()
    }
