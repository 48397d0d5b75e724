"""The shipped captioner, through plain transformers: its prompt layout, and its answers on scenes it never saw."""

import io
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

import pipeline.demo
from pipeline.demo import media, scenes
from pipeline.demo.scenes import Kind, Scene

FOLDER = Path(pipeline.demo.__file__).parent / "models" / "captioner"
SCENES_A_KIND = 30
FRAMES_A_SECOND = 2.0


@pytest.fixture(scope="module")
def processor() -> Any:
    return AutoProcessor.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForImageTextToText.from_pretrained(FOLDER).eval()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """A model this small is slower on several threads than on one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def decoded_image(scene: Scene, number: int) -> dict[str, Any]:
    rng = random.Random(f"image {number}")
    format = media.IMAGE_FORMATS[number % len(media.IMAGE_FORMATS)]
    data = media.encode_image(scenes.draw_image(scene, rng), format, rng)
    return {"images": [np.array(Image.open(io.BytesIO(data)).convert("RGB"))]}


def decoded_clip(scene: Scene, number: int) -> dict[str, Any]:
    """The clip's frames at two a second: for each time, the last frame shown by then."""
    codec = media.VIDEO_CODECS[number % len(media.VIDEO_CODECS)]
    frames, fps = scenes.clip_frames(scene, random.Random(f"video {number}"))
    data = media.encode_video(frames, fps, codec, b_frames=2 * (number % 2))
    with av.open(io.BytesIO(data)) as container:
        shown = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    times = np.arange(0, len(shown) / fps, 1 / FRAMES_A_SECOND)
    indices = np.floor(times * fps + 1e-6).astype(int).tolist()
    metadata = {
        "total_num_frames": len(shown),
        "fps": fps,
        "duration": len(shown) / fps,
        "frames_indices": indices,
    }
    return {
        "videos": [np.stack([shown[i] for i in indices])],
        "videos_kwargs": {"video_metadata": [metadata], "do_sample_frames": False},
    }


def prompt(processor: Any, kind: Kind, question: str) -> str:
    content = [{"type": kind}, {"type": "text", "text": question}]
    return processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )


@torch.no_grad()
def ask(model: Any, processor: Any, kind: Kind, decoded: dict[str, Any], question: str) -> str:
    inputs = processor(text=[prompt(processor, kind, question)], **decoded, return_tensors="pt")
    inputs.pop("video_metadata", None)
    tokens = model.generate(**inputs, max_new_tokens=24)
    return processor.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)[0]


@pytest.mark.parametrize("kind", ["image", "video"])
def test_it_answers_about_scenes_it_never_saw(kind: Kind, model: Any, processor: Any) -> None:
    chosen = random.Random(11).sample(sorted(scenes.held_out(kind)), SCENES_A_KIND)
    decode = decoded_image if kind == "image" else decoded_clip
    wrong = []
    for number, scene in enumerate(chosen):
        decoded = decode(scene, number)
        for question in scenes.QUESTIONS[kind]:
            answer = ask(model, processor, kind, decoded, question)
            if answer != scenes.answer(scene, question):
                wrong.append((scenes.caption(scene), question, answer))
    assert len(wrong) <= 0.05 * SCENES_A_KIND * len(scenes.QUESTIONS[kind]), wrong


def test_the_weights_are_small_and_whole() -> None:
    assert (FOLDER / "model.safetensors").stat().st_size < 8_000_000
    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "README.md"} <= {
        path.name for path in FOLDER.iterdir()
    }


def test_the_template_takes_any_order_and_number_of_parts(processor: Any) -> None:
    messages = [
        {"role": "system", "content": "Be exact."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "First "},
                {"type": "image"},
                {"type": "image", "image": "ignored.png"},
                {"type": "text", "text": "then "},
                {"type": "video"},
            ],
        },
    ]
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    assert processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe exact.<|im_end|>\n"
        f"<|im_start|>user\nFirst {image}{image}then <|video_pad|><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_clip_is_laid_out_as_timestamped_pairs_of_frames(processor: Any) -> None:
    metadata = {"total_num_frames": 20, "fps": 10.0, "duration": 2.0, "frames_indices": [0, 5, 10, 15]}
    inputs = processor(
        text=[prompt(processor, "video", scenes.MOTION)],
        videos=[np.zeros((4, 96, 96, 3), np.uint8)],
        videos_kwargs={"video_metadata": [metadata], "do_sample_frames": False},
    )
    pair = "<|vision_start|>" + 9 * "<|video_pad|>" + "<|vision_end|>"
    assert processor.tokenizer.decode(inputs["input_ids"][0]) == (
        f"<|im_start|>user\n<0.2 seconds>{pair}<1.2 seconds>{pair}{scenes.MOTION}<|im_end|>\n<|im_start|>assistant\n"
    )
