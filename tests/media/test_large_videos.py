"""An object of 2 GB at a URL: of 8 frames only what they need comes over."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from pipeline.media.probe import probe_media
from pipeline.media.source import FetchCounter, open_source
from pipeline.media.url_policy import SourcePolicy
from pipeline.media.video import decode_video
from pipeline.planning.decode_cost import decode_seconds
from pipeline.schema import MediaItem, SamplePlan
from tests.media.media_files import Recipe, full_decode, make_video, write_long_video
from tests.media.web_server import Web, make_authority

NUM_GROUPS = 3_600  # of a second each
GROUP = Recipe(
    num_frames=30, size=(720, 1280), options={"g": "30", "bf": "0", "crf": "14", "sc_threshold": "0", "preset": "fast"}
)


@pytest.mark.slow
@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_of_two_gigabytes_a_few_megabytes_are_fetched(
    container: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = make_video(GROUP)
    path = tmp_path / "long"
    write_long_video(str(path), group, num_groups=NUM_GROUPS, container=container)
    context, authority = make_authority(tmp_path, "localhost")
    monkeypatch.setenv("SSL_CERT_FILE", authority)
    counter = FetchCounter()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data, Web(context) as web:
        item = MediaItem(uri=web.hold("/long", data, ETag='"a"', Content_Type="video/mp4"))
        policy = SourcePolicy(internal_domains=("localhost",), allowed_ports=(web.port,), max_bytes=2**32)
        with open_source(item, counter, policy) as source:
            probe = probe_media(source, num_bytes=len(data), declared=None, name="long")
        probed = counter.bytes_fetched
        seconds = [k * (probe.duration_seconds - 0.1) / 7 for k in range(8)]
        plan = SamplePlan(pts_seconds=tuple(seconds))
        with open_source(item, counter, policy) as source:
            frames = decode_video(source, plan, None, by_range=True)
        print(
            f"{container}: {len(data):,} bytes, of which {probed:,} to probe and {counter.bytes_fetched - probed:,} "
            f"to decode 8 frames, in {counter.fetches} requests; {decode_seconds(probe, plan):.2f} s estimated"
        )
        assert len(data) > 2 * 10**9
    path.unlink()
    truth = [pixels for _, pixels in full_decode(group)]
    for shown, pixels in zip(frames.pts_seconds, frames.pixels, strict=True):
        assert np.array_equal(pixels, truth[round(shown * 30) % 30])
    assert [0 <= t - shown < 1 / 30 + 0.002 for t, shown in zip(seconds, frames.pts_seconds, strict=True)] == [True] * 8
    assert counter.bytes_fetched < 16 * 2**20
