"""Disks that are full, break or write by halves, at each system call of a store: nothing acknowledged is lost."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from sample_records import CHILD_ENVIRONMENT
from test_upkeep import answers, found

from pipeline.features.store import FeatureStore
from pipeline.features.verify import repair

HERE = Path(__file__).parent
WRITES = ("write", "pwrite", "pwritev", "writev")
CALLS = (*WRITES, "fsync", "fdatasync", "ftruncate", "rename", "unlink", "mkdir")
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="the library that injects faults is built by cc")


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("shim") / "faults.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-w", "-o", str(target), str(HERE / "faults.c"), "-ldl"]
    subprocess.run(command, check=True)
    return target


def live_through(shim: Path, path: Path, call: str, kind: str, at: int) -> tuple[bool, bool, int]:
    """(whether the fault came, whether a step failed by it, how many records were acknowledged) of a life with it."""
    faults = {"LD_PRELOAD": str(shim), "FAULT_PATH": str(path), "FAULT_CALL": call, "FAULT_KIND": kind}
    child = subprocess.run(
        [sys.executable, str(HERE / "store_child.py"), "life", str(path), str(path)],
        env={**CHILD_ENVIRONMENT, **faults, "FAULT_AT": str(at)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert child.returncode == 0, (call, kind, at, child.stderr)
    acknowledged = sorted(int(word) for line in child.stdout.splitlines() for word in line.split()[1:])
    given = answers(path, acknowledged) if path.exists() else []
    store = FeatureStore(str(path), shard_bytes=40_000)
    done = repair(store)
    assert found(store) == [], (call, kind, at, done)
    assert answers(path, acknowledged) == acknowledged, (call, kind, at, done, child.stderr)
    assert set(given) <= set(acknowledged)
    assert repair(FeatureStore(str(path))) == []
    return "FAULT" in child.stderr, "failed:" in child.stderr, len(acknowledged)


def live_through_all(shim: Path, folder: Path, step: int) -> Counter[str]:
    told: Counter[str] = Counter()
    for call in CALLS:
        for kind in ("enospc", "eio", "short") if call in WRITES else ("enospc", "eio"):
            for at in itertools.count(0, step):
                path = folder / f"{call}-{kind}-{at}"
                came, failed, acknowledged = live_through(shim, path, call, kind, at)
                shutil.rmtree(path, ignore_errors=True)
                if not came:
                    break
                told[f"{call} {kind}"] += 1
                told["steps that failed"] += failed
                told["acknowledged"] += acknowledged
    print(f"faults at {sum(n for name, n in told.items() if ' ' in name and 'steps' not in name)} calls: {dict(told)}")
    return told


def test_faults_at_some_calls(tmp_path: Path, shim: Path) -> None:
    told = live_through_all(shim, tmp_path, step=3)
    assert told["write enospc"] and told["fdatasync eio"] and told["rename eio"] and told["steps that failed"] > 5


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_faults_at_every_call(tmp_path: Path, shim: Path) -> None:
    told = live_through_all(shim, tmp_path, step=1)
    assert told["steps that failed"] > 50
