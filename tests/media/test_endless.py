"""Media that hardly end: each has its verdict within its time and its memory, and costs nothing but itself."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Iterator

import pytest

from pipeline.config import Sampling
from pipeline.errors import ItemError
from pipeline.media.audio import decode_audio
from pipeline.media.budget import admit, resolve_budget
from pipeline.media.sampling import sample_plan
from pipeline.media.sandbox import Sandbox
from pipeline.media.undecoded import Undecoded
from pipeline.planning.decode_cost import decode_seconds
from pipeline.schema import ResourceVector
from tests.media.endless_files import FILES
from tests.media.media_files import make_image

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the child is kept in by Linux")
ITEM_SECONDS = 3.0
LONGEST_SECONDS = 60.0
JPEG = make_image("JPEG")
# A child may be too slow for what it could tell, on a machine with other work.
EXPECTED = {
    "flac_without_a_length": {"decode over_budget_duration", "probe timeout"},
    "flac_of_a_second": {"decode over_budget_duration"},
    "adts": {"admit over_budget_duration", "probe timeout"},
    "mp3": {"admit over_budget_duration"},
    "opus": {"decode over_budget_duration"},
    "wav_of_any_length": {"decode over_budget_duration"},
    "still_mp4": {"frames", "decode timeout"},
    "crowded_mp4": {"frames", "decode timeout"},
    "looping_ts": {"frames", "decode timeout"},
    "looping_webm": {"frames", "decode timeout"},
    "promised_packets": {"admit over_budget_decode"},
    "gif": {"frames"},
    "png_of_remarks": {"frames", "decode timeout"},
}


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    sandbox = Sandbox(item_seconds=ITEM_SECONDS)
    sandbox.start()
    yield sandbox
    sandbox.close()


def verdict(sandbox: Sandbox, data: bytes) -> str:
    """`frames`, `samples`, or stage and code."""
    try:
        probe = sandbox.probe(io.BytesIO(data), num_bytes=len(data), declared=None, name="item")
        plan = sample_plan(probe, Sampling(policy="uniform", num_frames=4))
        admit(
            ResourceVector(
                num_bytes=len(data),
                pixels_per_frame=probe.width * probe.height,
                num_frames=len(plan),
                duration_seconds=probe.duration_seconds,
                feature_tokens=1,
                num_samples=probe.num_samples,
                decode_seconds=decode_seconds(probe, plan),
            ),
            resolve_budget("default", {}),
        )
        if probe.modality == "audio":
            decode_audio(io.BytesIO(data), rate_hz=16_000, longest_seconds=LONGEST_SECONDS)
            return "samples"
        [outcome] = sandbox.decode([Undecoded(data=data, probe=probe, plan=plan, size=(28, 28))])
        if isinstance(outcome.result, ItemError):
            raise outcome.result
    except ItemError as error:
        return f"{error.stage} {error.code}"
    return "frames"


@pytest.mark.parametrize("name", FILES)
def test_a_verdict_comes_in_time(sandbox: Sandbox, name: str) -> None:
    data = FILES[name]()
    started = time.monotonic()
    found = verdict(sandbox, data)
    took = time.monotonic() - started
    assert found in EXPECTED[name]
    assert took < 2 * (ITEM_SECONDS + 1), took  # header and pictures have a deadline each
    assert verdict(sandbox, JPEG) == "frames"
