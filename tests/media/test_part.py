import pytest

from pipeline.errors import ItemError
from pipeline.media.part import part_plan, probe_part
from pipeline.media.sampling import sample_plan
from pipeline.schema import MediaItem, Probe, SamplePlan

VIDEO = Probe(
    modality="video",
    container="mov",
    codec="h264",
    width=96,
    height=64,
    num_bytes=1,
    duration_seconds=20.0,
    rate_fps=30.0,
    num_frames=600,
)


def part(start: float | None, stop: float | None = None) -> MediaItem:
    return MediaItem(uri="a.mp4", start_seconds=start, stop_seconds=stop)


@pytest.mark.parametrize(
    "start, stop, duration, num_frames",
    [
        (12.0, 20.0, 8.0, 240),
        (12.0, None, 8.0, 240),
        (None, 5.0, 5.0, 150),
        (0.0, 20.0, 20.0, 600),
        (19.99, None, 0.01, 1),
        (15.0, 21.0, 5.0, 150),  # 5 % of 20 s behind the end
        (3.0, 3.001, 0.001, 1),
    ],
)
def test_a_part_has_its_own_duration_and_frames(start, stop, duration, num_frames):
    found = probe_part(part(start, stop), VIDEO)
    assert found.duration_seconds == pytest.approx(duration)
    assert found.num_frames == num_frames
    assert (found.width, found.height, found.rate_fps, found.num_bytes) == (96, 64, 30.0, 1)


@pytest.mark.parametrize("start, stop", [(20.0, None), (25.0, 26.0), (10.0, 21.1), (None, 100.0)])
def test_a_part_that_is_not_there(start, stop):
    with pytest.raises(ItemError, match=r"no_such_part: a\.mp4#t=.*: it is 20\.000 s long"):
        probe_part(part(start, stop), VIDEO)


def test_what_has_no_duration_has_no_parts():
    image = Probe(modality="image", container="png", codec="png", width=1, height=1, num_bytes=1)
    assert probe_part(MediaItem(uri="a.png"), image) is image
    with pytest.raises(ItemError, match="modality_mismatch"):
        probe_part(part(1.0), image)
    unknown = Probe(modality="video", container="flv", codec="h264", width=1, height=1, num_bytes=1)
    with pytest.raises(ItemError, match="no_such_part"):
        probe_part(part(0.0, 1.0), unknown)


class EverySecond:
    policy, fps, num_frames, min_frames, max_frames = "fps", 1.0, 4, 1, 64


class FourUniform(EverySecond):
    policy = "uniform"


def test_planned_times_lie_in_the_part_on_the_clock_of_the_file():
    item = part(12.0, 20.0)
    every = part_plan(item, sample_plan(probe_part(item, VIDEO), EverySecond()))
    assert every.pts_seconds == tuple(float(t) for t in range(12, 20))
    uniform = part_plan(item, sample_plan(probe_part(item, VIDEO), FourUniform()))
    assert uniform.pts_seconds == pytest.approx([12 + k * (8 - 1 / 30) / 3 for k in range(4)])
    whole = SamplePlan(pts_seconds=(0.0, 1.0))
    assert part_plan(MediaItem(uri="a"), whole) is whole


@pytest.mark.parametrize("start, stop", [(-1.0, None), (2.0, 2.0), (None, 0.0), (float("nan"), None)])
def test_items_that_are_no_part(start, stop):
    with pytest.raises(ValueError, match="a part stops behind its start"):
        part(start, stop)
