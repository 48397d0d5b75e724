"""Frames arrive and features leave while the device computes. Skipped without a CUDA device.

The device is kept busy by a kernel that spins for about a second: what waited for it would find it done.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.config import Config
from pipeline.models.transfer import DeviceLink
from pipeline.models.vision_encoder import StagedMedia
from pipeline.runs.run import start_run
from pipeline.schema import Frames
from pipeline.stages.checked_model import checked_model
from pipeline.stages.context import StageContext
from pipeline.stages.encode import EncodeBatches
from tests.stages.line import decoded_batches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SPIN_CYCLES = 2_000_000_000


def spin() -> torch.cuda.Event:
    """Keep the current stream busy; the event has happened when it is free again."""
    torch.cuda._sleep(SPIN_CYCLES)
    done: torch.cuda.Event = torch.cuda.current_stream().record_event()
    return done


def frames(seed: int) -> list[Frames]:
    shapes = ((1, 64, 96), (2, 128, 64))
    drawn = [np.random.default_rng([seed, *s]).integers(0, 256, (*s, 3), dtype=np.uint8) for s in shapes]
    return [Frames(pixels=each, pts_seconds=tuple(map(float, range(len(each))))) for each in drawn]


@pytest.fixture
def link() -> DeviceLink:
    """One that has been used: memory is pinned and allocated, which waits for the device, when it is first needed."""
    made = DeviceLink(torch.device("cuda"))
    for seed in (0, 1):
        received = made.receive(made.send_frames(frames(seed)))
        made.fetch([each.float() for each in received]).wait()
    torch.cuda.synchronize()
    return made


def test_frames_arrive_while_the_device_computes(link: DeviceLink) -> None:
    busy = spin()
    sent = link.send_frames(frames(2))
    assert sent.copied is not None
    sent.copied.synchronize()
    assert not busy.query()
    for found, item in zip(link.receive(sent), frames(2), strict=True):
        assert np.array_equal(found.cpu().numpy(), item.pixels)


def test_features_leave_while_the_device_computes(link: DeviceLink) -> None:
    features = [each.float() for each in link.receive(link.send_frames(frames(3)))]
    fetched = link.fetch(features)
    busy = spin()
    fetched.wait()
    assert not busy.query()
    for found, item in zip(fetched.tensors, frames(3), strict=True):
        assert np.array_equal(found.numpy(), item.pixels.astype(np.float32))


def test_what_is_received_is_not_read_before_it_is_there(link: DeviceLink) -> None:
    with torch.cuda.stream(link._inward):
        torch.cuda._sleep(SPIN_CYCLES)  # the copy waits behind it
    received = link.receive(link.send_frames(frames(4)))
    for found, item in zip(received, frames(4), strict=True):
        assert np.array_equal((found + 0).cpu().numpy(), item.pixels)


def test_the_stage_sends_the_next_batch_while_one_is_computed(
    demo_media: Path, make_config: Callable[..., Config]
) -> None:
    config = make_config(demo_media / "manifest.jsonl", encode={"device": "cuda", "max_batch_items": 1})
    with start_run(config) as run:
        context = StageContext(config=config, run_url=run.folder.url, checked=checked_model(config, "cuda"))
        rows = decoded_batches(context, run.manifest.num_items)
        stage = EncodeBatches(context, "cuda")
        list(stage(rows))  # memory is pinned and allocated, which waits for the device, when it is first needed
        overlaps: list[bool] = []
        busy: list[torch.cuda.Event] = []
        compute = stage.encoder.compute

        def slowly(staged: StagedMedia) -> Any:
            if busy and staged.frames is not None and staged.frames.copied is not None:
                staged.frames.copied.synchronize()
                overlaps.append(not busy[-1].query())
            computed = compute(staged)
            busy.append(spin())
            return computed

        stage.encoder.compute = slowly  # type: ignore[method-assign]
        list(stage(rows.slice(0, 6)))
        stage.writer.close()
    assert overlaps == [True] * 5
