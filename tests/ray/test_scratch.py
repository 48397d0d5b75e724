"""A bounded store on a real Ray: its disk is watched all along, also while the run is killed and started again."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline import flow
from pipeline.config import load_config
from tests.disk_use import Watch, disk_use
from tests.ray.conftest import Driver, Job
from tests.test_scratch import write_corpus
from tests.without_ray import run_without_ray

pytestmark = pytest.mark.timeout(550)
MAX_BYTES = 560_000  # two of the windows of 8 items
NUM_WINDOWS = 4
NOTE_BYTES = 8192  # what the store remembers of the model
TOKEN_BYTES = 1024  # of the demo model: 128 float32 after the projector, and one deep-stack level of as many
PATCHES_A_TOKEN = 4
FOUR_WINDOWS = ("limit=32", "ray.first_window_items=8", "ray.window_items=8", "ray.segment_windows=64")


def store_of(job: Job) -> Path:
    return job.output.parent / "store"


def deleted_and_mapped(driver: Driver, store: Path) -> list[str]:
    """Lines of the driver's processes' memory maps that hold on to deleted files of the store."""
    found = []
    for pid in driver.processes():
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        found += [f"{pid}: {line}" for line in lines if str(store) in line and line.endswith("(deleted)")]
    return found


def encoded(job: Job) -> set[str]:
    return {Path(name).name.removeprefix("encode-") for name in job.ledger("encode")}


def answered(job: Job) -> set[str]:
    return {Path(name).name.removeprefix("generate-") for name in job.ledger("generate")}


@pytest.mark.slow
def test_killed_in_its_second_segment_it_stays_within_the_bound(
    make_job: Callable[..., Job],
    start: Callable[..., Driver],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = make_job("bounded", workers=1)
    bounded = (*FOUR_WINDOWS, "store.keep_frames=false", "store.retention=segment", f"store.max_bytes={MAX_BYTES}")
    with Watch(store_of(job), every_seconds=0.02) as watch:
        driver = start(job, *bounded)
        driver.until(lambda: answered(job))
        first = encoded(job)
        driver.until(lambda: encoded(job) - first)
        held = deleted_and_mapped(driver, store_of(job))
        assert driver.signal(signal.SIGKILL) == -signal.SIGKILL
        left = disk_use(store_of(job))
        assert len(answered(job)) == len(first) < len(encoded(job)) <= NUM_WINDOWS
        resumed = start(job, *bounded)
        assert resumed.wait() == 0, resumed.said
    summary = job.summary()
    feature_bytes = summary["computed_tokens"] // PATCHES_A_TOKEN * TOKEN_BYTES
    print(
        f"{feature_bytes} bytes of features = {feature_bytes / MAX_BYTES:.1f} bounds, killed with {left} in the store; "
        f"peak {watch.peak} = {watch.peak / MAX_BYTES:.2f} bounds in {watch.looks} looks"
    )
    assert held == []
    assert left > NOTE_BYTES
    assert watch.looks > 200
    # On a local disk nothing is there twice: not even one shard a writer comes on top.
    assert watch.peak <= MAX_BYTES
    assert disk_use(store_of(job)) <= NOTE_BYTES
    assert resumed.scratch_files() == []
    elsewhere = (f"output={tmp_path}/output", f"store.path={tmp_path}/store")
    keeping = load_config(str(job.config), [*FOUR_WINDOWS, *elsewhere])
    run_without_ray(monkeypatch)
    kept = flow.run(keeping)
    expected = {path.name: path.read_bytes() for path in (tmp_path / "output" / kept["run_id"]).glob("part-*")}
    assert job.parts() == expected
    assert summary["encodes"] == kept["encodes"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_times_the_bound_with_two_workers(
    make_job: Callable[..., Job], start: Callable[..., Driver], tmp_path: Path
) -> None:
    """Over twenty segments, each of which starts two workers for each of its passes."""
    max_bytes, num_items = 1_200_000, 320
    many = write_corpus(tmp_path, num_items)
    job = make_job("twenty", workers=2)
    corpus = (f"input={many}", "limit=null", "sampling.fps=4", "generate.max_new_tokens=2")
    windows = ("ray.first_window_items=4", "ray.window_items=4", "store.keep_frames=false")
    with Watch(store_of(job), every_seconds=0.02) as watch:
        driver = start(job, *corpus, *windows, "store.retention=segment", f"store.max_bytes={max_bytes}")
        assert driver.wait() == 0, driver.said
    summary = job.summary()
    feature_bytes = summary["computed_tokens"] // PATCHES_A_TOKEN * TOKEN_BYTES
    print(
        f"{feature_bytes} bytes of features = {feature_bytes / max_bytes:.1f} bounds; peak {watch.peak} = "
        f"{watch.peak / max_bytes:.2f} bounds in {watch.looks} looks; {summary['seconds']['total']:.0f} s"
    )
    assert feature_bytes >= 20 * max_bytes
    assert watch.peak <= max_bytes
    assert summary["items_written"] == num_items
    assert disk_use(store_of(job)) <= NOTE_BYTES
