"""Large videos on S3: only what their frames need comes over."""

from __future__ import annotations

import io

import numpy as np

from pipeline.media.source import FetchCounter, open_source
from pipeline.media.video import decode_video
from pipeline.schema import MediaItem, SamplePlan
from tests.media.media_files import long_video
from tests.s3.conftest import S3

PLAN = SamplePlan(pts_seconds=(0.0, 31.4, 70.2, 99.9))


def test_a_large_video_is_read_where_its_frames_are(s3: S3) -> None:
    data = long_video(num_groups=100, movflags="")  # its index is at its end
    s3.folder.write_bytes("long.mp4", data)
    counter = FetchCounter()
    with open_source(MediaItem(uri=f"{s3.url}/long.mp4"), counter) as file:
        frames = decode_video(file, PLAN, (64, 96), by_range=True)
    whole = decode_video(io.BytesIO(data), PLAN, (64, 96))
    assert frames.pts_seconds == whole.pts_seconds
    assert np.array_equal(frames.pixels, whole.pixels)
    assert counter.bytes_fetched < len(data) / 15
