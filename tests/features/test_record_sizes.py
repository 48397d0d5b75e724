"""Records from 64 KB to 256 MB: they come back as they were, and rewriting them does not make the file grow."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from sample_records import keyed_record

from pipeline.features.codec import TensorView, encode_parts
from pipeline.features.shard import ShardReader, ShardWriter, disk_bytes
from pipeline.features.store import FeatureStore

KB, MB = 2**10, 2**20


def array_of(num_bytes: int, seed: int) -> np.ndarray:
    """(num_bytes / 256, 64) float32."""
    return np.random.default_rng(seed).random(num_bytes // 4, np.float32).reshape(-1, 64)


@pytest.mark.parametrize("num_bytes", [64 * KB, MB, 8 * MB, 32 * MB, 256 * MB])
def test_a_record_comes_back_without_a_copy(tmp_path: Path, num_bytes: int) -> None:
    store = FeatureStore(str(tmp_path / "store"))
    key, record = keyed_record(1)
    array = array_of(num_bytes, 1)
    writer = store.writer()
    shard_id = writer.put([(key, dataclasses.replace(record, tensors={"pooler_output": TensorView.of(array)}))])
    open_record = store.get(shard_id, key)
    writer.seal()
    store.close()
    sealed = [store.get(shard_id, key) for _ in range(2)]
    assert open_record is not None and sealed[0] is not None and sealed[1] is not None
    assert np.array_equal(open_record.tensors["pooler_output"].numpy(), array)
    first, second = (each.tensors["pooler_output"].numpy() for each in sealed if each is not None)
    assert np.array_equal(first, array)
    assert first.ctypes.data == second.ctypes.data and first.ctypes.data % 8 == 0  # both are the file's own bytes


@pytest.mark.parametrize(("num_bytes", "count"), [(64 * KB, 64), (MB, 8), (8 * MB, 2), (32 * MB, 1)])
def test_rewritten_records_do_not_make_the_file_grow(tmp_path: Path, num_bytes: int, count: int) -> None:
    """Records of many pages are put anew in whole runs of pages; those they leave are used again, a commit later.

    The sizes move by a page each time, so that a run that was left never fits exactly.
    """
    writer = ShardWriter(str(tmp_path), "s", map_bytes=16 * MB)
    _, record = keyed_record(1)
    held = []
    for round_number in range(12):
        array = array_of(num_bytes + 4096 * (round_number % 3), round_number)
        parts = encode_parts(dataclasses.replace(record, tensors={"pooler_output": TensorView.of(array)}))
        writer.put_batch([(f"k{number}", parts) for number in range(count)])
        held.append((tmp_path / "s" / "data.mdb").stat().st_size)
        reader = ShardReader(writer.path)
        value = reader.get(f"k{count - 1}")
        assert value is not None and value == b"".join(parts)
    live = count * disk_bytes(num_bytes + 3 * 4096)
    print(f"{num_bytes // KB} KB: {held[0] / live:.2f}, {held[5] / live:.2f}, {held[-1] / live:.2f} times what is live")
    assert held[-1] < 4 * live + MB
    writer.close()
