import io

import numpy as np
import pytest
from media_files import Recipe, full_decode, make_image, make_video, shown_at

from pipeline.config import Sampling
from pipeline.errors import ItemError
from pipeline.media.backend import DECODE_BACKEND
from pipeline.media.decode import decode_media
from pipeline.media.probe import probe_media
from pipeline.media.resize import resize_frames
from pipeline.media.sampling import sample_plan
from pipeline.schema import Frames, SamplePlan


def run(data: bytes, size: tuple[int, int] | None, **sampling: object) -> Frames:
    file = io.BytesIO(data)
    probe = probe_media(file, num_bytes=len(data), declared=None, name="item")
    return decode_media(file, probe, sample_plan(probe, Sampling.model_validate(sampling)), size)


def test_a_clip_from_probe_to_frames():
    data = make_video(Recipe(num_frames=150, options={"g": "30", "bf": "3"}))
    frames = run(data, (28, 56), fps=1.0)
    expected = np.stack([shown_at(full_decode(data), float(t)) for t in range(5)])
    assert frames.pts_seconds == pytest.approx((0, 1, 2, 3, 4))
    assert np.array_equal(frames.pixels, resize_frames(expected, (28, 56)))


def test_an_image_from_probe_to_frames():
    assert run(make_image("PNG"), (28, 28)).pixels.shape == (1, 28, 28, 3)


@pytest.mark.parametrize("container", ["mp4", "matroska"])
@pytest.mark.parametrize("rotation", [0, 90, 180, -90])
def test_probe_and_decode_agree_on_the_size(container, rotation):
    data = make_video(Recipe(container=container, rotation=rotation, num_frames=4))
    probe = probe_media(io.BytesIO(data), num_bytes=len(data), declared=None, name="item")
    frames = decode_media(io.BytesIO(data), probe, SamplePlan(pts_seconds=(0.0,)), None)
    assert frames.pixels.shape[1:3] == (probe.height, probe.width)


@pytest.mark.parametrize("container", ["matroska", "webm", "mpegts", "flv", "avi"])
@pytest.mark.parametrize("start", [0, 150])
@pytest.mark.parametrize("sampling", [{"policy": "uniform", "num_frames": 7}, {"policy": "fps", "fps": 3.0}])
def test_a_whole_file_is_never_truncated(container, start, sampling):
    library = {"webm": "libvpx-vp9", "avi": "mpeg4"}.get(container, "libx264")
    start = 0 if container == "avi" else start
    frames = run(make_video(Recipe(container=container, library=library, start=start)), None, **sampling)
    assert len(set(frames.pts_seconds)) == len(frames.pts_seconds)


def test_a_plan_for_another_modality_is_refused():
    data = make_image("PNG")
    probe = probe_media(io.BytesIO(data), num_bytes=len(data), declared=None, name="item")
    with pytest.raises(ItemError) as caught:
        decode_media(io.BytesIO(data), probe, SamplePlan(pts_seconds=(0.0, 1.0)), None)
    assert (caught.value.stage, caught.value.code) == ("decode", "wrong_frame_count")


def test_the_back_end_names_what_decodes():
    for name in ("pyav-", "libavcodec-", "libswscale-", "pillow-"):
        assert name in DECODE_BACKEND
