"""Runs on a real Ray, in processes that are really killed: the results are the same bytes, and nothing is left over."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.costs import assert_costs
from tests.ray.conftest import CLIP_PLACES, NUM_ITEMS, Driver, Job, files

pytestmark = pytest.mark.timeout(400)  # a machine may be slow: a run took 20 to 110 s
FIRST_SEGMENT = 3  # windows
MakeJob = Callable[..., Job]
Start = Callable[..., Driver]
# What must not depend on crashes and workers: everything but times, and fetches (a resumed batch is fetched again).
SAME_COUNTS = (
    *("items_in", "items_written", "items_reused", "items_quarantined", "items_skipped", "quarantine"),
    *("media_in", "encodes", "features_reused", "images_decoded", "frames_decoded", "computed_tokens"),
    *("prompt_tokens", "prompt_padded_tokens", "generated_tokens", "decode_slots", "idle_decode_slots"),
)


@dataclass(frozen=True)
class Interrupted:
    """A run after its driver was killed, and what lay in its folder then."""

    job: Job
    ledger: dict[str, tuple[bytes, int]]
    plans: dict[str, tuple[bytes, int]]
    work: dict[str, tuple[bytes, int]]
    parts: dict[str, tuple[bytes, int]]

    @classmethod
    def look(cls, job: Job) -> Interrupted:
        """What lies there now."""
        assert not (job.folder / "summary.json").exists()
        patterns = ("_run/ledger/*", "_run/plans/*", "_work/**/*", "part-*.parquet")
        return cls(job, *(files(job.folder, pattern) for pattern in patterns))


def assert_kept(before: dict[str, tuple[bytes, int]], after: dict[str, tuple[bytes, int]]) -> None:
    """Every file of `before` has the bytes and the time it had: nobody wrote it again."""
    assert before
    assert {name: after.get(name) == file for name, file in before.items()} == dict.fromkeys(before, True)


def same_counts(job: Job) -> dict[str, Any]:
    """The part of the summary that only inputs and configuration determine."""
    summary = job.summary()
    return {name: summary[name] for name in SAME_COUNTS}


def kept_frames(job: Job) -> set[str]:
    """The keys of the decoded frames that are in sealed shards."""
    catalogue = (job.output.parent / "store" / "frames" / "catalogue").glob("*.parquet")
    return {key for path in catalogue for key in pq.read_table(path)["key"].to_pylist()}


@pytest.fixture(scope="module")
def undisturbed(make_job: MakeJob, start: Start) -> Job:
    """One worker of each kind, to the end; one item is missing, and none may be."""
    job = make_job("undisturbed", workers=1)
    driver = start(job, "max_quarantined_fraction=0")
    assert driver.wait() == 3, driver.said
    assert f"1 of {NUM_ITEMS} items were quarantined" in driver.said
    assert driver.scratch_files() == []
    return job


@pytest.fixture(scope="module")
def killed_in_encode(make_job: MakeJob, start: Start) -> Interrupted:
    """Killed with its workers when the first window was encoded and others were not.

    Of the driver alone its workers would hear some 200 ms later, when they are through all three windows.
    """
    job = make_job("killed", workers=1)
    driver = start(job)
    driver.until(lambda: job.ledger("encode"))
    driver.kill()
    return Interrupted.look(job)


@pytest.fixture(scope="module")
def killed_in_generate(killed_in_encode: Interrupted, start: Start) -> Interrupted:
    """Resumed, and killed again, the driver alone, when the first window was answered and others were not."""
    job = killed_in_encode.job
    driver = start(job)
    driver.until(lambda: job.ledger("generate"))
    assert driver.signal(signal.SIGKILL) == -signal.SIGKILL
    return Interrupted.look(job)


@pytest.fixture(scope="module")
def terminated(make_job: MakeJob, start: Start) -> Interrupted:
    """Asked to end when the first window was encoded and others were not."""
    job = make_job("terminated", workers=1)
    driver = start(job)
    driver.until(lambda: job.ledger("encode"))
    began = time.monotonic()
    assert driver.signal(signal.SIGTERM) == 5, driver.said
    assert time.monotonic() - began < 30
    assert "stopped by SIGTERM" in driver.said
    return Interrupted.look(job)


def test_too_many_quarantined_ends_with_3_and_complete_results(undisturbed: Job) -> None:
    summary = undisturbed.summary()
    assert summary["items_in"] == NUM_ITEMS  # the manifest has more: `limit`
    assert (summary["items_written"], summary["items_quarantined"]) == (NUM_ITEMS - 1, 1)
    assert summary["quarantine"] == {"not_found": 1}
    assert summary["encodes"] == NUM_ITEMS - 1
    rows = [row for path in sorted(undisturbed.folder.glob("part-*")) for row in pq.read_table(path).to_pylist()]
    assert [row["item_index"] for row in rows] == list(range(NUM_ITEMS))
    assert [row["id"] for row in rows if row["status"] != "ok"] == ["missing"]
    texts = [row["text"] for i, row in enumerate(rows) if row["status"] == "ok" and i not in CLIP_PLACES]
    assert len(set(texts)) == len(texts)  # or items could change places unseen
    assert [path.name for path in undisturbed.output.rglob("*.tmp")] == []
    assert not (undisturbed.folder / "_work").exists()
    assert list((undisturbed.output.parent / "store").rglob("writer.lock")) == []  # every shard is sealed


def test_times_and_costs_of_items_add_up(undisturbed: Job) -> None:
    costs = assert_costs(undisturbed.folder)
    summary = undisturbed.summary()
    assert set(summary["cpu_seconds"]) == {"plan", "decode", "encode", "prompt", "generate"}
    assert all(seconds > 0 for seconds in summary["cpu_seconds"].values())
    [missing] = [row for row in costs if row["encode_seconds"] is None]
    assert missing["decode_seconds"] is None and missing["answer_seconds"] is None and missing["media_bytes"] is None
    clips = [row for row in costs if row["item_index"] in CLIP_PLACES]
    assert {row["modality"] for row in clips} == {"video"} and min(row["frames"] for row in clips) > 1


def test_four_workers_of_each_kind_give_the_same_bytes(undisturbed: Job, make_job: MakeJob, start: Start) -> None:
    job = make_job("four", workers=4)
    driver = start(job, "ray.segment_windows=64")  # the segments must not matter either
    assert driver.wait() == 0, driver.said
    assert job.parts() == undisturbed.parts()
    assert same_counts(job) == same_counts(undisturbed)
    assert driver.scratch_files() == []


def test_killed_in_the_encode_pass(killed_in_encode: Interrupted) -> None:
    assert 1 <= len(killed_in_encode.ledger) < FIRST_SEGMENT
    assert all("encode-" in name for name in killed_in_encode.ledger)
    assert killed_in_encode.parts == {}


def test_killed_in_the_generate_pass(killed_in_encode: Interrupted, killed_in_generate: Interrupted) -> None:
    names = list(killed_in_generate.ledger)
    assert len([name for name in names if "encode-" in name]) == FIRST_SEGMENT
    assert 1 <= len([name for name in names if "generate-" in name]) < FIRST_SEGMENT
    assert_kept(killed_in_encode.ledger, killed_in_generate.ledger)
    assert_kept(killed_in_encode.plans, killed_in_generate.plans)
    # Finished batches too, of windows that were not finished.
    assert_kept(killed_in_encode.work, killed_in_generate.work)


def test_killed_twice_and_resumed_gives_the_same_bytes(
    undisturbed: Job, killed_in_generate: Interrupted, start: Start
) -> None:
    job = killed_in_generate.job
    driver = start(job)
    holder = f'"pid": {driver.process.pid},'  # the one who was killed is still named until then
    driver.until(lambda: holder in job.folder.joinpath("_run/lock").read_text())
    second = start(job)
    assert second.wait() == 4, second.said
    assert re.search(rf"held by another run on host .*, pid {driver.process.pid}, since", second.said)
    assert driver.wait() == 0, driver.said
    assert job.parts() == undisturbed.parts()
    assert same_counts(job) == same_counts(undisturbed)
    assert kept_frames(job) == kept_frames(undisturbed) != set()
    assert_kept(killed_in_generate.ledger, files(job.folder, "_run/ledger/*"))
    assert_kept(killed_in_generate.plans, files(job.folder, "_run/plans/*"))
    finished = {
        name: file
        for name, file in killed_in_generate.parts.items()
        if f"_run/ledger/generate-{re.findall('[0-9]+', name)[0]}.json" in killed_in_generate.ledger
    }
    assert_kept(finished, files(job.folder, "part-*.parquet"))


def test_a_refused_configuration_ends_with_2(make_job: MakeJob, start: Start) -> None:
    job = make_job("refused", workers=1)
    driver = start(job, "generate.max_new_token=3")
    assert driver.wait() == 2
    assert "max_new_tokens" in driver.said
    assert not job.output.exists()


@pytest.mark.slow
def test_a_termination_ends_with_5(terminated: Interrupted) -> None:
    assert 1 <= len(terminated.ledger) < FIRST_SEGMENT


@pytest.mark.slow
def test_what_was_terminated_can_be_resumed(undisturbed: Job, terminated: Interrupted, start: Start) -> None:
    job = terminated.job
    resumed = start(job)
    assert resumed.wait() == 0, resumed.said
    assert_kept(terminated.ledger, files(job.folder, "_run/ledger/*"))
    assert_kept(terminated.plans, files(job.folder, "_run/plans/*"))
    assert job.parts() == undisturbed.parts()
    assert same_counts(job) == same_counts(undisturbed)


@pytest.mark.slow
def test_workers_that_die_are_replaced(undisturbed: Job, make_job: MakeJob, start: Start) -> None:
    job = make_job("bereft", workers=2)
    driver = start(job, "ray.segment_windows=64")

    def batches(stage: str) -> bool:
        return job.output.exists() and any(job.output.glob(f"*/_work/{stage}/*/*.parquet"))

    def kill(title: str) -> int:
        victim = int(driver.until(lambda: driver.processes(title))[0])
        os.kill(victim, signal.SIGKILL)
        return victim

    killed = [kill("ray::MapBatches(DecodeBatches)")]
    for stage, title in (("encode", "EncodeBatches"), ("generate", "GenerateBatches")):
        driver.until(lambda stage=stage: batches(stage))
        killed.append(kill(f"ray::MapWorker(MapBatches({title}))"))
    assert len(set(killed)) == 3
    assert driver.wait() == 0, driver.said
    assert job.parts() == undisturbed.parts()
    assert same_counts(job) == same_counts(undisturbed)


@pytest.mark.slow
def test_what_the_cluster_can_never_run_ends_with_2(make_job: MakeJob, start: Start) -> None:
    job = make_job("unschedulable", workers=1)
    driver = start(job, "encode.device=cuda")
    assert driver.wait() == 2
    assert "no node has a GPU" in driver.said
    assert not Path(job.folder, "summary.json").exists()
