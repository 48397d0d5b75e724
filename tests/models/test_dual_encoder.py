"""Each tower alone equals the whole model on what the model's own processor makes of texts and original images."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from pipeline.errors import ConfigError
from pipeline.media.resize import crop_frames, resize_frames
from pipeline.models.dual_encoder import DualEncoderFacts, ImageTower, TextTower
from pipeline.models.embedder import FrameEncoder
from pipeline.planning.image_size import ImageGeometry
from pipeline.schema import Frames, Geometry
from tests.models.dual_folders import FAMILIES, TEXTS, clip, save_dual, siglip, siglip2
from tests.models.text_folders import change_json

# (height, width): wide, upright, square, tiny, odd, extreme.
SIZES = [(48, 80), (90, 33), (32, 32), (5, 7), (61, 47), (20, 300), (200, 201)]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Any, DualEncoderFacts]:
    """Whole model, its processor as transformers loads it, facts of its folder."""
    model, processor = FAMILIES[request.param]()
    folder = save_dual(tmp_path, model, processor)
    return model, hf.AutoProcessor.from_pretrained(folder), DualEncoderFacts.load(str(folder))


def pictures() -> list[np.ndarray]:
    rng = np.random.default_rng(2)
    return [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in SIZES]


def decoded(facts: DualEncoderFacts, pixels: np.ndarray, *, cropped: bool = False) -> np.ndarray:
    """What the pipeline's decode makes of an image."""
    geometry = facts.image_geometry(*pixels.shape[:2])
    frames = resize_frames(pixels[None], geometry.resized_size, facts.sizing.resample)
    return (crop_frames(frames, geometry.cropped_size) if cropped else frames)[0]


@torch.inference_mode()
def whole_images(model: Any, processor: Any, images: list[np.ndarray]) -> np.ndarray:
    inputs = processor.image_processor(images=images, return_tensors="pt")
    vectors = model.get_image_features(**inputs).pooler_output
    return (vectors / vectors.norm(dim=-1, keepdim=True)).numpy()


@torch.inference_mode()
def whole_texts(model: Any, processor: Any, texts: list[str]) -> np.ndarray:
    padding = {"padding": True} if model.config.model_type == "clip" else {"padding": "max_length"}
    inputs = processor.tokenizer(texts, truncation=True, max_length=16, return_tensors="pt", **padding)
    vectors = model.get_text_features(**inputs).pooler_output
    return (vectors / vectors.norm(dim=-1, keepdim=True)).numpy()


def assert_same(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert ours.dtype == np.float32 and ours.shape == theirs.shape
    assert (ours * theirs).sum(axis=1).min() >= 0.99999
    np.testing.assert_allclose(ours, theirs, atol=2e-5)
    assert len(ours) == 1 or ours.std(axis=0).max() > 1e-2  # not all the same, which would prove little


def test_images_equal_the_whole_model(family: tuple[Any, Any, DualEncoderFacts]) -> None:
    model, processor, facts = family
    tower = ImageTower(facts, dtype="float32", device="cpu")
    images = pictures()
    expected = np.concatenate([whole_images(model, processor, [image]) for image in images])
    assert_same(whole_images(model, processor, images), expected)
    for cropped in (False, True):
        ready = [decoded(facts, image, cropped=cropped) for image in images]
        assert_same(np.concatenate([tower.embed_images([image]) for image in ready]), expected)
        order = list(range(len(ready)))
        random.Random(1).shuffle(order)
        assert_same(tower.embed_images([ready[i] for i in order]), expected[order])
    same_size = np.stack([decoded(facts, images[0])] * 3)
    assert_same(tower.embed_images(same_size)[:1], expected[:1])


def test_items_of_several_shapes_go_together(tmp_path: Path) -> None:
    model, processor = siglip2()
    facts = DualEncoderFacts.load(str(save_dual(tmp_path, model, processor)))
    wide, upright = (decoded(facts, image) for image in pictures()[:2])
    items = [
        Frames(pixels=np.stack([wide, wide[::-1]]), pts_seconds=(0.0, 0.5)),
        Frames(pixels=upright[None], pts_seconds=(0.0,)),
    ]
    geometry = Geometry(grid=(1, 1, 1), merge_size=1, feature_length=1, original_size=(1, 1), resized_size=(1, 1))
    encoder = FrameEncoder(ImageTower(facts, dtype="float32", device="cpu"))
    found = encoder.compute(encoder.stage("video", items, [geometry] * 2)).wait({})
    assert [each.geometry.timestamps for each in found] == [(0.0, 0.5), (0.0,)]
    for item, each in zip(items, found, strict=True):
        shown = [np.ascontiguousarray(frame) for frame in item.pixels]
        assert_same(each.vectors, np.concatenate([whole_images(model, processor, [image]) for image in shown]))


def test_texts_equal_the_whole_model(family: tuple[Any, Any, DualEncoderFacts]) -> None:
    model, processor, facts = family
    tower = TextTower(facts, dtype="float32", device="cpu")
    expected = whole_texts(model, processor, TEXTS)
    ids = facts.tokenize(TEXTS)
    assert max(map(len, ids)) == 16
    assert_same(tower.embed_texts(ids), expected)
    assert_same(np.concatenate([tower.embed_texts([row]) for row in ids]), expected)
    order = [3, 0, 4, 1, 2]
    assert_same(tower.embed_texts([ids[i] for i in order]), expected[order])


def test_vectors_are_those_that_the_family_compares(family: tuple[Any, Any, DualEncoderFacts]) -> None:
    model, processor, facts = family
    images, ids = pictures()[:2], facts.tokenize(TEXTS[:2])
    inputs = processor.image_processor(images=images, return_tensors="pt")
    padding = True if model.config.model_type == "clip" else "max_length"
    inputs |= processor.tokenizer(TEXTS[:2], padding=padding, truncation=True, max_length=16, return_tensors="pt")
    with torch.inference_mode():
        output = model(**inputs)
    towers = (
        ImageTower(facts, dtype="float32", device="cpu").embed_images([decoded(facts, image) for image in images]),
        TextTower(facts, dtype="float32", device="cpu").embed_texts(ids),
    )
    assert_same(towers[0], output.image_embeds.numpy())
    assert_same(towers[1], output.text_embeds.numpy())


def test_a_tower_holds_its_own_weights_only(family: tuple[Any, Any, DualEncoderFacts]) -> None:
    model, _, facts = family
    whole = dict(model.named_parameters())
    scalars = {name for name in whole if name.startswith("logit")}
    held = []
    for tower, kept in ((TextTower, "text"), (ImageTower, "vis")):
        parameters = dict(tower(facts, dtype="float32", device="cpu").model.named_parameters())
        assert parameters.keys() - scalars == {name for name in whole if name.startswith(kept)}
        assert all(torch.equal(tensor, whole[name]) for name, tensor in parameters.items())
        held.append(parameters)
    assert {*held[0], *held[1]} == whole.keys()


def test_contracts_say_how_each_family_pads(tmp_path: Path) -> None:
    padding = {}
    for name, make in FAMILIES.items():
        facts = DualEncoderFacts.load(str(save_dual(tmp_path / name, *make())))
        padding[name] = facts.text_contract.as_dict()["padding"]
        assert facts.text_contract.as_dict()["truncation"] == {"side": "right", "max_tokens": 16}
        assert facts.image_contract.truncation is None and facts.image_contract.padding is None
        assert facts.image_contract.method == "model" and facts.image_contract.normalisation.kind == "l2"
        assert facts.dimensions == (24 if name == "clip" else 32)
    assert padding["clip"] == {"side": "right", "to": "longest", "excluded": True}
    assert padding["siglip"] == padding["siglip2"] == {"side": "right", "to": "max_tokens", "excluded": False}
    assert padding["siglip2_masked"] == {"side": "left", "to": "max_tokens", "excluded": True}


@pytest.mark.parametrize("when", ["before", "after"])
def test_dimensions_are_cut_as_given(when: str, tmp_path: Path) -> None:
    model, processor = clip()
    given = {"output": {"dimensions": 6}, "normalisation": {"when": when}}
    facts = DualEncoderFacts.load(str(save_dual(tmp_path, model, processor)), given)
    assert facts.dimensions == 6
    whole = whole_texts(model, processor, TEXTS)[:, :6]
    expected = whole if when == "before" else whole / np.linalg.norm(whole, axis=1, keepdims=True)
    ours = TextTower(facts, dtype="float32", device="cpu").embed_texts(facts.tokenize(TEXTS))
    np.testing.assert_allclose(ours, expected, atol=2e-5)


def test_half_precision_comes_out_in_float32(family: tuple[Any, Any, DualEncoderFacts]) -> None:
    _, _, facts = family
    tower = ImageTower(facts, dtype="bfloat16", device="cpu")
    vectors = tower.embed_images([decoded(facts, image) for image in pictures()])
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (clip, ImageGeometry(resized_size=(32, 48), cropped_size=(32, 32), grid=(4, 4))),
        (siglip, ImageGeometry(resized_size=(32, 32), cropped_size=(32, 32), grid=(4, 4))),
        (siglip2, ImageGeometry(resized_size=(32, 40), cropped_size=(32, 40), grid=(4, 5))),
    ],
)
def test_sizes_are_known_before_decode(make: Any, expected: ImageGeometry, tmp_path: Path) -> None:
    facts = DualEncoderFacts.load(str(save_dual(tmp_path, *make())))
    assert facts.image_geometry(200, 300) == expected
    assert facts.sizing.resample == ("bilinear" if make is siglip2 else "bicubic")


def test_images_that_were_not_resized_are_the_callers_mistake(family: tuple[Any, Any, DualEncoderFacts]) -> None:
    _, _, facts = family
    tower = ImageTower(facts, dtype="float32", device="cpu")
    for wrong in (np.zeros((33, 35, 3), np.uint8), np.zeros((32, 32, 3), np.float32), np.zeros((32, 32, 4), np.uint8)):
        with pytest.raises(ValueError, match="was not resized by"):
            tower.embed_images([wrong])


def test_another_processor_has_another_digest(tmp_path: Path) -> None:
    digests = set()
    for number, options in enumerate([{}, {"image_mean": [0.5, 0.5, 0.5]}, {"resample": 2}, {}]):
        facts = DualEncoderFacts.load(str(save_dual(tmp_path / str(number), *clip(**options))))
        digests.add((facts.image_digest, facts.text_digest))
    assert [len({pair[tower] for pair in digests}) for tower in (0, 1)] == [3, 1]
    cut = DualEncoderFacts.load(str(tmp_path / "0"), {"output": {"dimensions": 3}})
    assert (cut.image_digest, cut.text_digest) not in digests


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": {"shortest_edge": 40, "longest_edge": 80}}, "resizes by .* which is not supported"),
        ({"do_resize": False}, "resizes by .* which is not supported"),
        ({"crop_size": {"height": 24, "width": 24}}, r"makes images of \(24, 24\), its tower takes 32 x 32"),
        ({"do_center_crop": False}, r"makes images of \(32, 42\), its tower takes 32 x 32"),
        ({"resample": 1}, "not bicubic or bilinear"),
    ],
)
def test_processors_that_cannot_be_planned_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = save_dual(tmp_path, *clip(**options))
    with pytest.raises(ConfigError, match=message):
        DualEncoderFacts.load(str(folder))


@pytest.mark.parametrize(
    ("pooling", "message"),
    [
        ({"method": "mean"}, "only normalisation and output"),
        ({"truncation": {"max_tokens": 8}}, "only normalisation and output"),
        ({"output": {"dimensions": 25}}, r"output\.dimensions is 25, its vectors have 24"),
        ({"output": {"shape": "token_vectors"}}, "makes one vector an item"),
    ],
)
def test_contracts_the_model_cannot_keep_are_refused(pooling: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = save_dual(tmp_path, *clip())
    with pytest.raises(ConfigError, match=message):
        DualEncoderFacts.load(str(folder), pooling)


def test_other_families_are_refused(tmp_path: Path) -> None:
    hf.AlignConfig().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="'align' is none of the families clip, siglip, siglip2"):
        DualEncoderFacts.load(str(tmp_path))
    with pytest.raises(ConfigError, match="/nowhere/at/all"):
        DualEncoderFacts.load("/nowhere/at/all")


def test_a_tower_without_a_head_that_pools_is_refused(tmp_path: Path) -> None:
    folder = save_dual(tmp_path, *siglip())
    config = hf.AutoConfig.from_pretrained(folder)
    change_json(folder / "config.json", vision_config=config.vision_config.to_dict() | {"vision_use_head": False})
    with pytest.raises(ConfigError, match="no head that pools"):
        DualEncoderFacts.load(str(folder))


def test_a_checkpoint_without_its_tower_is_refused(tmp_path: Path) -> None:
    model, processor = clip()
    folder = save_dual(tmp_path, model, processor)
    state = {name: tensor for name, tensor in model.state_dict().items() if "vision_model.encoder" not in name}
    model.save_pretrained(folder, state_dict=state)
    facts = DualEncoderFacts.load(str(folder))
    with pytest.raises(ConfigError, match=r"needs weights that it lacks: .*vision_model\.encoder"):
        ImageTower(facts, dtype="float32", device="cpu")
    TextTower(facts, dtype="float32", device="cpu")
