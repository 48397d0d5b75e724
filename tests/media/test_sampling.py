from dataclasses import dataclass
from typing import Literal

import pytest

from pipeline.config import Sampling
from pipeline.errors import ItemError
from pipeline.media.sampling import indices_plan, sample_plan
from pipeline.schema import Probe


@dataclass(frozen=True, kw_only=True)
class Policy:
    policy: Literal["fps", "uniform", "every_n_seconds", "timestamps", "keyframes", "model"] = "fps"
    fps: float = 1.0
    every_n_seconds: float = 1.0
    timestamps: tuple[float, ...] = ()
    num_frames: int = 8
    min_frames: int = 1
    max_frames: int = 1000


def clip(num_frames: int, rate: float, *, duration: float | None = None) -> Probe:
    seconds = num_frames / rate if duration is None else duration
    return Probe(
        modality="video",
        container="mov",
        codec="h264",
        width=64,
        height=48,
        num_bytes=1,
        duration_seconds=seconds,
        rate_fps=rate,
        num_frames=num_frames,
    )


def test_the_worked_number_600_frames_at_30_fps_taken_at_1_fps():
    plan = sample_plan(clip(600, 30), Policy(fps=1))
    assert plan.pts_seconds == tuple(float(k) for k in range(20))


def test_an_image_is_its_only_frame():
    image = Probe(modality="image", container="png", codec="png", width=4, height=4, num_bytes=1)
    assert sample_plan(image, Policy(policy="uniform")).pts_seconds == (0.0,)


@pytest.mark.parametrize(
    "num_frames, rate, policy, expected",
    [
        (100, 10, Policy(policy="uniform", num_frames=4), (0.0, 3.3, 6.6, 9.9)),
        (100, 10, Policy(policy="uniform", num_frames=1), (0.0,)),
        (3, 10, Policy(policy="uniform", num_frames=8), (0.0, 0.1, 0.2)),  # never more than there are
        (25, 25, Policy(fps=2), (0.0, 0.5)),
        (25, 25, Policy(fps=2, min_frames=3), (0.0, 0.48, 0.96)),
        (250, 25, Policy(fps=2, max_frames=2), (0.0, 9.96)),
        (2, 25, Policy(fps=2, min_frames=4), (0.0, 0.04)),
        (1, 25, Policy(fps=2, min_frames=4), (0.0,)),
        (5, 5, Policy(fps=50), (0.0, 0.2, 0.4, 0.6, 0.8)),  # faster than the clip: every frame once
        (100, 10, Policy(policy="every_n_seconds", every_n_seconds=4), (0.0, 4.0, 8.0)),
        (100, 10, Policy(policy="every_n_seconds", every_n_seconds=60, min_frames=4), (0.0,)),
        (100, 10, Policy(policy="every_n_seconds", every_n_seconds=1, max_frames=2), (0.0, 9.9)),
        (100, 10, Policy(policy="keyframes", num_frames=4), (0.0, 3.3, 6.6, 9.9)),
        (100, 10, Policy(policy="timestamps", timestamps=(0.5, 7.25, 9.95, 10.0, 60.0)), (0.5, 7.25, 9.9)),
    ],
)
def test_times(num_frames, rate, policy, expected):
    plan = sample_plan(clip(num_frames, rate), policy)
    assert plan.pts_seconds == pytest.approx(expected)


def test_times_do_not_pass_the_last_frame():
    plan = sample_plan(clip(21, 10), Policy(fps=4))  # 2.1 s: 9 times, the last frame at 2.0
    assert plan.pts_seconds == pytest.approx((0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2.0))
    short = sample_plan(clip(0, 0.5, duration=20.0), Policy(fps=0.55))  # k = 10 falls on 18.18
    assert max(short.pts_seconds) == 18.0


@pytest.mark.parametrize("fps", [0.1, 0.3, 1 / 3, 1.1, 24000 / 1001, 29.97])
@pytest.mark.parametrize("seconds", [0.1, 0.3, 0.7, 1.0, 3.3, 20.0, 19.999999])
def test_the_count_obeys_the_rule_to_the_last_bit(fps, seconds):
    expected = 0
    while expected / fps < seconds:
        expected += 1
    plan = sample_plan(clip(0, 1000, duration=seconds), Policy(fps=fps))
    assert len(plan) == max(expected, 1)


def test_an_unknown_frame_count_and_duration_give_the_first_frame():
    plan = sample_plan(clip(0, 30, duration=0.0), Policy(min_frames=1))
    assert plan.pts_seconds == (0.0,)


def test_a_day_at_a_high_rate_is_not_listed_before_it_is_limited():
    plan = sample_plan(clip(0, 30, duration=86_400.0), Policy(fps=1e6, max_frames=3))
    assert plan.pts_seconds == pytest.approx((0.0, 43_200 - 1 / 60, 86_400 - 1 / 30))


def test_the_configuration_section_is_a_policy():
    plan = sample_plan(clip(300, 30), Sampling(policy="fps", fps=2.0, min_frames=4, max_frames=64))
    assert plan.pts_seconds == pytest.approx([k / 2 for k in range(20)])


def test_timestamps_behind_the_end_leave_nothing():
    with pytest.raises(ItemError) as caught:
        sample_plan(clip(100, 10), Policy(policy="timestamps", timestamps=(10.0, 11.0)))
    assert (caught.value.stage, caught.value.code) == ("plan", "no_frame_sampled")


def test_numbered_frames_are_asked_for_in_their_middle():
    assert indices_plan(clip(100, 10), [7, 0, 99, 120]).pts_seconds == pytest.approx((0.05, 0.75, 9.95, 9.95))
