"""Seven families through one adapter: ids from stored features equal `generate` of the whole model from pixels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from pipeline.config import Config
from pipeline.runs.receipts import sum_receipts
from tests.models.families import FAMILIES, save_family
from tests.stages.line import Line
from tests.stages.test_equality import as_manifest, listed_files, media_of

NEW_TOKENS = 12
WITH_VIDEO = ("llava_onevision", "internvl", "qwen2_5_vl")


def reference_ids(checkpoint: Path, requests: list[tuple[list[Path], str]]) -> list[tuple[int, ...]]:
    """Greedy ids of each request by itself, from pixels."""
    processor = AutoProcessor.from_pretrained(checkpoint)
    model = AutoModelForImageTextToText.from_pretrained(checkpoint).eval()
    end = model.generation_config.eos_token_id
    answers = []
    for request in requests:
        text, media = media_of(processor, [request])
        inputs = processor(text=text, return_tensors="pt", **media)
        with torch.inference_mode():
            [row] = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        ids = row[inputs["input_ids"].shape[1] :].tolist()
        answers.append(tuple(ids[: ids.index(end) + 1] if end in ids else ids))
    return answers


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_equal_generate_from_pixels(
    family: str,
    demo_media: Path,
    make_config: Callable[..., Config],
    write_manifest: Callable[..., Path],
    tmp_path: Path,
) -> None:
    checkpoint = save_family(family, tmp_path / family)
    files = listed_files(demo_media)
    images = [file for file in files if file.suffix in (".jpg", ".png", ".webp")]
    clips = [file for file in files if file not in images] if family in WITH_VIDEO else []
    requests: list[tuple[list[Path], str]] = [([file], "Describe what you see.") for file in (*images[:6], *clips[:4])]
    requests += [([], "Which shape is it?"), ([images[0]], "What colour? " * 5)]
    config = make_config(
        write_manifest(as_manifest(requests)),
        model=str(checkpoint),
        generate={"max_new_tokens": NEW_TOKENS},
    )
    line = Line(config)
    checked = line.context.checked
    assert {*checked.rules, *checked.own_size_rules} == checked.verdicts.keys()  # no size was asked of the processor
    assert [row["message"] for row in line.rows if row["status"] != "ok"] == []
    expected = reference_ids(checkpoint, requests)
    assert len(set(expected)) > len(requests) // 2  # random weights that answered all alike would prove nothing
    assert line.token_ids == expected
    # The first token of an answer comes of its prompt, each other of one step; none is computed after the answer's end.
    counts = sum_receipts(line.receipts).counts
    assert counts["decode_slots"] == sum(len(ids) - 1 for ids in expected) and counts["idle_decode_slots"] == 0
