"""Records of 64 KB to 256 MB: whole, without a copy, in a map that grows while it is read and has no holes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from sample_records import keyed_record

from pipeline.features.shard import SHARD_OVERHEAD_BYTES, ShardReader, ShardWriter, disk_bytes
from pipeline.features.store import FeatureStore

TOKENS = {"64 KB": 256, "1 MB": 4096, "8 MB": 32_768, "256 MB": 1_048_576}  # of 64 float32 numbers


@pytest.mark.parametrize("size", TOKENS)
def test_records_of_any_size_come_back_whole_and_without_a_copy(tmp_path: Path, size: str) -> None:
    store, tokens = FeatureStore(str(tmp_path / "store")), TOKENS[size]
    writer = store.writer()
    key, record = keyed_record(1, tokens)
    shard_id = writer.put([(key, record)])
    for sealed in (False, True):
        if sealed:
            writer.seal()
        found = store.get(shard_id, key)
        assert found is not None
        values = found.tensors["pooler_output"].numpy()
        assert values.nbytes == 256 * tokens and np.array_equal(values, record.tensors["pooler_output"].numpy())
        del found, values
        store.close()
    [tensor] = store.get(shard_id, key).tensors.values()
    assert not tensor.numpy().flags.owndata and not tensor.numpy().flags.writeable
    aligned = np.frombuffer(tensor.data, np.uint8)
    assert aligned.__array_interface__["data"][0] % 8 == 0
    assert torch.frombuffer(bytearray(tensor.data[:256]), dtype=torch.float32).tolist() == tensor.numpy()[0].tolist()
    [shard] = store.sealed_shards()
    assert shard.num_bytes <= disk_bytes(256 * tokens + 4096) + SHARD_OVERHEAD_BYTES


def test_a_map_grows_while_it_is_read_and_what_is_replaced_leaves_no_holes(tmp_path: Path) -> None:
    """A hundred times 8 MB under three keys, in a map that begins with one."""
    writer = ShardWriter(str(tmp_path), "shard", map_bytes=2**20)
    reader, rng = ShardReader(writer.path), np.random.default_rng(1)
    for number in range(100):
        data = rng.bytes(8 * 2**20 - rng.integers(2**20))
        writer.put_batch([(f"key {number % 3}", data)])
        assert reader.get(f"key {number % 3}") == data
    taken = os.path.getsize(tmp_path / "shard" / "data.mdb")
    assert taken < 10 * 8 * 2**20, taken  # three in use, what the last commits freed, and the pages in between
    writer.close()
