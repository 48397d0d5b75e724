"""Items of one batch without a rule: prepared and encoded together, and each what the whole model makes of it alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from pipeline.media.resize import resize_frames
from pipeline.models.pair_check import check_pairs
from pipeline.models.vision_encoder import VisionEncoder
from pipeline.models.vision_language import VisionLanguageFacts
from pipeline.schema import Frames, Geometry, Modality, Probe, SamplePlan
from tests.models.families import FAMILIES, save_family
from tests.models.more_families import MORE_FAMILIES

SIZES = ((1, 90, 130), (1, 200, 64), (1, 64, 64), (1, 90, 130))
TOGETHER = {
    "llava_onevision": {"image": "any", "video": "one_shape"},
    "internvl": {"image": "any", "video": "one_shape"},
    "idefics3": {"image": "any"},
    "gemma3": {"image": "any"},
    "llava_next": {"image": "any"},
    "mistral3": {"image": "any"},
    "qwen2_5_vl": {},  # planned by rule
}


def noise(seed: int, size: tuple[int, int, int]) -> Frames:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    return Frames(pixels=pixels, pts_seconds=tuple(0.5 * k for k in range(size[0])))


def geometry_of(facts: VisionLanguageFacts, modality: Modality, item: Frames) -> Geometry:
    num_frames, height, width, _ = item.pixels.shape
    seconds = 0.5 * num_frames if modality == "video" else 0.0
    facts_of = {"container": "", "codec": "", "num_bytes": 0, "duration_seconds": seconds}
    probe = Probe(modality=modality, width=width, height=height, **facts_of)  # type: ignore[arg-type]
    return facts.geometry(probe, SamplePlan(pts_seconds=item.pts_seconds))


def rows_of_the_whole(processor: Any, model: Any, modality: Modality, item: Frames) -> torch.Tensor:
    """Rows of features of one item, by transformers alone."""
    frames = torch.from_numpy(item.pixels).permute(0, 3, 1, 2).contiguous()
    token = getattr(processor, f"{modality}_token")
    if modality == "image":
        inputs = dict(processor(text=[token], images=[frames[0]], return_tensors="pt"))
        slot = "image"
    else:
        options = {"do_sample_frames": False, "video_metadata": [{"total_num_frames": len(frames), "fps": 2.0}]}
        inputs = dict(processor(text=[token], videos=[frames], videos_kwargs=options, return_tensors="pt"))
        slot = "video" if "pixel_values_videos" in inputs else "image"
    for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
        inputs.pop(name, None)
    with torch.inference_mode():
        features = getattr(model, f"get_{slot}_features")(**inputs, return_dict=True).pooler_output
    joined = torch.cat(list(features)) if isinstance(features, list | tuple) else features
    return joined.flatten(0, -2)


@pytest.fixture(autouse=True)
def more_families(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, family in MORE_FAMILIES.items():
        monkeypatch.setitem(FAMILIES, name, family)


@pytest.mark.parametrize("family", TOGETHER)
def test_batches_equal_the_whole_model_one_by_one(family: str, tmp_path: Path) -> None:
    checkpoint = save_family(family, tmp_path / family)
    facts = VisionLanguageFacts.load(str(checkpoint))
    encoder = VisionEncoder(facts, dtype="float32", device="cpu")
    check_pairs(encoder)
    assert encoder.together == TOGETHER[family]
    processor, model = (kind.from_pretrained(checkpoint) for kind in (AutoProcessor, AutoModelForImageTextToText))
    for modality in TOGETHER[family]:
        sizes = SIZES if modality == "image" else ((4, 90, 130), (4, 90, 130), (2, 64, 64))
        items = [noise(seed, size) for seed, size in enumerate(sizes)]
        geometries = [geometry_of(facts, modality, item) for item in items]
        calls: list[int] = []
        count_calls(encoder, calls)
        encoded = encoder.encode(modality, items, geometries, {})
        assert len(calls) == (1 if encoder.together[modality] == "any" else 2)
        for item, geometry, found in zip(items, geometries, encoded, strict=True):
            expected = rows_of_the_whole(processor, model.eval(), modality, item)
            rows = found.tensors["pooler_output"].flatten(0, -2)
            assert rows.shape == expected.shape
            torch.testing.assert_close(rows, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
            assert found.placeholder.num_tokens == len(rows) == geometry.feature_length


@pytest.mark.parametrize("modality", ["image", "video"])
def test_planned_shapes_may_be_mixed(modality: Modality, tmp_path: Path) -> None:
    checkpoint = save_family("qwen2_5_vl", tmp_path / "family")
    facts = VisionLanguageFacts.load(str(checkpoint))
    encoder = VisionEncoder(facts, dtype="float32", device="cpu")
    processor, model = (kind.from_pretrained(checkpoint) for kind in (AutoProcessor, AutoModelForImageTextToText))
    sizes = SIZES if modality == "image" else ((4, 90, 130), (2, 64, 64), (6, 112, 56))
    drawn = [noise(seed, size) for seed, size in enumerate(sizes)]
    geometries = [geometry_of(facts, modality, item) for item in drawn]
    items = [
        Frames(pixels=resize_frames(item.pixels, geometry.resized_size), pts_seconds=item.pts_seconds)
        for item, geometry in zip(drawn, geometries, strict=True)
    ]
    assert len({item.pixels.shape for item in items}) == 3
    for item, found in zip(items, encoder.encode(modality, items, geometries, {}), strict=True):
        expected = rows_of_the_whole(processor, model.eval(), modality, item)
        torch.testing.assert_close(
            found.tensors["pooler_output"], expected, rtol=0, atol=1e-5 * float(expected.abs().max())
        )


def count_calls(encoder: VisionEncoder, calls: list[int]) -> None:
    """Appends to `calls` when the tower is called."""
    features = type(encoder)._features

    def counted(slot: Modality, inputs: dict[str, torch.Tensor]) -> Any:
        calls.append(1)
        return features(encoder, slot, inputs)

    encoder._features = counted  # type: ignore[method-assign]


# Idefics 3 takes tiles of nought for padding, which they no longer are when they have been normalised.
@pytest.mark.parametrize(
    ("family", "raw"),
    [("llava_next", {"image"}), ("internvl", {"image", "video"}), ("gemma3", {"image"}), ("idefics3", set())],
)
def test_pixels_may_be_normalised_on_the_device(family: str, raw: set[str], tmp_path: Path) -> None:
    facts = VisionLanguageFacts.load(str(save_family(family, tmp_path / family)))
    encoder = VisionEncoder(facts, dtype="float32", device="cpu")
    check_pairs(encoder, raw=True)
    assert encoder.together == TOGETHER[family]
    assert encoder.raw == raw
    items = [noise(seed, size) for seed, size in enumerate(SIZES)]
    geometries = [geometry_of(facts, "image", item) for item in items]
    staged = encoder.stage("image", items, geometries)
    dtypes = {pixels.dtype for group in staged.groups for pixels in group.processed.pixels.values()}
    assert (torch.uint8 in dtypes) == ("image" in raw)
    found = encoder.compute(staged).wait({})
    encoder.raw.clear()
    for one, other in zip(found, encoder.encode("image", items, geometries, {}), strict=True):
        for name, tensor in one.tensors.items():
            assert torch.equal(tensor, other.tensors[name])


def test_records_of_a_batch_are_those_of_items_alone(tmp_path: Path) -> None:
    facts = VisionLanguageFacts.load(str(save_family("llava_onevision", tmp_path / "family")))
    encoder = VisionEncoder(facts, dtype="float32", device="cpu")
    items = [noise(seed, size) for seed, size in enumerate(SIZES)]
    geometries = [geometry_of(facts, "image", item) for item in items]
    alone = encoder.encode("image", items, geometries, {})
    encoder.together["image"] = "any"
    for one, other in zip(alone, encoder.encode("image", items, geometries, {}), strict=True):
        assert (one.container, one.placeholder, one.geometry) == (other.container, other.placeholder, other.geometry)
        assert one.inputs.keys() == other.inputs.keys()
        for name, value in one.inputs.items():
            assert torch.equal(value, other.inputs[name])
