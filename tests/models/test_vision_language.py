"""What the halves promise one by one; `tests/stages/test_equality.py` compares them with the whole model."""

import dataclasses
import random

import numpy as np
import pytest
import torch

from pipeline.demo.scenes import all_scenes, draw_clip, draw_image
from pipeline.features.codec import decode_record, encode_record
from pipeline.media.resize import resize_frames
from pipeline.models.language_model import GenerationOptions, LanguageModel, PromptedItem
from pipeline.models.vision_encoder import VisionEncoder
from pipeline.models.vision_language import VisionLanguageFacts
from pipeline.schema import Frames, Geometry, Placeholder, Probe, SamplePlan


@pytest.fixture(scope="module")
def facts() -> VisionLanguageFacts:
    return VisionLanguageFacts.load("demo:captioner")


@pytest.fixture(scope="module")
def encoder(facts: VisionLanguageFacts) -> VisionEncoder:
    return VisionEncoder(facts, dtype="float32", device="cpu")


def frames_of(facts: VisionLanguageFacts, kind: str, seed: int, count: int = 4) -> tuple[Frames, Geometry]:
    rng = random.Random(seed)
    scene = rng.choice(all_scenes(kind))
    pixels = draw_image(scene, rng)[None] if kind == "image" else draw_clip(scene, rng)[0][:count]
    times = tuple(0.5 * k for k in range(len(pixels)))
    height, width = pixels.shape[1:3]
    probe = Probe(modality=kind, container="", codec="", width=width, height=height, num_bytes=1)
    geometry = facts.geometry(probe, SamplePlan(pts_seconds=times))
    return Frames(pixels=resize_frames(pixels, geometry.resized_size), pts_seconds=times), geometry


def one_shape(facts: VisionLanguageFacts, kind: str) -> list[tuple[Frames, Geometry]]:
    drawn = [frames_of(facts, kind, seed) for seed in range(40)]
    shape = drawn[0][0].pixels.shape
    same = [pair for pair in drawn if pair[0].pixels.shape == shape]
    assert len(same) >= 2
    return same


@pytest.mark.parametrize("kind", ["image", "video"])
def test_a_batch_encodes_as_one_by_one(facts: VisionLanguageFacts, encoder: VisionEncoder, kind: str) -> None:
    items = one_shape(facts, kind)
    together = encoder.encode(kind, [f for f, _ in items], [g for _, g in items], {})
    for (frames, geometry), batched in zip(items, together, strict=True):
        [alone] = encoder.encode(kind, [frames], [geometry], {})
        assert alone.placeholder == batched.placeholder
        for name, tensor in alone.tensors.items():
            # Sums in another order move the last bits: by at most 1.03e-6 of the features' size where it was measured
            # (images of 8 shapes in batches of 2 to all, one thread; two threads: by nothing). How a matrix product
            # adds depends on how many rows it has, and the embedding of patches is one.
            torch.testing.assert_close(batched.tensors[name], tensor, rtol=0, atol=1.1e-6 * float(tensor.abs().max()))


def test_records_survive_the_store_and_hold_no_more_than_their_item(
    facts: VisionLanguageFacts, encoder: VisionEncoder
) -> None:
    items = one_shape(facts, "image")
    encoded = encoder.encode("image", [f for f, _ in items], [g for _, g in items], {})
    blob = encode_record(encoded[0].record({"content": "x"}))
    record = decode_record(blob)
    hidden = facts.config.text_config.hidden_size
    length = items[0][1].feature_length
    assert {name: view.shape for name, view in record.tensors.items()} == {
        "pooler_output": (length, hidden),
        "deepstack_features.0": (length, hidden),
    }
    assert len(blob) < 2 * length * hidden * 4 + 4096
    assert np.array_equal(record.tensors["pooler_output"].numpy(), encoded[0].tensors["pooler_output"].numpy())


def test_true_times_reach_the_placeholders(facts: VisionLanguageFacts) -> None:
    frames, geometry = frames_of(facts, "video", 3)
    late = dataclasses.replace(geometry, timestamps=tuple(t + 7 for t in frames.pts_seconds))
    text = facts.placeholder("video", late).text
    # Two frames a temporal patch: the means of 7.0 and 7.5, and of 8.0 and 8.5, to one decimal.
    assert "<7.2 seconds>" in text
    assert "<8.2 seconds>" in text


def test_what_was_not_planned_is_told(facts: VisionLanguageFacts, encoder: VisionEncoder) -> None:
    frames, geometry = frames_of(facts, "image", 1)
    [item] = encoder.encode("image", [frames], [geometry], {})
    assert item.mismatch(geometry) == ""
    _, rows, columns = geometry.grid
    turned = dataclasses.replace(geometry, grid=(1, columns, rows))
    assert rows != columns and "grid" in item.mismatch(turned)
    assert "features" in item.mismatch(dataclasses.replace(geometry, feature_length=geometry.feature_length + 1))
    fewer = dataclasses.replace(item, placeholder=Placeholder(text="x", runs=(1,)))
    assert "1 placeholders" in fewer.mismatch(geometry)


def test_weights_digest_is_of_the_numbers(facts: VisionLanguageFacts) -> None:
    first = VisionEncoder(facts, dtype="float32", device="cpu")
    digest = first.weights_digest()
    assert VisionEncoder(facts, dtype="float32", device="cpu").weights_digest() == digest
    with torch.no_grad():
        next(first.model.parameters()).view(-1)[0] += 1e-3
    assert first.weights_digest() != digest


def prompted(
    facts: VisionLanguageFacts,
    encoder: VisionEncoder,
    scene: int,
    seed: int = 0,
    question: str = "Which shape is it?",
) -> PromptedItem:
    frames, geometry = frames_of(facts, "image", scene)
    [item] = encoder.encode("image", [frames], [geometry], {})
    tokenizer = facts.processor.tokenizer
    head = tokenizer("<|im_start|>user\n<|vision_start|>")["input_ids"]
    tail = tokenizer(f"<|vision_end|>{question}<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    pads = list(facts.media_token_ids[:1]) * item.placeholder.num_tokens
    return PromptedItem(input_ids=[*head, *pads, *tail], media=(item.record({"content": "x"}),), seed=seed)


def test_samples_do_not_depend_on_the_batch(facts: VisionLanguageFacts, encoder: VisionEncoder) -> None:
    model = LanguageModel(facts, dtype="float32", device="cpu")
    options = GenerationOptions(max_new_tokens=12, temperature=30.0)
    items = [prompted(facts, encoder, scene, seed=scene) for scene in range(6)]
    together = model.generate(items, options, {})
    alone = [model.generate([item], options, {})[0] for item in items]
    assert [a.token_ids for a in together] == [a.token_ids for a in alone]
    other = model.generate([prompted(facts, encoder, 0, seed=99)], options, {})[0]
    assert other.token_ids != alone[0].token_ids


def test_rows_that_have_their_answer_cost_nothing_more(facts: VisionLanguageFacts, encoder: VisionEncoder) -> None:
    model = LanguageModel(facts, dtype="float32", device="cpu")
    options = GenerationOptions(max_new_tokens=24)
    items = [prompted(facts, encoder, scene) for scene in range(4)]
    items += [prompted(facts, encoder, scene, question="Describe what you see.") for scene in range(4)]
    words = facts.processor.tokenizer("<|im_start|>user\nWhich shape is it?<|im_end|>\n<|im_start|>assistant\n")
    items.append(PromptedItem(input_ids=words["input_ids"], media=(), seed=0))
    counts = {"decode_slots": 1000}
    together = model.generate(items, options, {}, counts)
    assert [a.token_ids for a in together] == [model.generate([item], options, {})[0].token_ids for item in items]
    lengths = [len(answer.token_ids) for answer in together]
    assert len(set(lengths)) > 1
    slots = 1000 + sum(lengths) - len(lengths)
    assert counts == {"decode_steps": max(lengths) - 1, "decode_slots": slots, "idle_decode_slots": 0}


def test_limits_and_stops_name_why_an_answer_ended(facts: VisionLanguageFacts, encoder: VisionEncoder) -> None:
    model = LanguageModel(facts, dtype="float32", device="cpu")
    item = prompted(facts, encoder, 2)
    [cut] = model.generate([item], GenerationOptions(max_new_tokens=1), {})
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 1)
    [free] = model.generate([item], GenerationOptions(max_new_tokens=8), {})
    stop = free.text[1:3]
    [stopped] = model.generate([item], GenerationOptions(max_new_tokens=8, stop=(stop,)), {})
    assert stopped.finish_reason == "stop"
    assert stopped.text == free.text[: free.text.find(stop)]
