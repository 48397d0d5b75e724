"""A store's records in formats that others read: safetensors files, a Parquet file, an Arrow file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import ConfigError
from pipeline.features.codec import TensorView, decode_record
from pipeline.features.select import Listed, RecordFilter, listed_records
from pipeline.features.store import FeatureStore

Format = Literal["safetensors", "parquet", "arrow"]
_BATCH_BYTES = 32 * 2**20
# numpy has no bfloat16, nor do most readers of these formats: its numbers are told as float32, which holds them all.
_TENSOR = pa.struct(
    [("name", pa.string()), ("dtype", pa.string()), ("shape", pa.list_(pa.int64())), ("data", pa.large_binary())]
)
SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("tenant", pa.string()),
        ("content", pa.string()),
        ("grid", pa.list_(pa.int32())),
        ("feature_length", pa.int64()),
        ("created", pa.timestamp("us", tz="UTC")),
        ("key_terms", pa.string()),
        ("tensors", pa.list_(_TENSOR)),
    ]
)


def export(store: FeatureStore, chosen: RecordFilter, form: Format, output: str) -> int:
    """Write the records that `chosen` means to `output`; returns how many.

    `safetensors`: a folder with a file a record, `<key>.safetensors`, its own bytes. `parquet` and `arrow`: one
    file with a row a record (`SCHEMA`); a tensor's `data` are its little-endian, row-major bytes in `dtype`, where
    bfloat16 has become float32. Memory is that of some 32 MB of records. Raises `ConfigError` when `output` exists.
    """
    target = Path(output)
    if target.exists():
        raise ConfigError(f"{output} exists; name a new file or folder")
    if form == "safetensors":
        return _write_files(store, chosen, target)
    count = 0
    writer: pq.ParquetWriter | pa.ipc.RecordBatchFileWriter
    with (
        open(target, "wb") as file,
        pq.ParquetWriter(file, SCHEMA) if form == "parquet" else pa.ipc.new_file(file, SCHEMA) as writer,
    ):
        for rows in _batches(store, chosen):
            writer.write_table(pa.Table.from_pylist(rows, SCHEMA))
            count += len(rows)
    return count


def _write_files(store: FeatureStore, chosen: RecordFilter, folder: Path) -> int:
    folder.mkdir(parents=True)
    count = 0
    for listed, data in _records(store, chosen):
        (folder / f"{listed.key}.safetensors").write_bytes(data)
        count += 1
    return count


def _records(store: FeatureStore, chosen: RecordFilter) -> Iterator[tuple[Listed, memoryview]]:
    newest = {record.key: record.shard for record in listed_records(store, chosen)}
    shard_id, reader = "", None
    for listed in listed_records(store, chosen):
        if newest[listed.key] != listed.shard:
            continue
        if reader is None or shard_id != listed.shard:
            shard_id, reader = listed.shard, store.reader(listed.shard)
        data = reader.get(listed.key)
        if data is not None:
            yield listed, data


def _batches(store: FeatureStore, chosen: RecordFilter) -> Iterator[list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    num_bytes = 0
    for listed, data in _records(store, chosen):
        rows.append(_row(listed, data))
        num_bytes += data.nbytes
        if num_bytes >= _BATCH_BYTES:
            yield rows
            rows, num_bytes = [], 0
    if rows:
        yield rows


def _row(listed: Listed, data: memoryview) -> dict[str, Any]:
    record = decode_record(data)
    tensors = {**record.tensors, **{f"input.{name}": view for name, view in record.inputs.items()}}
    return {
        "key": listed.key,
        "tenant": listed.tenant,
        "content": listed.terms.get("content"),
        "grid": list(listed.grid),
        "feature_length": listed.feature_length,
        "created": listed.created,
        "key_terms": json.dumps(dict(record.key_terms), sort_keys=True),
        "tensors": [{"name": name, **_tensor(view)} for name, view in tensors.items()],
    }


def _tensor(view: TensorView) -> dict[str, Any]:
    array = view.numpy()
    dtype = view.dtype
    if dtype == "bfloat16":
        dtype, array = "float32", (array.astype(np.uint32) << 16).view(np.float32)
    return {"dtype": dtype, "shape": list(view.shape), "data": array.tobytes()}
