"""Decode cost from headers: arithmetic by hand, real clips told apart, and what decoding them takes."""

import io
import statistics
import time
from dataclasses import replace

import pytest
from scipy.stats import spearmanr

from pipeline.media.decode import decode_media
from pipeline.media.probe import probe_media
from pipeline.planning.decode_cost import decode_seconds, decode_work
from pipeline.schema import Probe, SamplePlan
from tests.media.media_files import Recipe, make_video

# 600 frames at 30 fps: 10 keyframes of 10 kB, one every 60, and 590 packets of 1 kB.
CLIP = Probe(
    modality="video",
    container="mov",
    codec="h264",
    width=1000,
    height=500,
    num_bytes=700_000,
    duration_seconds=20.0,
    rate_fps=30.0,
    num_frames=600,
    coded_frames=600,
    coded_bytes=690_000,
    keyframes=10,
    keyframe_bytes=100_000,
    keyframe_spacing=60,
    group_frames=60.0,
)


def plan(*seconds: float) -> SamplePlan:
    return SamplePlan(pts_seconds=seconds)


def test_of_equal_groups_the_packets_up_to_each_groups_last_target_are_fed() -> None:
    # Frames 0; 65 and 75, of the group from 60; 599, of that from 540.
    work = decode_work(CLIP, plan(65 / 30, 75 / 30, 599 / 30))
    assert work.frames == 1 + 16 + 60
    assert work.num_bytes == 3 * 10_000 + (15 + 59) * 1_000
    assert (work.packets, work.shown, work.megapixels) == (600, 3, 0.5)


def test_keyframes_cost_themselves_only() -> None:
    work = decode_work(CLIP, plan(65 / 30, 75 / 30, 599 / 30), at_keyframes=True)
    assert (work.frames, work.num_bytes) == (3, 30_000)


def test_of_unequal_groups_what_is_expected_is_fed() -> None:
    unequal = replace(CLIP, keyframe_spacing=0)
    # A target far from the last one is anywhere in its group: (60 + 1) / 2 packets, besides the first frame.
    assert decode_work(unequal, plan(300 / 30)).frames == pytest.approx(1 + 30.5)
    # One 6 frames behind another is reached over them, or, for 6 of 60 places, from a keyframe in between: 3.5.
    assert decode_work(unequal, plan(300 / 30, 306 / 30)).frames == pytest.approx(1 + 30.5 + 0.9 * 6 + 0.1 * 3.5)


def test_what_cannot_be_sought_is_decoded_up_to_the_last_target() -> None:
    assert decode_work(replace(CLIP, container="avi"), plan(65 / 30, 599 / 30)).frames == 600


def test_a_part_costs_what_lies_in_it_whatever_its_own_length_is() -> None:
    part = replace(CLIP, duration_seconds=2.0, num_frames=60)
    assert decode_work(part, plan(19.0)) == decode_work(CLIP, plan(19.0))


def test_an_entry_without_an_index_still_has_a_cost() -> None:
    old = replace(
        CLIP, coded_frames=0, coded_bytes=0, keyframes=0, keyframe_bytes=0, keyframe_spacing=0, group_frames=0
    )
    assert 0.1 < decode_seconds(old, plan(0.0, 10.0)) / decode_seconds(CLIP, plan(0.0, 10.0)) < 10


def test_more_targets_pixels_and_bytes_never_cost_less() -> None:
    times = [k / 3 for k in range(60)]
    costs = [decode_seconds(CLIP, plan(*times[:count])) for count in range(1, 60)]
    assert costs == sorted(costs)
    assert decode_seconds(replace(CLIP, width=2000), plan(*times)) > costs[-1]
    assert decode_seconds(replace(CLIP, coded_bytes=10**7), plan(*times)) > costs[-1]
    sound = replace(CLIP, modality="audio", sample_rate_hz=48_000, num_channels=2)
    assert decode_seconds(replace(sound, num_channels=4), plan(0.0)) == 2 * decode_seconds(sound, plan(0.0))


def probed(data: bytes) -> Probe:
    return probe_media(io.BytesIO(data), num_bytes=len(data), declared=None, name="item")


def cpu_seconds(data: bytes, probe: Probe, sample: SamplePlan) -> float:
    """Of the least of three runs."""
    seconds = []
    for _ in range(3):
        started = time.process_time()
        decode_media(io.BytesIO(data), probe, sample, (336, 598))
        seconds.append(time.process_time() - started)
    return min(seconds)


NO_B = {"bf": "0", "sc_threshold": "0"}
LARGE, SMALL = (360, 640), (180, 320)
CORPUS = {
    "one group": (Recipe(options={"g": "90", **NO_B}, size=LARGE), plan(0.0, 2.9)),
    "one group, 30 frames": (Recipe(options={"g": "90", **NO_B}, size=LARGE), plan(*(k / 10 for k in range(30)))),
    "groups of 10": (Recipe(options={"g": "10", **NO_B}, size=LARGE), plan(0.0, 2.9)),
    "intra": (Recipe(options={"g": "1"}, size=LARGE), plan(0.0, 1.0, 2.0)),
    "B": (Recipe(options={"g": "90", "bf": "3"}, size=LARGE), plan(0.0, 2.9)),
    "HD": (Recipe(options={"g": "90", **NO_B, "preset": "superfast"}, num_frames=45, size=(720, 1280)), plan(0.0, 1.4)),
    "Matroska": (Recipe(container="matroska", options={"g": "90", **NO_B}, size=SMALL), plan(0.0, 2.9)),
    "MPEG-4": (Recipe(container="avi", library="mpeg4", size=SMALL), plan(0.0, 2.9)),
}


def test_the_estimate_orders_a_corpus_as_decoding_does_and_is_within_a_factor_of_two() -> None:
    """Of CPU time relative to the machine's own speed, which the corpus itself says."""
    estimates, measured = [], []
    for recipe, sample in CORPUS.values():
        data = make_video(recipe)
        estimates.append(decode_seconds(probed(data), sample))
        measured.append(cpu_seconds(data, probed(data), sample))
    factors = [estimate / seconds for estimate, seconds in zip(estimates, measured, strict=True)]
    usual = statistics.median(factors)
    assert {name for name, factor in zip(CORPUS, factors, strict=True) if not 0.5 < factor / usual < 2} == set()
    assert spearmanr(estimates, measured).statistic > 0.85


def test_two_videos_of_one_length_size_and_rate_that_differ_many_times_over_are_told_apart() -> None:
    """By where their keyframes lie: three seconds, in one group or in a group a frame."""
    sample = plan(0.0, 1.4, 2.9)
    clips = [make_video(Recipe(options={"g": g, **NO_B}, size=LARGE)) for g in ("90", "1")]
    slow, quick = (decode_seconds(probed(data), sample) for data in clips)
    assert slow > 3 * quick
    assert cpu_seconds(clips[0], probed(clips[0]), sample) > 3 * cpu_seconds(clips[1], probed(clips[1]), sample)
