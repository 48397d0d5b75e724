"""Real processors of transformers, with the settings that real checkpoints have, around the demo model's tokenizer."""

import dataclasses
from typing import Any

import pytest
import transformers
from pipeline.models.processor_check import check_processor

from pipeline.errors import ConfigError
from pipeline.models.vision_language import VisionLanguageFacts


@pytest.fixture(scope="module")
def demo() -> VisionLanguageFacts:
    return VisionLanguageFacts.load("demo:captioner")


def with_processor(demo: VisionLanguageFacts, family: str, images: Any, videos: Any) -> VisionLanguageFacts:
    parts = {"tokenizer": demo.processor.tokenizer, "chat_template": demo.processor.chat_template}
    processor = getattr(transformers, f"{family}Processor")(image_processor=images, video_processor=videos, **parts)
    return dataclasses.replace(demo, model=family, processor=processor)


@pytest.mark.parametrize("capped", [True, False])
def test_qwen3_vl_with_its_published_sizes_passes(demo: VisionLanguageFacts, capped: bool) -> None:
    images = transformers.Qwen2VLImageProcessor(patch_size=16, size={"shortest_edge": 65536, "longest_edge": 16777216})
    videos = transformers.Qwen3VLVideoProcessor(cap_pixels_per_frame=capped)
    check_processor(with_processor(demo, "Qwen3VL", images, videos))


@pytest.mark.parametrize(
    ("family", "reason"), [("Qwen2_5_VL", "second_per_grid_ts"), ("Qwen2VL", "a grid of .* was worked out")]
)
def test_a_family_that_would_answer_wrongly_is_refused(demo: VisionLanguageFacts, family: str, reason: str) -> None:
    images = transformers.Qwen2VLImageProcessor()
    videos = transformers.Qwen2VLVideoProcessor(cap_pixels_per_frame=False)
    with pytest.raises(ConfigError, match=reason):
        check_processor(with_processor(demo, family, images, videos))


def test_a_rule_with_another_bound_is_found(demo: VisionLanguageFacts) -> None:
    facts = dataclasses.replace(demo)
    rules = dict(demo.rules)
    rules["image"] = dataclasses.replace(rules["image"], max_pixels=rules["image"].max_pixels // 2)
    facts.__dict__["rules"] = rules
    with pytest.raises(ConfigError, match="grid"):
        check_processor(facts)
