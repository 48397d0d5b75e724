"""The seam: put, find, fetch, seal, recover, delete, on a local store and on a remote one."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import numpy as np
import pytest
from sample_records import CHILD_ENVIRONMENT, features, keyed_record, terms

from pipeline.features import local_disk, shard, store
from pipeline.features.codec import FeatureRecord, TensorView, encode_parts
from pipeline.features.store import FeatureStore

NUMBERS = itertools.count()
HERE = Path(__file__).parent


@pytest.fixture(params=["local", "memory"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "local":
        yield str(tmp_path / "store")
        return
    root = f"/store-{next(NUMBERS)}"
    yield f"memory:/{root}"
    if fsspec.filesystem("memory").exists(root):
        fsspec.filesystem("memory").rm(root, recursive=True)


@pytest.fixture
def local(tmp_path: Path) -> str:
    return str(tmp_path / "local")


def check(record: FeatureRecord | None, number: int, num_tokens: int = 8) -> None:
    assert record is not None
    assert np.array_equal(record.tensors["pooler_output"].numpy(), features(number, num_tokens))
    assert record.key_terms == terms(number).as_dict()


def key(number: int) -> str:
    return terms(number).digest()


def test_records_are_read_while_open_and_found_once_sealed(path: str, local: str) -> None:
    writing, reading = FeatureStore(path, local), FeatureStore(path, local)
    writer = writing.writer()
    shard_id = writer.put([keyed_record(0), keyed_record(1)])
    assert writer.put([keyed_record(2)]) == shard_id
    check(reading.get(shard_id, key(2)), 2)
    assert reading.find([key(0)]) == {}
    sealed = writer.seal()
    assert sealed is not None and (sealed.shard_id, sealed.num_records) == (shard_id, 3)
    reading.reload()
    assert reading.find([key(0), key(2), key(9)]) == {key(0): shard_id, key(2): shard_id}
    for number in range(3):
        check(reading.get(shard_id, key(number)), number)
    assert reading.fallbacks == 0
    assert os.listdir(reading._open_root) == [shard.CREATION_LOCK]


def test_shards_rotate_at_their_size(path: str, local: str) -> None:
    feature_store = FeatureStore(path, local, shard_bytes=6000)
    writer = feature_store.writer()
    shard_ids = [writer.put([keyed_record(number)]) for number in range(7)]
    # One record is 2,048 bytes of features and 64 of placeholder ids, plus under 900 of header: three make 6,000.
    assert [shard_ids.count(shard_id) for shard_id in dict.fromkeys(shard_ids)] == [3, 3, 1]
    assert shard_ids == sorted(shard_ids)
    writer.close()
    assert feature_store.find([key(n) for n in range(7)]) == {key(n): shard_ids[n] for n in range(6)}
    assert [sealed.shard_id for sealed in feature_store.recover()] == [shard_ids[6]]
    assert feature_store.recover() == []
    for number, shard_id in enumerate(shard_ids):
        check(feature_store.get(shard_id, key(number)), number)


def test_shards_rotate_by_windows(path: str, local: str) -> None:
    feature_store = FeatureStore(path, local, shard_windows=2)
    writer = feature_store.writer()
    shard_ids = [writer.put([keyed_record(n)], window) for n, window in enumerate((4, 5, 4, 5, 6, 4))]
    assert shard_ids[0] == shard_ids[3] != shard_ids[4] == shard_ids[5]
    assert feature_store.is_sealed(shard_ids[0]) and not feature_store.is_sealed(shard_ids[4])


def test_nothing_put_nothing_sealed(path: str, local: str) -> None:
    feature_store = FeatureStore(path, local)
    assert feature_store.writer().seal() is None
    assert feature_store.recover() == []
    writer = feature_store.new_shard()
    writer.close()
    assert feature_store.recover() == []
    assert not os.path.exists(writer.path)


def test_another_machine_fetches_a_remote_shard_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"memory://elsewhere-{next(NUMBERS)}"
    writer = FeatureStore(path, str(tmp_path / "a")).writer()
    shard_id = writer.put([keyed_record(0), keyed_record(1)])
    writer.seal()
    other = FeatureStore(path, str(tmp_path / "b"))
    check(other.get(shard_id, key(0)), 0)
    other.folder.remove(f"shards/{shard_id}.lmdb")
    check(FeatureStore(path, str(tmp_path / "b")).get(shard_id, key(1)), 1)
    third = FeatureStore(path, str(tmp_path / "c"))
    assert third.get(shard_id, key(1)) is None and third.fallbacks == 1
    other.folder.remove("")


def test_a_remote_shard_that_changed_on_its_way_is_a_miss(tmp_path: Path) -> None:
    path = f"memory://damaged-{next(NUMBERS)}"
    writer = FeatureStore(path, str(tmp_path / "a")).writer()
    shard_id = writer.put([keyed_record(0)])
    writer.seal()
    other = FeatureStore(path, str(tmp_path / "b"))
    data = bytearray(other.folder.read_bytes(f"shards/{shard_id}.lmdb"))
    data[-1] ^= 1
    other.folder.write_bytes(f"shards/{shard_id}.lmdb", bytes(data))
    assert other.get(shard_id, key(0)) is None and other.fallbacks == 1
    assert not list((tmp_path / "b").rglob("*.lmdb")) and not list((tmp_path / "b").rglob("*.tmp"))
    other.folder.remove("")


def test_fetch_keeps_the_order_and_compares_terms(path: str, local: str) -> None:
    feature_store = FeatureStore(path, local, shard_bytes=4000)
    writer = feature_store.writer()
    where = [writer.put([keyed_record(number)]) for number in range(5)]
    order = [4, 0, 3, 1]
    locations = [(where[n], key(n)) for n in order]
    for number, record in zip(order, feature_store.fetch(locations), strict=True):
        check(record, number)
    expected = [terms(n).as_dict() for n in order]
    expected[2] = dataclasses.replace(terms(3), tenant="globex").as_dict()  # the digest collides, the terms do not
    records = feature_store.fetch(locations, expected)
    assert [record is None for record in records] == [False, False, True, False]
    assert feature_store.fallbacks == 1
    writer.close()


def test_a_claim_that_does_not_hold_is_a_miss(path: str, local: str) -> None:
    feature_store = FeatureStore(path, local)
    writer = feature_store.writer()
    shard_id = writer.put([keyed_record(0)])
    records = feature_store.fetch([(shard_id, key(5)), ("no-such-shard", key(0)), (shard_id, key(0))])
    assert records[:2] == [None, None] and feature_store.fallbacks == 2
    check(records[2], 0)
    writer.close()


def test_a_damaged_record_is_a_miss_and_its_neighbour_is_not(tmp_path: Path) -> None:
    feature_store = FeatureStore(str(tmp_path))
    writer = feature_store.writer()
    shard_id = writer.put([keyed_record(0, 100), keyed_record(1, 100)])
    writer.seal()
    file = tmp_path / "shards" / f"{shard_id}.lmdb"
    data = bytearray(file.read_bytes())
    data[data.index(features(0, 100).tobytes()) + 999] ^= 1
    file.write_bytes(data)
    assert feature_store.get(shard_id, key(0)) is None and feature_store.fallbacks == 1
    check(feature_store.get(shard_id, key(1)), 1, 100)


def test_a_record_damaged_before_sealing_is_not_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    feature_store = FeatureStore(str(tmp_path))
    writer = feature_store.new_shard()
    good, record = keyed_record(1)
    writer.put_batch([("bad", [b"not a record"]), (good, encode_parts(record))])
    writer.close()
    (sealed,) = feature_store.recover()
    assert sealed.num_records == 1 and feature_store.find(["bad", good]) == {good: sealed.shard_id}
    assert "record bad is not listed" in caplog.text


def test_a_damaged_leftover_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    feature_store = FeatureStore(str(tmp_path))
    damaged, sound = feature_store.writer(), feature_store.writer()
    bad_id, good_id = damaged.put([keyed_record(0)]), sound.put([keyed_record(1)])
    damaged.close()
    sound.close()
    (tmp_path / "open" / bad_id / "data.mdb").write_bytes(b"x" * 20_000)
    assert [sealed.shard_id for sealed in feature_store.recover()] == [good_id]
    assert feature_store.recover() == []
    assert list((tmp_path / "open").glob(f".damaged-{bad_id}-*")) and "set aside" in caplog.text


def test_records_survive_rotation_of_readers_and_deletion(
    path: str, local: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_MAX_READERS", 2)
    feature_store = FeatureStore(path, local, shard_bytes=1)
    writer = feature_store.writer()
    where = [writer.put([keyed_record(n, 100)]) for n in range(6)]
    held = [feature_store.get(where[n], key(n)) for n in range(6)]
    assert len(feature_store._readers) == 2
    feature_store.delete_shards(where)
    feature_store.close()
    for number, record in enumerate(held):
        check(record, number, 100)
    assert feature_store.fetch([(where[n], key(n)) for n in range(6)]) == [None] * 6


def test_deleted_shards_are_gone_for_everyone(path: str, local: str) -> None:
    feature_store = FeatureStore(path, local, shard_bytes=1)
    writer = feature_store.writer()
    where = [writer.put([keyed_record(n)]) for n in range(3)]
    feature_store.find([])
    feature_store.delete_shards([where[0], where[0], "never-was"])
    for other in (feature_store, FeatureStore(path, local)):
        assert other.find([key(n) for n in range(3)]) == {key(1): where[1], key(2): where[2]}
        assert other.get(where[0], key(0)) is None
        check(other.get(where[1], key(1)), 1)
    leftover = FeatureStore(path, local).writer()
    shard_id = leftover.put([keyed_record(7)])
    feature_store.delete_shards([shard_id])
    check(feature_store.get(shard_id, key(7)), 7)  # its writer lives
    leftover.close()
    feature_store.delete_shards([shard_id])
    assert feature_store.get(shard_id, key(7)) is None


def test_sealed_between_the_look_and_the_opening(path: str, local: str, monkeypatch: pytest.MonkeyPatch) -> None:
    feature_store = FeatureStore(path, local)
    writer = feature_store.writer()
    shard_id = writer.put([keyed_record(0)])
    looked = []

    class SealsFirst(store.ShardReader):
        def __init__(self, where: str) -> None:
            if not looked:
                writer.seal()
            looked.append(where)
            super().__init__(where)

    monkeypatch.setattr(store, "ShardReader", SealsFirst)
    check(feature_store.get(shard_id, key(0)), 0)
    assert len(looked) == 2 and os.path.isdir(os.path.dirname(looked[0])) and looked[1].endswith(".lmdb")


def test_pickled_stores_find_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    feature_store = FeatureStore("relative/store", shard_bytes=1)
    shard_id = feature_store.writer().put([keyed_record(0)])
    data = pickle.dumps(feature_store)
    assert len(data) < 500
    monkeypatch.chdir("/")
    check(pickle.loads(data).get(shard_id, key(0)), 0)
    assert pickle.loads(data).shard_bytes == 1


def test_two_remote_stores_share_a_local_path(tmp_path: Path) -> None:
    first, second = (FeatureStore(f"memory://{name}-{next(NUMBERS)}", str(tmp_path)) for name in "ab")
    writer = first.writer()
    writer.put([keyed_record(0)])
    writer.close()
    assert second.recover() == []
    assert len(first.recover()) == 1
    first.folder.remove("")


def test_several_recover_at_once(path: str, local: str) -> None:
    writers = [FeatureStore(path, local).writer() for _ in range(6)]
    where = [writer.put([keyed_record(n)]) for n, writer in enumerate(writers)]
    for writer in writers[1:]:
        writer.close()
    with ThreadPoolExecutor(4) as pool:
        recovered = list(pool.map(lambda _: FeatureStore(path, local).recover(), range(4)))
    assert sorted(sealed.shard_id for each in recovered for sealed in each) == sorted(where[1:])
    for number, shard_id in enumerate(where):
        check(FeatureStore(path, local).get(shard_id, key(number)), number)
    writers[0].close()


def test_a_store_on_a_network_file_system_is_remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/vda / ext4 rw 0 0\nnas:/x {tmp_path}/nas nfs rw 0 0\n")
    monkeypatch.setattr(local_disk, "_MOUNTS", mounts)
    feature_store = FeatureStore(str(tmp_path / "nas" / "store"), str(tmp_path / "local"), shard_bytes=1)
    shard_id = feature_store.writer().put([keyed_record(0)])
    check(FeatureStore(str(tmp_path / "nas" / "store"), str(tmp_path / "other")).get(shard_id, key(0)), 0)
    assert (tmp_path / "nas" / "store" / "shards" / f"{shard_id}.lmdb").exists()
    assert not (tmp_path / "nas" / "store" / "open").exists()


def test_many_threads_read_while_one_writes(path: str, local: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_MAX_READERS", 2)
    monkeypatch.setattr(shard, "MAP_BYTES", 2**16)
    feature_store = FeatureStore(path, local, shard_bytes=40_000)
    locations: list[tuple[str, str]] = []
    problems: list[str] = []
    done = threading.Event()

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        while not done.is_set():
            count = len(locations)
            for i in rng.integers(0, count, 5) if count else []:
                record = feature_store.get(*locations[i])
                if record is None or not np.array_equal(record.tensors["pooler_output"].numpy(), features(int(i))):
                    problems.append(f"record {i}")

    readers = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for reader in readers:
        reader.start()
    writer = feature_store.writer()
    for number in range(80):
        locations.append((writer.put([keyed_record(number)]), key(number)))
    done.set()
    for reader in readers:
        reader.join()
    writer.close()
    assert problems == []


def test_reading_while_another_process_writes_and_seals(tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "store_child.py"), "write", str(tmp_path), str(tmp_path)]
    feature_store = FeatureStore(str(tmp_path))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=CHILD_ENVIRONMENT) as child:
        assert child.stdout is not None
        seen: list[tuple[str, int]] = []
        for _, line in zip(range(60), child.stdout, strict=False):
            shard_id, *numbers = line.split()
            seen += [(shard_id, int(number)) for number in numbers]
            for where, number in seen[-2:] + seen[:: max(1, len(seen) // 5)]:
                check(feature_store.get(where, key(number)), number)
        child.kill()
    assert feature_store.fallbacks == 0 and len({shard_id for shard_id, _ in seen}) > 3


def test_bfloat16_survives_the_store(path: str, local: str) -> None:
    words = np.random.default_rng(0).integers(0, 2**16, (5, 7), np.uint16)
    _, plain = keyed_record(0)
    record = dataclasses.replace(plain, tensors={"deepstack_features.0": TensorView.of(words, "bfloat16")})
    feature_store = FeatureStore(path, local)
    writer = feature_store.writer()
    shard_id = writer.put([("k", record)])
    writer.seal()
    back = feature_store.get(shard_id, "k")
    assert back is not None and back.tensors["deepstack_features.0"].dtype == "bfloat16"
    assert np.array_equal(back.tensors["deepstack_features.0"].numpy(), words)


def test_a_writer_that_does_not_seal_leaves_one_copy_and_says_its_shards_first(path: str, local: str) -> None:
    feature_store = FeatureStore(path, local, shard_bytes=6000)
    announced: list[str] = []

    def announce(shard_id: str) -> None:
        assert not feature_store.holds(shard_id)
        announced.append(shard_id)

    writer = feature_store.writer(seals=False, announce=announce)
    where = [writer.put([keyed_record(number)]) for number in range(7)]
    # Three records a shard, as where shards are sealed.
    assert [where.count(shard_id) for shard_id in announced] == [3, 3, 1]
    assert feature_store.in_use(announced) == [announced[2]]
    assert not any(feature_store.is_sealed(shard_id) for shard_id in announced)
    for number, shard_id in enumerate(where):
        check(feature_store.get(shard_id, key(number)), number)
    assert feature_store.in_use(announced) == announced
    feature_store.close()
    writer.close()
    assert feature_store.in_use([*announced, "never-was"]) == []
    assert [sealed.shard_id for sealed in feature_store.recover(spared=announced[1:])] == [announced[0]]
    assert [feature_store.is_sealed(shard_id) for shard_id in announced] == [True, False, False]
    feature_store.delete_shards(announced)
    assert not any(feature_store.holds(shard_id) for shard_id in announced)


def test_a_sealed_shard_is_in_use_while_its_tensors_are(path: str, local: str) -> None:
    feature_store = FeatureStore(path, local, shard_bytes=1)
    shard_id = feature_store.writer().put([keyed_record(0, 100)])
    record = feature_store.get(shard_id, key(0))
    feature_store.close()
    assert feature_store.in_use([shard_id]) == [shard_id]
    check(record, 0, 100)
    del record
    assert feature_store.in_use([shard_id]) == []


def test_what_the_store_and_its_shards_take(path: str, local: str) -> None:
    feature_store = FeatureStore(path, local)
    assert feature_store.num_bytes() == feature_store.shard_num_bytes("never-was") == 0
    writer = feature_store.writer()
    shard_id = writer.put([keyed_record(number, 100) for number in range(4)])
    feature_bytes = 4 * 100 * 64 * 4
    if feature_store.is_local:
        assert feature_bytes < feature_store.shard_num_bytes(shard_id) <= feature_store.num_bytes()
    writer.seal()
    assert feature_bytes < feature_store.shard_num_bytes(shard_id) < feature_store.num_bytes() < 2 * feature_bytes
    feature_store.delete_shards([shard_id])
    assert feature_store.shard_num_bytes(shard_id) == 0 and feature_store.num_bytes() < 30_000


def test_a_key_that_another_record_has_is_left_to_it(tmp_path: Path) -> None:
    store = FeatureStore(str(tmp_path / "store"))
    writer = store.writer()
    (first, one), (_, two), (_, three) = (keyed_record(n) for n in range(3))
    shard_id, keys = writer.put_named([(first, one), (first, two), (first, one)])
    assert keys == [first, f"{first}-1", first]
    assert writer.put_named([(first, three), (first, two)])[1] == [f"{first}-2", f"{first}-1"]
    writer.seal()
    found = store.fetch([(shard_id, key) for key in (first, f"{first}-1", f"{first}-2")])
    assert [record.key_terms for record in found] == [one.key_terms, two.key_terms, three.key_terms]
    assert store.fetch([(shard_id, first)], [two.key_terms]) == [None]
