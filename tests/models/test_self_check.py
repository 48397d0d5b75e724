"""Families that cannot be run in two halves are refused, by the property that keeps them from it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import transformers as hf

from pipeline.errors import ConfigError
from pipeline.models import self_check
from pipeline.models.vision_encoder import VisionEncoder
from pipeline.models.vision_language import VisionLanguageFacts
from tests.models.families import FAMILIES, save_family


def facts_of(config: Any) -> VisionLanguageFacts:
    return VisionLanguageFacts(model="tried", processor=None, config=config)


def test_cross_attention_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Mllama.* takes no encoder outputs .*cross-attention"):
        self_check.check_properties(facts_of(hf.MllamaConfig()))


def test_an_encoder_that_reads_the_prompt_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"its encoder reads the prompt \(qformer_input_ids"):
        self_check.check_properties(facts_of(hf.InstructBlipConfig()))


def test_a_text_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="'qwen2' is not an image-text-to-text family"):
        self_check.check_properties(facts_of(hf.Qwen2Config()))


def test_the_demo_model_passes_with_images_and_videos() -> None:
    facts = VisionLanguageFacts.load("demo:captioner")
    assert self_check.check_halves(facts, dtype="float32", device="cpu").verdicts == {"image": "", "video": ""}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_pass_with_what_they_take(family: str, tmp_path: Path) -> None:
    facts = VisionLanguageFacts.load(str(save_family(family, tmp_path)))
    verdicts = self_check.check_halves(facts, dtype="float32", device="cpu").verdicts
    assert verdicts == dict.fromkeys(facts.modalities, "")


def test_halves_that_answer_otherwise_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    facts = VisionLanguageFacts.load(str(save_family("gemma3", tmp_path)))
    honest = VisionEncoder.encode

    def doubled(*arguments: Any) -> Any:
        return [
            dataclasses.replace(item, tensors={name: 2 * tensor for name, tensor in item.tensors.items()})
            for item in honest(*arguments)
        ]

    monkeypatch.setattr(VisionEncoder, "encode", doubled)
    with pytest.raises(ConfigError, match="the halves' features are not the whole model's"):
        self_check.check_halves(facts, dtype="float32", device="cpu")
