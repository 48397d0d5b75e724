"""Whether a checkpoint's two halves, with a store between them, answer as the whole model does: tried, not assumed.

Families differ in what their encoders return and in what their language models ask for, and most mistakes are silent.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from pipeline.errors import ConfigError, ItemError
from pipeline.features.codec import FeatureRecord, decode_record, encode_record
from pipeline.language.prompt import PromptWriter
from pipeline.media.resize import resize_frames
from pipeline.models.language_model import GenerationOptions, LanguageModel, PromptedItem, tensor_of
from pipeline.models.location import resolve_model
from pipeline.models.processing import run_processor
from pipeline.models.vision_encoder import VisionEncoder
from pipeline.models.vision_language import VisionLanguageFacts
from pipeline.schema import Frames, Modality, Probe, RecordSize, SamplePlan

_TRIED: dict[Modality, tuple[int, int, int]] = {"image": (1, 90, 130), "video": (4, 90, 130)}
_NEW_TOKENS = 8
_QUESTION = "What is this?"
_Result = TypeVar("_Result")
# Of the largest feature; both sides compute alike, and kernels may choose another order of sums for another shape.
_TOLERANCES = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2}


def check_properties(facts: VisionLanguageFacts) -> None:
    """Raise `ConfigError` naming the property that keeps a family's features from being stored and used again."""
    mapping: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    kind = mapping.get(type(facts.config), None)
    if kind is None:
        raise ConfigError(f"model {facts.model!r}: {facts.config.model_type!r} is not an image-text-to-text family")
    if "mm_encoder_outputs" not in inspect.signature(kind.forward).parameters:
        raise ConfigError(
            f"model {facts.model!r}: {kind.__name__} takes no encoder outputs made beforehand (mm_encoder_outputs), as "
            "families whose language model attends to the image layer by layer (cross-attention) do not"
        )
    asked = [name for name in inspect.signature(kind.get_image_features).parameters if "input_ids" in name]
    if asked:
        raise ConfigError(
            f"model {facts.model!r}: its encoder reads the prompt ({', '.join(asked)}), so its features belong to one "
            "question and cannot serve the next"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedHalves:
    """By modality: "" when the halves answer as the whole model does, else why it is not offered; sizes of records."""

    verdicts: dict[Modality, str]
    sizes: dict[Modality, RecordSize]


def check_halves(facts: VisionLanguageFacts, *, dtype: str, device: str) -> CheckedHalves:
    """What came out when each modality was tried; those that the encoder refuses have no size.

    Loads the whole model, then each half, one at a time. Raises `ConfigError` as `check_properties` does, and when not
    even images work.
    """
    check_properties(facts)
    expected = _answers_of_the_whole(facts, dtype, device)
    records = _records(facts, dtype, device)
    found = _answers_of_the_halves(facts, records, dtype, device)
    verdicts = {m: _difference(expected[m], records[m], found[m]) for m in facts.modalities}
    if verdicts["image"]:
        raise ConfigError(f"model {facts.model!r} cannot be run in two halves: for an image, {verdicts['image']}")
    sizes = {m: _size(record) for m, record in records.items() if isinstance(record, FeatureRecord)}
    return CheckedHalves(verdicts=verdicts, sizes=sizes)


def _size(record: FeatureRecord) -> RecordSize:
    in_rows = sum(memoryview(tensor.data).nbytes for tensor in record.tensors.values())
    return RecordSize(
        row_bytes=in_rows // record.geometry.feature_length, other_bytes=len(encode_record(record)) - in_rows
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Refusal:
    """What a family raised when it was handed what it cannot take: a verdict, not a failure of the run."""

    reason: str


def _attempt(work: Callable[[], _Result]) -> _Result | _Refusal:
    try:
        return work()
    except torch.OutOfMemoryError:
        raise  # says something of the device, nothing of the family
    except (ItemError, RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
        return _Refusal(reason=f"{type(error).__name__}: {error}")


def _answers_of_the_whole(
    facts: VisionLanguageFacts, dtype: str, device: str
) -> dict[Modality, tuple[torch.Tensor, list[int]] | _Refusal]:
    mapping: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    path = resolve_model(facts.model)
    whole = mapping[type(facts.config)].from_pretrained(path, dtype=getattr(torch, dtype)).to(device).eval()
    return {m: _attempt(lambda m=m: _whole_answer(facts, whole, m)) for m in facts.modalities}  # type: ignore[misc]


def _records(facts: VisionLanguageFacts, dtype: str, device: str) -> dict[Modality, FeatureRecord | _Refusal]:
    encoder = VisionEncoder(facts, dtype=dtype, device=device)
    return {m: _attempt(lambda m=m: _encoded(facts, encoder, m)) for m in facts.modalities}  # type: ignore[misc]


def _answers_of_the_halves(
    facts: VisionLanguageFacts, records: dict[Modality, FeatureRecord | _Refusal], dtype: str, device: str
) -> dict[Modality, list[int] | _Refusal]:
    language = LanguageModel(facts, dtype=dtype, device=device)
    answers: dict[Modality, list[int] | _Refusal] = {}
    for modality, record in records.items():
        if isinstance(record, _Refusal):
            answers[modality] = record
        else:
            answers[modality] = _attempt(lambda m=modality, r=record: _halves_answer(facts, language, m, r))  # type: ignore[misc]
    return answers


def _difference(
    expected: tuple[torch.Tensor, list[int]] | _Refusal,
    record: FeatureRecord | _Refusal,
    found: list[int] | _Refusal,
) -> str:
    for each in (expected, record, found):
        if isinstance(each, _Refusal):
            return each.reason
    assert isinstance(expected, tuple) and isinstance(record, FeatureRecord)
    expected_rows, expected_ids = expected
    rows = tensor_of(record.tensors["pooler_output"], torch.device("cpu")).flatten(0, -2)
    tolerance = _TOLERANCES[record.tensors["pooler_output"].dtype] * float(expected_rows.abs().max())
    if rows.shape != expected_rows.shape or not torch.allclose(rows, expected_rows, rtol=0, atol=tolerance):
        return "the halves' features are not the whole model's"
    if expected_ids != found:
        return f"the whole model answers with the tokens {expected_ids}, the halves with {found}"
    return ""


def _tried(modality: Modality) -> tuple[Any, tuple[float, ...]]:
    """Noise, the same for every model, as `uint8 (T, H, W, C)`, and its times."""
    num_frames, height, width = _TRIED[modality]
    pixels = np.random.default_rng(0).integers(0, 256, (num_frames, height, width, 3), dtype=np.uint8)
    return pixels, tuple(0.5 * k for k in range(num_frames))


def _messages(modality: Modality) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": modality}, {"type": "text", "text": _QUESTION}]}]


def _whole_answer(facts: VisionLanguageFacts, whole: Any, modality: Modality) -> tuple[torch.Tensor, list[int]]:
    """Rows of features and generated ids, straight from pixels through processor and model."""
    pixels, times = _tried(modality)
    text = facts.processor.apply_chat_template(_messages(modality), tokenize=False, add_generation_prompt=True)
    frames = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()
    inputs = run_processor(facts.processor, text, modality, frames, times, _duration(times))
    inputs.pop("text_replacement_offsets")
    inputs = inputs.to(whole.device)
    slot = facts.learn(modality, *_TRIED[modality]).slot
    function = getattr(whole, f"get_{slot}_features")
    accepted = inspect.signature(function).parameters
    with torch.inference_mode():
        features = function(**{n: v for n, v in inputs.items() if n in accepted}, return_dict=True).pooler_output
        ids = whole.generate(**inputs, max_new_tokens=_NEW_TOKENS, do_sample=False)
    joined = torch.cat(list(features)) if isinstance(features, list | tuple) else features
    return joined.flatten(0, -2).cpu(), ids[0, inputs["input_ids"].shape[1] :].tolist()


def _duration(times: Sequence[float]) -> float:
    return len(times) * 0.5


def _encoded(facts: VisionLanguageFacts, encoder: VisionEncoder, modality: Modality) -> FeatureRecord:
    """The record as it would come back from the store."""
    pixels, times = _tried(modality)
    height, width = pixels.shape[1:3]
    probe = Probe(
        modality=modality,
        container="",
        codec="",
        width=width,
        height=height,
        num_bytes=0,
        duration_seconds=_duration(times) if modality == "video" else 0.0,
    )
    geometry = facts.geometry(probe, SamplePlan(pts_seconds=times))
    frames = Frames(pixels=resize_frames(pixels, geometry.resized_size), pts_seconds=times)
    [item] = encoder.encode(modality, [frames], [geometry], {})
    if mismatch := item.mismatch(geometry):
        raise RuntimeError(mismatch)
    return decode_record(encode_record(item.record({})))


def _halves_answer(
    facts: VisionLanguageFacts, language: LanguageModel, modality: Modality, record: FeatureRecord
) -> list[int]:
    writer = PromptWriter(facts.processor, media_token_ids=facts.media_token_ids, max_tokens=1_000_000)
    ids = writer.token_ids(_messages(modality), [(modality, record.placeholder)])
    prompt = PromptedItem(input_ids=ids, media=(record,), seed=0)
    [answer] = language.generate([prompt], GenerationOptions(max_new_tokens=_NEW_TOKENS), {})
    return list(answer.token_ids)
