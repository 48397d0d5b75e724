"""A remote store's shards on the machines that read them: within a bound, in time, and never from under a reader."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_records import features, keyed_record

from pipeline.errors import UnavailableShardError
from pipeline.features import shard_cache
from pipeline.features.codec import FeatureRecord
from pipeline.features.local_disk import FileLock
from pipeline.features.shard_cache import CacheLimits
from pipeline.features.store import FeatureStore
from tests.slow_files import register_slow_files

NUMBERS = itertools.count()
NUM_SHARDS = 6
NUM_TOKENS = 200  # 50 KB: records of more than a page are read without a copy


register_slow_files()


class Remote:
    """A store with a record in each of its shards, all of one size; `machine` is it elsewhere."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder
        store = FeatureStore(url, str(folder / "writer"), shard_bytes=1)
        self.shards = [store.writer().put([keyed_record(n, NUM_TOKENS)]) for n in range(NUM_SHARDS)]
        store.reload()
        self.shard_bytes = max(shard.num_bytes for shard in store.sealed_shards())

    def machine(self, name: str, num_fitting: float, seconds: float = 20.0) -> FeatureStore:
        limits = CacheLimits(max_bytes=int(num_fitting * self.shard_bytes), fetch_seconds=seconds)
        return FeatureStore(self.url, str(self.folder / name), cache_limits=limits)

    def read(self, store: FeatureStore, number: int) -> FeatureRecord | None:
        record = store.get(self.shards[number], keyed_record(number, NUM_TOKENS)[0])
        assert record is None or np.array_equal(record.tensors["pooler_output"].numpy(), features(number, NUM_TOKENS))
        return record

    def cached(self, name: str) -> list[int]:
        return sorted(self.shards.index(path.stem) for path in (self.folder / name).rglob("*.lmdb"))


@pytest.fixture(params=["memory"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Remote]:
    made = Remote(f"{request.param}://bounded-{next(NUMBERS)}", tmp_path)
    yield made
    FeatureStore(made.url).folder.remove("")


slow = pytest.mark.parametrize("remote", ["slow"], indirect=True)


def held_bytes(folder: Path) -> int:
    """Of whole shards and of what is being brought, by length."""
    total = 0
    for path in [*folder.rglob("*.lmdb"), *folder.rglob("*.tmp")]:
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


def test_the_least_recently_used_makes_room(remote: Remote) -> None:
    store = remote.machine("b", num_fitting=2.5)
    for number in (0, 1, 0, 2):  # 0 is older than 1 and used after it
        assert remote.read(store, number) is not None
        time.sleep(0.02)
    assert remote.cached("b") == [0, 2]
    assert remote.read(store, 1) is not None and remote.cached("b") == [1, 2]
    assert store.fallbacks == 0


def test_what_is_read_stays_and_what_has_no_room_is_missed_by_name(remote: Remote) -> None:
    store = remote.machine("b", num_fitting=1.5, seconds=0.3)
    reader = store.reader(remote.shards[0])
    started = time.monotonic()
    assert remote.read(store, 1) is None and store.fallbacks == 1
    assert 0.3 <= time.monotonic() - started < 5
    assert remote.cached("b") == [0]
    assert store.condition(remote.shards[1]) == f"no room for its {remote.shard_bytes} bytes"
    started = time.monotonic()
    assert remote.read(store, 1) is None and time.monotonic() - started < 0.3  # it is not waited for again
    reader.close()
    del reader
    store.reload()
    assert remote.read(store, 1) is not None and remote.cached("b") == [1]


def test_a_shard_larger_than_the_cache_is_not_brought(remote: Remote) -> None:
    store = remote.machine("b", num_fitting=0.5)
    with pytest.raises(UnavailableShardError, match="no room"):
        store.reader(remote.shards[0])
    assert remote.cached("b") == []


def test_records_outlive_the_shard_they_came_from(remote: Remote) -> None:
    store = remote.machine("b", num_fitting=1.5)
    locations = [(shard, keyed_record(n, NUM_TOKENS)[0]) for n, shard in enumerate(remote.shards)]
    for number, record in enumerate(store.fetch(locations)):
        assert record is not None
        assert np.array_equal(record.tensors["pooler_output"].numpy(), features(number, NUM_TOKENS))
    assert store.in_use(remote.shards) == [] and len(remote.cached("b")) == 1


@slow
def test_many_readers_keep_to_the_bound_together(remote: Remote) -> None:
    """Eight readers in a cache of three shards, each with a store of its own as another process has: every record."""
    bound, peak, ended = 3.2, 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.is_set():
            peak = max(peak, held_bytes(remote.folder / "b"))
            time.sleep(0.001)

    def reads(seed: int) -> int:
        store = remote.machine("b", num_fitting=bound)
        order = np.random.default_rng(seed).integers(0, NUM_SHARDS, 12)
        found = [remote.read(store, int(number)) for number in order]
        return found.count(None)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(reads, range(8))) == 0
    finally:
        ended.set()
        watching.join()
    print(f"peak {peak / remote.shard_bytes:.2f} shards of {bound}")
    assert 2 * remote.shard_bytes < peak <= bound * remote.shard_bytes


@slow
def test_a_shard_that_is_late_is_missed_by_name(remote: Remote) -> None:
    store = remote.machine("b", num_fitting=5, seconds=0.03)
    assert remote.read(store, 0) is None and store.condition(remote.shards[0]) == "later than 0.03 s"
    assert [path for path in (remote.folder / "b").rglob("*") if path.suffix in (".tmp", ".room", ".lmdb")] == []
    assert remote.read(remote.machine("b", num_fitting=5), 0) is not None


def test_a_shard_that_another_brings_is_waited_for_no_longer(remote: Remote) -> None:
    store = remote.machine("b", num_fitting=5, seconds=0.2)
    assert remote.read(store, 1) is not None
    [folder] = {path.parent for path in (remote.folder / "b").rglob("*.lmdb")}
    with FileLock(str(folder / f"{remote.shards[0]}.lmdb.lock"), blocking=False):  # as who brings it does
        assert remote.read(store, 0) is None
        assert store.condition(remote.shards[0]) == "being brought by another process for too long"
    store.reload()
    assert remote.read(store, 0) is not None


def test_what_was_left_by_a_killed_process_takes_no_room(remote: Remote) -> None:
    store = remote.machine("b", num_fitting=2.5)
    assert remote.read(store, 0) is not None
    [folder] = {path.parent for path in (remote.folder / "b").rglob("*.lmdb")}
    dead = folder / f"{remote.shards[5]}.lmdb"
    Path(f"{dead}.tmp").write_bytes(bytes(remote.shard_bytes))
    Path(f"{dead}.room").write_bytes(bytes(2 * remote.shard_bytes))
    assert remote.read(store, 1) is not None
    assert remote.cached("b") == [0, 1] and not list(folder.glob("*.tmp")) and not list(folder.glob("*.room"))


def test_what_a_machine_seals_keeps_to_the_bound_of_its_cache(remote: Remote) -> None:
    limits = CacheLimits(max_bytes=int(2.5 * remote.shard_bytes))
    store = FeatureStore(remote.url, str(remote.folder / "b"), shard_bytes=1, cache_limits=limits)
    made = [store.writer().put([keyed_record(n, NUM_TOKENS)]) for n in range(10, 14)]
    held = {path.stem for path in (remote.folder / "b").rglob("*.lmdb")}
    assert held == set(made[2:])
    assert all(
        store.get(shard, keyed_record(n, NUM_TOKENS)[0]) is not None
        for n, shard in zip(range(10, 14), made, strict=True)
    )


def test_a_full_disk_makes_room_without_a_bound(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type(shard_cache.shutil.disk_usage("/"))

    def two_fit(folder: str) -> Any:
        return usage(10**6, 0, 10**6 if len(list(Path(folder).glob("*.lmdb"))) < 2 else 0)

    monkeypatch.setattr(shard_cache.shutil, "disk_usage", two_fit)
    store = FeatureStore(remote.url, str(remote.folder / "b"))
    held = remote.read(store, 0)
    for number in (1, 2):
        assert remote.read(store, number) is not None
        store.close()  # but for what is read still
    assert remote.cached("b") == [0, 2] and held is not None
    del held
    assert remote.read(store, 3) is not None and remote.cached("b") == [2, 3]
