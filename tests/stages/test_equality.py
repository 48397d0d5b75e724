"""Token ids through plan, store and halves equal plain `generate` of the whole model from pixels."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from pipeline.config import Config
from pipeline.models.location import resolve_model
from tests.stages.line import Line

FPS, MAX_FRAMES, NEW_TOKENS = 2, 16, 24


@pytest.fixture(scope="module")
def plain() -> tuple[Any, Any]:
    """The whole model and its processor, as a transformers user has them."""
    path = resolve_model("demo:captioner")
    return AutoProcessor.from_pretrained(path), AutoModelForImageTextToText.from_pretrained(path).eval()


def decode_all(path: Path) -> tuple[np.ndarray, dict[str, Any]]:
    """Frames at 0, 1/2, 1 … seconds of a constant-rate clip, found by decoding all of it."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
        rate = float(stream.average_rate)
    duration = len(frames) / rate
    wanted = [k / FPS for k in range(100) if k / FPS < duration]
    assert 4 <= len(wanted) <= MAX_FRAMES
    indices = [max(i for i in range(len(frames)) if i / rate <= time + 1e-6) for time in wanted]
    metadata = {"total_num_frames": len(frames), "fps": rate, "frames_indices": indices, "duration": duration}
    return np.stack([frames[i] for i in indices]), metadata


def media_of(processor: Any, requests: list[tuple[list[Path], str]]) -> tuple[list[str], dict[str, Any]]:
    """Rendered chats, and the media of all of them as a processor takes them."""
    texts, images, videos, metadata = [], [], [], []
    for files, prompt in requests:
        kinds = ["image" if file.suffix in (".jpg", ".png", ".webp") else "video" for file in files]
        content = [{"type": kind} for kind in kinds] + [{"type": "text", "text": prompt}]
        chat = [{"role": "user", "content": content}]
        texts.append(processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        for kind, file in zip(kinds, files, strict=True):
            if kind == "image":
                with Image.open(file) as image:
                    images.append(image.convert("RGB"))
            else:
                frames, facts = decode_all(file)
                videos.append(frames)
                metadata.append(facts)
    media: dict[str, Any] = {"images": images} if images else {}
    if videos:
        media.update(videos=videos, videos_kwargs={"video_metadata": metadata, "do_sample_frames": False})
    return texts, media


def reference_ids(plain: tuple[Any, Any], requests: list[tuple[list[Path], str]]) -> list[list[int]]:
    """Greedy ids of the requests in one left-padded batch, each without padding after its end."""
    processor, model = plain
    texts, media = media_of(processor, requests)
    inputs = processor(text=texts, padding=True, return_tensors="pt", **media)
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    end = model.generation_config.eos_token_id
    rows = output[:, inputs["input_ids"].shape[1] :].tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


def listed_files(folder: Path) -> list[Path]:
    """The media of the demo manifest, in its order."""
    lines = (folder / "manifest.jsonl").read_text().splitlines()
    return [folder / json.loads(line)["media"][0]["uri"] for line in lines]


def mixed_requests(folder: Path) -> list[tuple[list[Path], str]]:
    """Images, clips, several of both in one request, text only, prompts of many lengths."""
    media = listed_files(folder)
    images = [file for file in media if file.suffix in (".jpg", ".png", ".webp")]
    clips = [file for file in media if file not in images]
    asked = "Describe what you see."
    requests = [([file], asked) for file in media]
    requests += [
        ([images[0], images[1]], asked),
        ([images[2], clips[0]], "What colour is the shape?"),
        ([clips[1], images[3], clips[2]], "Which shape is it? " * 6),
        ([], "Which shape is it?"),
        ([], asked * 9),
    ]
    return requests


def as_manifest(requests: list[tuple[list[Path], str]]) -> list[dict[str, Any]]:
    """The requests as manifest rows."""
    return [
        {"id": f"r{i}", "media": [str(file) for file in files], "prompt": prompt}
        for i, (files, prompt) in enumerate(requests)
    ]


@pytest.mark.parametrize("max_batch_items", [1, 3, 32])
def test_ids_equal_generate_from_pixels(
    plain: tuple[Any, Any],
    demo_media: Path,
    make_config: Callable[..., Config],
    write_manifest: Callable[..., Path],
    max_batch_items: int,
) -> None:
    requests = mixed_requests(demo_media)
    config = make_config(
        write_manifest(as_manifest(requests)),
        encode={"max_batch_items": max_batch_items},
        generate={"max_batch_items": max_batch_items, "max_new_tokens": NEW_TOKENS},
        store={"reuse": False},
    )
    line = Line(config)
    assert [row["status"] for row in line.rows] == ["ok"] * len(requests)
    assert line.token_ids == [tuple(ids) for ids in reference_ids(plain, requests)]


def test_a_second_question_needs_no_media(
    plain: tuple[Any, Any], demo_media: Path, make_config: Callable[..., Config]
) -> None:
    first = Line(make_config(demo_media / "manifest.jsonl"))
    assert first.count("encodes") == 20
    second = Line(make_config(demo_media / "manifest.jsonl", prompt="Which shape is it?"))
    for name in ("fetches", "bytes_fetched", "images_decoded", "frames_decoded", "encodes", "fallbacks"):
        assert second.count(name) == 0, name
    assert second.count("features_reused") == 20
    expected = reference_ids(plain, [([file], "Which shape is it?") for file in listed_files(demo_media)])
    assert second.token_ids == [tuple(ids) for ids in expected]
