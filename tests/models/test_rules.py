"""Real processors of transformers, with the settings that real checkpoints have, around the demo model's tokenizer."""

import dataclasses
from typing import Any

import pytest
import transformers

from pipeline.models.vision_language import VisionLanguageFacts
from pipeline.schema import Probe, SamplePlan


@pytest.fixture(scope="module")
def demo() -> VisionLanguageFacts:
    return VisionLanguageFacts.load("demo:captioner")


def with_processor(demo: VisionLanguageFacts, family: str, images: Any, videos: Any) -> VisionLanguageFacts:
    parts = {"tokenizer": demo.processor.tokenizer, "chat_template": demo.processor.chat_template}
    processor = getattr(transformers, f"{family}Processor")(image_processor=images, video_processor=videos, **parts)
    return VisionLanguageFacts(model=family, processor=processor, config=demo.config)


@pytest.mark.parametrize("capped", [True, False])
def test_qwen3_vl_with_its_published_sizes_is_planned_by_rule(demo: VisionLanguageFacts, capped: bool) -> None:
    images = transformers.Qwen2VLImageProcessor(patch_size=16, size={"shortest_edge": 65536, "longest_edge": 16777216})
    videos = transformers.Qwen3VLVideoProcessor(cap_pixels_per_frame=capped)
    assert list(with_processor(demo, "Qwen3VL", images, videos).rules) == ["image", "video"]


@pytest.mark.parametrize("family", ["Qwen2_5_VL", "Qwen2VL"])
def test_videos_that_are_sized_otherwise_are_left_to_their_processor(demo: VisionLanguageFacts, family: str) -> None:
    images = transformers.Qwen2VLImageProcessor()
    videos = transformers.Qwen2VLVideoProcessor(cap_pixels_per_frame=False)
    facts = with_processor(demo, family, images, videos)
    assert list(facts.rules) == ["image"]
    probe = Probe(modality="video", container="", codec="", width=300, height=200, num_bytes=1, duration_seconds=2.0)
    geometry = facts.geometry(probe, SamplePlan(pts_seconds=(0.0, 0.5, 1.0, 1.5)))
    assert geometry.resized_size == (200, 300)  # the processor resizes what decode leaves as it is
    expected = videos(videos=[[demo_frame()] * 4], do_sample_frames=False, return_tensors="pt")["video_grid_thw"]
    assert list(geometry.grid) == expected[0].tolist()


def demo_frame() -> Any:
    """A black frame of 200 x 300 pixels."""
    return transformers.image_utils.np.zeros((200, 300, 3), "uint8")


def test_a_rule_is_believed_only_where_the_processor_does_the_same(demo: VisionLanguageFacts) -> None:
    rule = demo.rules["image"]
    assert demo._agrees(rule, "image", 1, 480, 640)
    assert not demo._agrees(dataclasses.replace(rule, max_pixels=rule.max_pixels // 2), "image", 1, 480, 640)
    assert not demo._agrees(dataclasses.replace(rule, merge_size=1), "image", 1, 480, 640)
