"""Twenty runs, each with one process killed at a random moment and then resumed: the same bytes as one undisturbed.

Victims take turns: the driver, a decode worker, an encode actor, a generate actor. All are slow; `test_runs.py` kills
the driver twice in every run of the tests.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable

import pytest

from tests.ray.conftest import NUM_ITEMS, Driver, Job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
VICTIMS = {
    "driver": "",
    "decode": "ray::MapBatches(DecodeBatches)",
    "encode": "ray::MapWorker(MapBatches(EncodeBatches))",
    "generate": "ray::MapWorker(MapBatches(GenerateBatches))",
}
# From when it is there; the driver's from when the first batch is put away, for a run takes half its time to start.
LONGEST_WAIT_SECONDS = {"driver": 12.0, "decode": 2.0, "encode": 8.0, "generate": 8.0}


@pytest.fixture(scope="module")
def undisturbed(make_job: Callable[..., Job], start: Callable[..., Driver]) -> Job:
    job = make_job("undisturbed", workers=2)
    driver = start(job)
    assert driver.wait() == 0, driver.said
    return job


def batches_put_away(job: Job) -> int:
    return len(list(job.output.glob("*/_work/*/*/*.parquet")))


@pytest.mark.parametrize("seed", range(20))
def test_killed_at_random_and_resumed(
    seed: int, undisturbed: Job, make_job: Callable[..., Job], start: Callable[..., Driver]
) -> None:
    rng = random.Random(seed)
    victim = list(VICTIMS)[seed % len(VICTIMS)]
    job = make_job(f"killed-{seed}", workers=2)
    driver = start(job)
    wait = rng.uniform(0, LONGEST_WAIT_SECONDS[victim])
    if victim == "driver":
        driver.until(lambda: batches_put_away(job))
        time.sleep(wait)
        code = driver.signal(signal.SIGKILL)
    else:
        pid = driver.until(lambda: driver.processes(VICTIMS[victim]))[0]
        time.sleep(wait)
        if pid in driver.processes():
            os.kill(pid, signal.SIGKILL)
        code = driver.wait()
    done = 0
    if code != 0:
        done = batches_put_away(job)
        resumed = start(job)
        assert resumed.wait() == 0, resumed.said
    parts = job.parts()
    assert parts == undisturbed.parts()
    summary = job.summary()
    assert summary["items_written"] + summary["items_quarantined"] == NUM_ITEMS
    # Receipts of finished batches count once, those of unfinished ones never, however often either was done.
    assert summary["encodes"] == undisturbed.summary()["encodes"]
    print(f"seed {seed}: {victim} killed after {wait:.1f} s: exit {code}, then {done} batches of all were done already")
