from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, Qwen3VLConfig

from pipeline.errors import ConfigError
from pipeline.models.halves import count_parameters, load_half
from pipeline.models.location import resolve_model
from pipeline.models.vision_language import VisionLanguageFacts
from tests.models.families import FAMILIES, save_family

PATH = resolve_model("demo:captioner")


@pytest.fixture(scope="module")
def whole() -> torch.nn.Module:
    return AutoModelForImageTextToText.from_pretrained(PATH)


@pytest.mark.parametrize(("half", "kept"), [("encoder", "model.visual."), ("language", "model.language_model.")])
def test_a_half_holds_its_own_weights_and_buffers_only(whole: torch.nn.Module, half: str, kept: str) -> None:
    model = load_half(PATH, half, dtype="float32", device="cpu")
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    expected = dict(whole.named_parameters()) | dict(whole.named_buffers())
    assert set(tensors) == {name for name in expected if name.startswith(kept)}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
    assert not model.training


def test_precision_is_the_asked_one() -> None:
    assert {p.dtype for p in load_half(PATH, "encoder", dtype="bfloat16", device="cpu").parameters()} == {
        torch.bfloat16
    }


@pytest.mark.parametrize("family", ["demo", *FAMILIES])
def test_weights_are_counted_without_being_read(family: str, tmp_path: Path) -> None:
    path = PATH if family == "demo" else str(save_family(family, tmp_path))
    halves = {half: load_half(path, half, dtype="float32", device="cpu") for half in ("encoder", "language")}
    held = {half: sum(weight.numel() for weight in model.parameters()) for half, model in halves.items()}
    assert count_parameters(path) == held and min(held.values()) > 0


def test_a_checkpoint_without_its_tower_is_refused(tmp_path: Path, whole: torch.nn.Module) -> None:
    state = {name: tensor for name, tensor in whole.state_dict().items() if "visual.blocks.1" not in name}
    whole.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(RuntimeError, match="weights missing for its encoder half"):
        load_half(str(tmp_path), "encoder", dtype="float32", device="cpu")


def test_a_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    Qwen3VLConfig().get_text_config().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="not an image-text-to-text"):
        load_half(str(tmp_path), "encoder", dtype="float32", device="cpu")


@pytest.mark.parametrize("model", ["demo:nobody", "/nowhere/at/all"])
def test_a_model_that_is_not_there_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match=model.rpartition(":")[2]):
        VisionLanguageFacts.load(model)


def test_key_value_bytes_by_the_formula() -> None:
    facts = VisionLanguageFacts.load("demo:captioner")
    text = facts.config.text_config
    per_layer = 2 * text.num_key_value_heads * text.head_dim * 4
    assert facts.kv_cache("float32").token_bytes == text.num_hidden_layers * per_layer
    assert facts.kv_cache("bfloat16").token_bytes * 2 == facts.kv_cache("float32").token_bytes
