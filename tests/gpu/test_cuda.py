"""The halves on a CUDA device. Skipped without one; `scripts/gpu_check` runs them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pipeline.config import Config
from pipeline.demo.scenes import all_scenes, draw_image
from pipeline.media.resize import resize_frames
from pipeline.models.vision_encoder import VisionEncoder
from pipeline.models.vision_language import VisionLanguageFacts
from pipeline.schema import Frames, MediaItem, Probe, SamplePlan
from pipeline.stages.computing import Room
from pipeline.stages.encode import encode_splitting, patches
from pipeline.stages.rows import DecodedMedia, PlannedMedia
from tests.stages.line import Line

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def decoded(facts: VisionLanguageFacts, count: int) -> tuple[list[DecodedMedia], list[Frames]]:
    """`count` images of one shape, as the decode stage hands them over."""
    items, frames = [], []
    for seed in range(count):
        rng = random.Random(seed)
        pixels = resize_frames(draw_image(rng.choice(all_scenes("image")), rng)[None], (128, 128))
        probe = Probe(modality="image", container="png", codec="png", width=128, height=128, num_bytes=1)
        plan = SamplePlan(pts_seconds=(0.0,))
        planned = PlannedMedia(
            position=seed,
            item_index=seed,
            media_index=0,
            tenant="",
            media=MediaItem(uri="drawn"),
            source_id=str(seed),
            content=str(seed),
            probe=probe,
            requested=plan,
            geometry=facts.geometry(probe, plan),
        )
        items.append(DecodedMedia(planned=planned, shown=(0.0,)))
        frames.append(Frames(pixels=pixels, pts_seconds=(0.0,)))
    return items, frames


def test_features_equal_the_cpu_s_within_tolerance() -> None:
    facts = VisionLanguageFacts.load("demo:captioner")
    items, frames = decoded(facts, 8)
    geometries = [item.planned.geometry for item in items]
    features = [
        VisionEncoder(facts, dtype="float32", device=device).encode("image", frames, geometries, {})
        for device in ("cpu", "cuda")
    ]
    for on_cpu, on_gpu in zip(*features, strict=True):
        for name, tensor in on_cpu.tensors.items():
            # TF32 is off by default for matrix products; what is left is the order of sums.
            torch.testing.assert_close(on_gpu.tensors[name], tensor, rtol=1e-3, atol=1e-3)


def test_answers_equal_the_cpu_s(demo_media: Path, make_config: Callable[..., Config]) -> None:
    texts = []
    for device in ("cpu", "cuda"):
        changes = {"encode": {"device": device}, "generate": {"device": device}, "store": {"reuse": False}}
        line = Line(make_config(demo_media / "manifest.jsonl", **changes), device=device)
        texts.append([row["text"] for row in line.rows])
    assert texts[0] == texts[1]


def test_bfloat16_answers_are_mostly_the_float32_ones(demo_media: Path, make_config: Callable[..., Config]) -> None:
    rows = []
    for dtype in ("float32", "bfloat16"):
        changes = {"encode": {"dtype": dtype}, "generate": {"dtype": dtype}}
        rows.append(
            [row["text"] for row in Line(make_config(demo_media / "manifest.jsonl", **changes), device="cuda").rows]
        )
    agreement = sum(a == b for a, b in zip(*rows, strict=True)) / len(rows[0])
    print(f"bfloat16 agrees with float32 on {agreement:.2f} of {len(rows[0])} answers")
    assert agreement >= 0.8


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Leaves this process 64 MB of the device."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(64 * 2**20 / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.usefixtures("little_memory")
def test_a_batch_too_large_for_the_device_is_split() -> None:
    facts = VisionLanguageFacts.load("demo:captioner")
    items, frames = decoded(facts, 512)
    splits = {"oom_splits": 0}
    encoder = VisionEncoder(facts, dtype="float32", device="cuda")
    geometries = [item.planned.geometry for item in items]
    room = Room()
    parts = encode_splitting(encoder, encoder.stage("image", frames, geometries), room, splits)
    encoded = [item for part in parts for item in part.wait({})]
    assert len(encoded) == 512
    assert splits["oom_splits"] > 0
    runs = room.runs([patches(geometry) for geometry in geometries])
    assert len(runs) > 1  # the next batch of that size is not tried whole
    again = {"oom_splits": 0}
    for run in runs:
        encode_splitting(encoder, encoder.stage("image", frames[run], geometries[run]), room, again)
    assert again["oom_splits"] == 0
