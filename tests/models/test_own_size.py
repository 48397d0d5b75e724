"""Features and patches counted from sizes equal those that the processors of published checkpoints make of blanks."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Iterator

import pytest
import torch
import transformers
from pydantic import TypeAdapter

from pipeline.errors import ItemError
from pipeline.models.vision_language import VisionLanguageFacts
from pipeline.planning.geometry import FramePatchRule, OwnSizeRule, own_size_geometry
from pipeline.planning.tiling import CanvasTiles, EdgeTiles, FixedTiles, PinpointTiles
from pipeline.schema import Modality, Probe, SamplePlan
from tests.models.families import tokenizer
from tests.models.published import PUBLISHED, idefics3

RULES: list[tuple[str, Modality, type]] = [
    ("llava_1_5", "image", FixedTiles),
    ("gemma3", "image", FixedTiles),
    ("llava_next", "image", PinpointTiles),
    ("llava_onevision", "image", PinpointTiles),
    ("llava_onevision", "video", FixedTiles),
    ("internvl", "image", CanvasTiles),
    ("internvl", "video", FixedTiles),
    ("idefics3", "image", EdgeTiles),
    ("smolvlm", "image", EdgeTiles),
    ("qwen2_vl", "video", FramePatchRule),
    ("qwen2_5_vl", "video", FramePatchRule),
]
FEW = 25


@functools.cache
def facts_of(family: str) -> VisionLanguageFacts:
    return PUBLISHED[family]()


def rule_of(family: str, modality: Modality) -> OwnSizeRule:
    return facts_of(family).own_size_rules[modality]


def probe_of(modality: Modality, height: int, width: int) -> Probe:
    return Probe(modality=modality, container="", codec="", width=width, height=height, num_bytes=1)


def sizes(seed: int, count: int) -> Iterator[tuple[int, int]]:
    """(height, width), a third of them small, a third alike in both."""
    rng = random.Random(seed)
    for k in range(count):
        most = 500 if k % 3 == 0 else 4000
        height = rng.randint(16, most)
        yield height, max(8, round(height * rng.uniform(0.8, 1.25))) if k % 3 == 1 else rng.randint(16, most)


def assert_as_processed(family: str, modality: Modality, count: int) -> None:
    facts, rule = facts_of(family), rule_of(family, modality)
    rng = random.Random(3)
    for height, width in sizes(7, count):
        num_frames = 1 if modality == "image" else rng.randint(2, 80)
        if num_frames > 1 or family == "llava_1_5":
            # Of 80 frames of 4K the blank alone takes seconds, and LLaVA's processor wants blanks with pixels.
            height, width = height // 4 + 8, width // 4 + 8
        item = facts._process_blank(modality, num_frames, height, width)
        geometry = own_size_geometry(rule, probe_of(modality, height, width), num_frames)
        shown = (num_frames, height, width)
        assert (geometry.grid, geometry.feature_length) == (facts._grid(item), item.placeholder.num_tokens), shown
        assert geometry.original_size == geometry.resized_size == (height, width)


@pytest.mark.parametrize(("family", "modality", "kind"), RULES)
def test_counts_are_the_processors(family: str, modality: Modality, kind: type) -> None:
    assert type(rule_of(family, modality)) is kind
    assert_as_processed(family, modality, FEW)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "modality", "kind"), RULES)
def test_counts_are_the_processors_on_2000_sizes(family: str, modality: Modality, kind: type) -> None:
    assert_as_processed(family, modality, 2000)


@pytest.mark.parametrize("family", ["llava_1_5", "llava_next", "llava_onevision", "gemma3"])
def test_features_are_those_that_processors_count_on_2000_sizes(family: str) -> None:
    processor, rule = facts_of(family).processor, rule_of(family, "image")
    shown = list(sizes(1, 2000))
    expected = processor._get_num_multimodal_tokens(image_sizes=shown)["num_image_tokens"]
    assert [rule.counts(1, *size)[1] for size in shown] == expected


@pytest.mark.parametrize("family", ["internvl", "idefics3", "smolvlm"])
def test_tiles_are_those_that_image_processors_count_on_2000_sizes(family: str) -> None:
    images, rule = facts_of(family).processor.image_processor, rule_of(family, "image")
    for height, width in sizes(2, 2000):
        counted = images.get_number_of_image_patches(height, width, {"crop_to_patches": True})
        tiles = counted if isinstance(counted, int) else counted[0]
        assert rule.counts(1, height, width)[0][0] == tiles, (height, width)


def test_video_patches_are_those_that_qwen2_vl_counts_on_2000_sizes() -> None:
    videos, rule = facts_of("qwen2_vl").processor.video_processor, rule_of("qwen2_vl", "video")
    assert isinstance(rule, FramePatchRule)
    rng = random.Random(5)
    for height, width in sizes(3, 2000):
        frames = rng.randint(1, 700)
        if max(height, width) <= 200 * min(height, width):
            expected = videos.get_num_of_video_patches(frames, height, width, {})
            assert rule.geometry(frames, height, width).num_patches == expected, (frames, height, width)


def test_the_worked_number_336_pixels_by_14_are_576_features() -> None:
    geometry = own_size_geometry(rule_of("llava_1_5", "image"), probe_of("image", 1080, 1920), 1)
    assert (336 // 14) ** 2 == geometry.feature_length == geometry.num_patches == 576
    assert geometry.num_tiles == 1


def test_the_worked_number_72_mib_of_keys_and_values() -> None:
    # 2 x 32 layers x 8 heads x 128 x 2 bytes a token, 576 of them
    text = transformers.LlamaConfig(num_hidden_layers=32, num_key_value_heads=8, num_attention_heads=32, head_dim=128)
    facts = VisionLanguageFacts(model="x", processor=None, config=transformers.LlavaConfig(text_config=text))
    assert 576 * facts.kv_cache("float16").token_bytes == 72 * 2**20


@pytest.mark.parametrize("num_query_tokens", [32])
def test_a_resampler_makes_as_many_features_of_any_size(num_query_tokens: int) -> None:
    images = transformers.BlipImageProcessor(size={"height": 224, "width": 224})
    tokens = tokenizer(image_token="<image>")
    processor = transformers.Blip2Processor(images, tokens, num_query_tokens=num_query_tokens)
    image_id = tokens.convert_tokens_to_ids("<image>")
    rule = FixedTiles(grid_of_tile=(16, 16), tiles_of_frame=1, frame_tokens=32)
    processor.image_token = transformers.AddedToken("<image>", normalized=False, special=True)
    for height, width in sizes(4, FEW):
        blank = torch.zeros(3, height, width, dtype=torch.uint8)
        made = processor(images=[blank], text=["x"], return_tensors="pt")
        grid = (len(made["pixel_values"]), *(side // 14 for side in made["pixel_values"].shape[-2:]))
        assert rule.counts(1, height, width) == (grid, int((made["input_ids"] == image_id).sum()))


def test_idefics3s_own_helper_is_not_what_it_does() -> None:
    """Why the arithmetic is ours: here its resizing makes 15 tiles and a whole, and the helper says 10 and one."""
    facts = idefics3(longest_edge=1500)
    item = facts.learn("image", 1, 2888, 1393)
    assert facts.processor.image_processor.get_number_of_image_patches(2888, 1393)[0] == 11
    assert facts._grid(item) == facts.own_size_rules["image"].counts(1, 2888, 1393)[0] == (16, 26, 26)


def test_arithmetic_that_the_processor_does_not_follow_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = PUBLISHED["internvl"]()
    monkeypatch.setattr(type(facts.processor.image_processor), "crop_image_to_patches", two_tiles)
    assert "image" not in facts.own_size_rules


def two_tiles(self: object, images: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    wide = images.shape[-1] > 1000
    return images.new_zeros(images.shape[0], 2 if wide else 1, 3, 448, 448)


def test_what_follows_from_no_rule_is_learnt() -> None:
    tokens = tokenizer(image_token="[IMG]", image_break_token="[IMG_BREAK]", image_end_token="[IMG_END]")
    images = transformers.PixtralImageProcessor(size={"longest_edge": 1024}, patch_size={"height": 16, "width": 16})
    processor = transformers.PixtralProcessor(image_processor=images, tokenizer=tokens, patch_size=16)
    vision = transformers.PixtralVisionConfig(patch_size=16)
    ids = {"image_token_id": tokens.convert_tokens_to_ids("[IMG]")}
    config = transformers.LlavaConfig(vision_config=vision, **ids)
    facts = VisionLanguageFacts(model="pixtral", processor=processor, config=config)
    assert facts.own_size_rules == {}
    geometry = facts.geometry(probe_of("image", 300, 500), SamplePlan(pts_seconds=(0.0,)))
    assert geometry.grid == (1, 19, 32)  # 300 and 500 pixels in whole patches of 16
    assert geometry.feature_length == 19 * 32


@pytest.mark.parametrize("family", ["llava_next", "llava_onevision", "internvl", "idefics3"])
def test_strips_are_counted_as_the_processor_does(family: str) -> None:
    facts = facts_of(family)
    for height, width in ((2, 900), (2, 5000), (3, 20_000), (5000, 2), (900, 1000), (1, 2)):
        item = facts.learn("image", 1, height, width)
        assert rule_of(family, "image").counts(1, height, width) == (facts._grid(item), item.placeholder.num_tokens)


def test_a_size_that_the_processor_refuses_is_the_items_fault() -> None:
    facts = VisionLanguageFacts.load("demo:captioner")
    facts.__dict__["rules"] = {}
    with pytest.raises(ItemError, match=r"size_not_supported: 1 x 10 x 3000"):
        facts.geometry(probe_of("image", 10, 3000), SamplePlan(pts_seconds=(0.0,)))


@pytest.mark.parametrize(("family", "modality", "kind"), RULES)
def test_rules_come_back_from_the_store_as_they_were(family: str, modality: Modality, kind: type) -> None:
    adapter: TypeAdapter[OwnSizeRule] = TypeAdapter(OwnSizeRule)
    rule = rule_of(family, modality)
    assert adapter.validate_json(adapter.dump_json(rule)) == rule


@pytest.mark.slow
@pytest.mark.parametrize(("family", "modality", "kind"), RULES)
def test_100_000_items_a_second(family: str, modality: Modality, kind: type) -> None:
    rule = rule_of(family, modality)
    probes = [probe_of(modality, *size) for size in sizes(6, 20_000)]
    probes = [probe for probe in probes if max(probe.width, probe.height) <= 200 * min(probe.width, probe.height)]

    def cpu_seconds() -> float:
        started = time.process_time()
        for probe in probes:
            own_size_geometry(rule, probe, 16 if modality == "video" else 1)
        return time.process_time() - started

    assert len(probes) / min(cpu_seconds() for _ in range(5)) >= 100_000
