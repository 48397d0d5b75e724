"""One shard: batches whole or not at all, one writer, readers beside it, views that outlive everything."""

from __future__ import annotations

import gc
import os
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from sample_records import CHILD_ENVIRONMENT

from pipeline.errors import ConfigError
from pipeline.features import local_disk
from pipeline.features.local_disk import FileLock, network_filesystem
from pipeline.features.shard import (
    SHARD_OVERHEAD_BYTES,
    ShardReader,
    ShardWriter,
    compact_shard,
    disk_bytes,
    has_writer,
    is_read,
    lock_leftover,
)


def blob(number: int, num_bytes: int) -> bytes:
    return np.random.default_rng(number).bytes(num_bytes)


def sealed_copy(tmp_path: Path, records: dict[str, bytes]) -> str:
    writer = ShardWriter(str(tmp_path / "open"), "s")
    writer.put_batch([(key, [data]) for key, data in records.items()])
    writer.close()
    target = str(tmp_path / "s.lmdb")
    compact_shard(writer.path, target)
    return target


RECORDS = {"big": blob(0, 1_000_003), "small": blob(1, 90), "empty": b"", "middling": blob(2, 3000)}


def test_sealed_and_open_shards_give_back_what_was_put(tmp_path: Path) -> None:
    for path in (sealed_copy(tmp_path, RECORDS), str(tmp_path / "open" / "s")):
        reader = ShardReader(path)
        assert reader.keys() == sorted(RECORDS)
        for key, value in RECORDS.items():
            view = reader.get(key)
            assert view is not None and view == value and view.readonly
            address = np.frombuffer(view, np.uint8).ctypes.data if view.nbytes else 0
            assert address % 8 == 0
        assert reader.get("absent") is None
        reader.close()
        with pytest.raises(ValueError, match="closed"):
            reader.get("big")


def test_views_outlive_reader_file_and_other_readers(tmp_path: Path) -> None:
    path = sealed_copy(tmp_path, RECORDS)
    reader = ShardReader(path)
    view = reader.get("big")
    assert view is not None
    tensor = np.frombuffer(view[8:16008], np.uint8)
    reader.close()
    del reader, view
    os.unlink(path)
    gc.collect()
    assert tensor.tobytes() == RECORDS["big"][8:16008]
    assert "s.lmdb" in Path("/proc/self/maps").read_text()
    del tensor
    gc.collect()
    assert "s.lmdb" not in Path("/proc/self/maps").read_text()


def test_a_sealed_view_is_not_a_copy(tmp_path: Path) -> None:
    path = sealed_copy(tmp_path, RECORDS)
    first, second = (ShardReader(path).get("big") for _ in range(2))
    assert first is not None and second is not None
    assert np.frombuffer(first, np.uint8).ctypes.data == np.frombuffer(second, np.uint8).ctypes.data


def test_the_map_grows_and_the_batch_is_not_lost(tmp_path: Path) -> None:
    writer = ShardWriter(str(tmp_path), "s", map_bytes=2**16)
    writer.put_batch([("first", [blob(0, 20_000)])])
    reader = ShardReader(writer.path)
    assert reader.get("first") == blob(0, 20_000)
    writer.put_batch([(f"k{i}", [blob(i, 100_000)]) for i in range(20)])
    assert reader.get("first") == blob(0, 20_000)
    assert all(reader.get(f"k{i}") == blob(i, 100_000) for i in range(20))
    writer.close()


def test_another_process_follows_a_growing_map(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom pipeline.features.shard import ShardReader\nreader = ShardReader(sys.argv[1])\n"
        "for key in sys.stdin:\n    value = reader.get(key.strip())\n    print(value and len(value), flush=True)\n"
    )
    writer = ShardWriter(str(tmp_path), "s", map_bytes=2**16)
    writer.put_batch([("k0", [blob(0, 10_000)])])
    with subprocess.Popen(
        [sys.executable, "-c", script, writer.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=CHILD_ENVIRONMENT,
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        for number in range(8):  # 20 MB in all: a reader starts with room for 10
            writer.put_batch([(f"k{number}", [blob(number, 80_000 << number)])])
            print(f"k{number}", file=child.stdin, flush=True)
            assert child.stdout.readline().strip() == str(80_000 << number)
    writer.close()


def test_a_batch_that_fails_leaves_nothing(tmp_path: Path) -> None:
    writer = ShardWriter(str(tmp_path), "s")
    with pytest.raises(Exception, match="MDB_BAD_VALSIZE"):
        writer.put_batch([("good", [b"1"]), ("k" * 600, [b"2"])])
    assert ShardReader(writer.path).keys() == []
    writer.close()
    with pytest.raises(ValueError, match="closed"):
        writer.put_batch([("good", [b"1"])])


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    writer = ShardWriter(str(tmp_path), "s")
    with pytest.raises(FileExistsError, match="has a writer"):
        ShardWriter(str(tmp_path), "s")
    assert lock_leftover(writer.path) is None
    writer.close()
    lock = lock_leftover(writer.path)
    assert lock is not None
    lock.close()
    with pytest.raises(FileExistsError, match="leftover"):
        ShardWriter(str(tmp_path), "s")


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    path = sealed_copy(tmp_path, RECORDS)
    data = bytearray(Path(path).read_bytes())
    data[data.index(RECORDS["big"][:64]) + 500_000] ^= 4
    Path(path).write_bytes(data)
    reader = ShardReader(path)
    for _ in range(2):
        with pytest.raises(ValueError, match="big is damaged"):
            reader.get("big")
    assert reader.get("middling") == RECORDS["middling"]


@pytest.mark.parametrize("num_bytes", [100, 9_000, 500_000])
def test_a_cut_off_file_is_refused(tmp_path: Path, num_bytes: int) -> None:
    path = sealed_copy(tmp_path, RECORDS)
    os.truncate(path, num_bytes)
    with pytest.raises(ValueError, match="damaged shard"):
        ShardReader(path)


def test_absent_shards(tmp_path: Path) -> None:
    (tmp_path / "no-data").mkdir()
    for path in ("nothing.lmdb", "no-data"):
        with pytest.raises(FileNotFoundError):
            ShardReader(str(tmp_path / path))


def test_use_after_fork_is_refused(tmp_path: Path) -> None:
    writer = ShardWriter(str(tmp_path / "open"), "w")
    writer.put_batch([("k", [b"value"])])
    reader = ShardReader(writer.path)
    refused = []
    pid = os.fork()
    if pid == 0:
        for use in (
            lambda: reader.get("k"),
            lambda: writer.put_batch([("k", [b"2"])]),
            lambda: ShardReader(writer.path),
        ):
            try:
                use()
            except RuntimeError:
                refused.append(use)
        os._exit(len(refused))
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 3
    assert reader.get("k") == b"value"
    writer.close()


def test_a_forked_child_that_lets_go_does_not_unlock_its_parent(tmp_path: Path) -> None:
    lock = FileLock(str(tmp_path / "lock"), blocking=True)
    pid = os.fork()
    if pid == 0:
        lock.close()
        os._exit(0)
    os.waitpid(pid, 0)
    with pytest.raises(BlockingIOError):
        FileLock(str(tmp_path / "lock"), blocking=False)
    lock.close()


def test_waiting_for_the_lock_of_a_shard_that_goes_away(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    holder = FileLock(str(path), blocking=True)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(FileLock, str(path), blocking=True)
        time.sleep(0.1)
        path.unlink()
        path.touch()
        holder.close()
        with pytest.raises(FileNotFoundError, match="replaced"):
            waiting.result()


def test_network_file_systems_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mounts"
    share = tmp_path / "my share"
    mounts.write_text(
        "/dev/vda / ext4 rw 0 0\n"
        f"nas:/x {str(share).replace(' ', chr(92) + '040')} nfs4 rw 0 0\n"
        f"bucket {tmp_path}/fuse fuse.gcsfuse rw 0 0\n"
        f"overlay {tmp_path}/fuse/container fuse.fuse-overlayfs rw 0 0\n"
    )
    monkeypatch.setattr(local_disk, "_MOUNTS", mounts)
    assert network_filesystem(str(share / "a" / "b")) == "nfs4"
    assert network_filesystem(f"{share}2") is None
    assert network_filesystem(str(tmp_path / "fuse" / "x")) == "fuse.gcsfuse"
    assert network_filesystem(str(tmp_path / "fuse" / "container" / "x")) is None
    with pytest.raises(ConfigError, match=r"nfs4.*store\.local_path"):
        ShardWriter(str(share / "open"), "s")


def test_the_checksum_is_crc32_of_the_record(tmp_path: Path) -> None:
    path = sealed_copy(tmp_path, {"k": b"123456789"})
    # 0xCBF43926 is the published check value of CRC-32 for the digits 1 to 9.
    assert b"123456789" + struct.pack("<I", 0xCBF43926) in Path(path).read_bytes()


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("sizes", [(10,), (1500,), (1990, 2010), (2100,), (4000, 4096, 4200), (20_000, 90, 300_000)])
def test_records_take_the_disk_they_are_said_to_take_at_most(
    sizes: tuple[int, ...], batch: int, tmp_path: Path
) -> None:
    writer = ShardWriter(str(tmp_path), "s")
    lengths = [sizes[i % len(sizes)] for i in range(160)]
    records = [(f"{blob(i, 20).hex()}", [blob(i, length)]) for i, length in enumerate(lengths)]
    for start in range(0, len(records), batch):
        writer.put_batch(records[start : start + batch])
    taken = sum(path.stat().st_blocks * 512 for path in (tmp_path / "s").iterdir())
    said = sum(disk_bytes(length) for length in lengths)
    assert taken <= said + SHARD_OVERHEAD_BYTES
    if min(lengths) > 10_000:  # where it matters, not much less either
        assert said < 1.05 * taken
    writer.close()


def test_a_shard_is_in_use_while_it_is_written_and_while_it_is_read(tmp_path: Path) -> None:
    writer = ShardWriter(str(tmp_path / "open"), "s")
    writer.put_batch([(key, [data]) for key, data in RECORDS.items()])
    assert has_writer(writer.path) and not is_read(writer.path)
    writer.close()
    assert not has_writer(writer.path) and not has_writer(str(tmp_path / "open" / "absent"))
    sealed = str(tmp_path / "s.lmdb")
    compact_shard(writer.path, sealed)
    for path in (writer.path, sealed):
        gc.collect()
        assert not is_read(path)
        reader = ShardReader(path)
        view = reader.get("big")
        assert is_read(path)
        reader.close()
        gc.collect()
        assert is_read(path) == (
            path == sealed
        )  # a view into a sealed shard keeps it mapped, of an open one it is a copy
        del view
        gc.collect()
        assert not is_read(path)
    assert not is_read(str(tmp_path / "absent"))


def test_a_reader_in_another_process_is_seen_until_it_dies(tmp_path: Path) -> None:
    path = sealed_copy(tmp_path, RECORDS)
    code = (
        "import sys; from pipeline.features.shard import ShardReader\n"
        "reader = ShardReader(sys.argv[1]); print('reading', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, path]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=CHILD_ENVIRONMENT)
    assert child.stdout is not None and child.stdout.readline() == b"reading\n"
    assert is_read(path)
    child.kill()
    child.communicate()
    assert not is_read(path)
