"""`verify`, `repair` and `compact`: each kind of damage is named, mended, and costs no record that was sound."""

from __future__ import annotations

import os
import random
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import lmdb
import numpy as np
import pytest
from sample_records import features, keyed_record, terms
from test_crashes import killed_after, start
from typer.testing import CliRunner

from jobs.cli import app
from pipeline.errors import ConfigError
from pipeline.features.codec import encode_record
from pipeline.features.rewrite import rewrite_shards
from pipeline.features.shard import ShardWriter
from pipeline.features.store import FeatureStore
from pipeline.features.verify import compact, repair, verify


def filled(path: Path, shards: int = 3, records: int = 4) -> FeatureStore:
    store = FeatureStore(str(path), shard_bytes=1_000_000)
    for shard in range(shards):
        writer = store.writer()
        writer.put([keyed_record(shard * records + n) for n in range(records)])
        writer.seal()
    return store


def found(store: FeatureStore) -> list[tuple[str, str | None]]:
    return [(finding.code, finding.key) for finding in verify(store)]


def answers(path: Path, numbers: range | list[int]) -> list[int]:
    """Those of the numbers whose record another process would be given; each must be what it was."""
    store = FeatureStore(str(path))
    keys = {n: terms(n).digest() for n in numbers}
    shards = store.find(list(keys.values()))
    given = []
    for number, key in keys.items():
        record = store.fetch([(shards[key], key)], [terms(number).as_dict()])[0] if key in shards else None
        if record is not None:
            assert np.array_equal(record.tensors["pooler_output"].numpy(), features(number))
            given.append(number)
    return given


def write_raw(path: str, items: dict[str, bytes]) -> None:
    """Into a sealed shard, past all that guards it; a record of None bytes is taken out."""
    with lmdb.open(path, subdir=False, lock=False, map_size=2**24) as environment, environment.begin(write=True) as txn:
        for key, value in items.items():
            if value:
                txn.put(key.encode(), value)
            else:
                txn.delete(key.encode())


def with_checksum(data: bytes) -> bytes:
    return data + zlib.crc32(data).to_bytes(4, "little")


def cut_file(store: FeatureStore, path: str) -> None:
    os.truncate(path, 4096)


def flip_record(store: FeatureStore, path: str) -> None:
    key = terms(1).digest()
    data = bytearray(with_checksum(encode_record(keyed_record(1)[1])))
    data[-100] ^= 1
    write_raw(path, {key: bytes(data)})


def put_under_anothers_key(store: FeatureStore, path: str) -> None:
    write_raw(path, {terms(1).digest(): with_checksum(encode_record(keyed_record(99)[1]))})


def put_what_is_no_record(store: FeatureStore, path: str) -> None:
    write_raw(path, {terms(1).digest(): with_checksum(b"no record")})


def take_record(store: FeatureStore, path: str) -> None:
    write_raw(path, {terms(1).digest(): b""})


def add_record(store: FeatureStore, path: str) -> None:
    write_raw(path, {terms(77).digest(): with_checksum(encode_record(keyed_record(77)[1]))})


def remove_file(store: FeatureStore, path: str) -> None:
    os.unlink(path)


def unlist(store: FeatureStore, path: str) -> None:
    store.folder.remove(f"catalogue/{Path(path).stem}.parquet")


def half_upload(store: FeatureStore, path: str) -> None:
    Path(path).with_name("20990101T000000.000000-aa.lmdb").write_bytes(Path(path).read_bytes()[:5000])


def leave_files(store: FeatureStore, path: str) -> None:
    Path(f"{path}.0123.tmp").write_bytes(b"x")
    (Path(store.open_root) / ".removed-x").mkdir(parents=True)
    (Path(store.open_root) / ".damaged-y").mkdir(parents=True)


def leave_open(store: FeatureStore, path: str) -> None:
    writer = store.writer()
    writer.put([keyed_record(50)])
    writer.close()


@pytest.mark.parametrize(
    ("damage", "codes", "lost"),
    [
        (cut_file, {"damaged_file": 1}, {0, 1, 2, 3}),
        (flip_record, {"damaged_file": 1, "damaged_record": 1}, {1}),
        (put_under_anothers_key, {"damaged_file": 1, "damaged_record": 1}, {1}),
        (put_what_is_no_record, {"damaged_file": 1, "damaged_record": 1}, {1}),
        (take_record, {"damaged_file": 1, "missing_record": 1}, {1}),
        (add_record, {"damaged_file": 1, "unlisted_record": 1}, set()),
        (remove_file, {"missing_file": 1}, {0, 1, 2, 3}),
        (unlist, {"unlisted_file": 1}, set()),
        (half_upload, {"unlisted_file": 1}, set()),
        (leave_files, {"leftover": 3}, set()),
        (leave_open, {"left_open": 1}, set()),
    ],
)
def test_damage_is_named_and_mended(
    tmp_path: Path, damage: Callable[[FeatureStore, str], None], codes: dict[str, int], lost: set[int]
) -> None:
    store = filled(tmp_path)
    assert found(store) == [] and repair(store) == []
    path = str(tmp_path / "shards" / f"{store.sealed_shards()[0].shard_id}.lmdb")
    damage(store, path)

    store = FeatureStore(str(tmp_path), shard_bytes=1_000_000)
    assert Counter(code for code, _ in found(store)) == codes
    told = CliRunner().invoke(app, ["store", "verify", str(tmp_path)])
    assert told.exit_code == 1 and all(code in told.stdout for code in codes)
    told = CliRunner().invoke(app, ["store", "repair", str(tmp_path)])
    assert told.exit_code == 0 and told.stdout
    told = CliRunner().invoke(app, ["store", "verify", str(tmp_path)])
    assert told.exit_code == 0 and "all is as it has to be" in told.stdout
    assert answers(tmp_path, range(12)) == [n for n in range(12) if n not in lost]
    assert repair(FeatureStore(str(tmp_path))) == []
    if damage is leave_open:
        assert answers(tmp_path, [50]) == [50]


def test_small_shards_are_put_together_and_doubles_left_out(tmp_path: Path) -> None:
    store = filled(tmp_path, shards=5)
    writer = store.writer()
    writer.put([keyed_record(n) for n in (0, 5, 100)])
    writer.seal()
    before = store.folder.num_bytes("shards")
    [made] = compact(store)
    assert made.num_records == 21 and [shard.shard_id for shard in store.sealed_shards()] == [made.shard_id]
    assert store.folder.num_bytes("shards") < 0.7 * before
    assert answers(tmp_path, [*range(20), 100]) == [*range(20), 100]
    assert found(store) == [] and list(compact(store)) == []

    # Shards hold what they may: of what is too much for one, several are made.
    small = FeatureStore(str(tmp_path), shard_bytes=20_000)
    many = rewrite_shards(small, [made.shard_id]).made
    assert sum(shard.num_records for shard in many) == 21 and len(many) >= 3
    assert max(shard.num_bytes for shard in many) < 20_000 + 4 * 4096 + 64 * 1024
    assert answers(tmp_path, [*range(20), 100]) == [*range(20), 100]


def test_what_a_living_process_has_open_is_left_alone(tmp_path: Path) -> None:
    store = filled(tmp_path)
    writer = store.writer()
    writer.put([keyed_record(50)])
    key = terms(0).digest()
    reading = FeatureStore(str(tmp_path))
    record = reading.get(reading.find([key])[key], key)
    assert record is not None
    assert found(store) == []
    with pytest.raises(ConfigError, match="in use on this machine"):
        rewrite_shards(store, [shard.shard_id for shard in store.sealed_shards()], {key})
    [made] = compact(store)
    assert made.num_records == 8 and len(store.sealed_shards()) == 2
    assert np.array_equal(record.tensors["pooler_output"].numpy(), features(0))
    del record
    reading.close()
    assert rewrite_shards(store, [reading.find([key])[key]], {key}).dropped == (key,)
    writer.put([keyed_record(51)])
    writer.seal()
    assert answers(tmp_path, [*range(12), 50, 51]) == [*range(1, 12), 50, 51]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("owner", "step"), [(ShardWriter, "put_batch"), (FeatureStore, "seal"), (FeatureStore, "delete_shards")]
)
def test_a_rewriting_that_is_cut_off_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, step: str, after: bool
) -> None:
    store = filled(tmp_path)
    drop = {terms(3).digest()}
    real = getattr(owner, step)

    def cut(*arguments: object) -> None:
        if after:
            real(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, step, cut)
        with pytest.raises(KeyboardInterrupt):
            rewrite_shards(store, [shard.shard_id for shard in store.sealed_shards()], drop)
    del store
    again = FeatureStore(str(tmp_path))
    repair(again)
    assert set(answers(tmp_path, range(12))) >= set(range(12)) - {3} and found(again) == []
    rewrite_shards(again, [shard.shard_id for shard in again.sealed_shards()], drop)
    assert answers(tmp_path, range(12)) == [n for n in range(12) if n != 3] and len(again.sealed_shards()) == 1


def kill_at_random(path: Path, seed: int, rounds: int) -> Counter[str]:
    """Processes killed while they write, seal, recover, compact, repair and drop; all that must hold is looked at."""
    rng = random.Random(seed)
    acknowledged: set[int] = set()
    killed: Counter[str] = Counter()
    for attempt in range(rounds):
        mode = rng.choice(["write", "seal", "recover", "compact", "repair", "drop"])
        child = start(mode, str(path), str(path), attempt * 100)
        word, longest = (" ", 0.12) if mode == "write" else ("sealing", 0.02)
        acknowledged |= killed_after(child, word, rng.uniform(0, longest)).keys()
        killed[mode if child.returncode < 0 else f"{mode}, ended before"] += 1
        if attempt % 5 == 4:
            store = FeatureStore(str(path), shard_bytes=40_000)
            repair(store)
            assert found(store) == []
            given = set(answers(path, sorted(acknowledged)))
            assert not {n for n in acknowledged - given if n % 7}, "lost"
            assert not list(path.rglob("*.tmp"))
    print(f"{rounds} processes, {len(acknowledged)} records acknowledged: {dict(killed)}")
    assert len(acknowledged) > rounds
    return killed


def test_killed_at_random(tmp_path: Path) -> None:
    killed = kill_at_random(tmp_path / "store", 3, 30)
    assert sum(count for mode, count in killed.items() if "ended" not in mode) > 15


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_200_points(tmp_path: Path) -> None:
    killed = kill_at_random(tmp_path / "store", 4, 250)
    assert sum(count for mode, count in killed.items() if "ended" not in mode) >= 200
