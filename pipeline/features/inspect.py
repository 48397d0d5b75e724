"""What a person looks at: a store in numbers, a record in detail."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline.errors import ConfigError
from pipeline.features.catalogue import CATALOGUE, SOURCES
from pipeline.features.codec import FeatureRecord, TensorView, decode_record
from pipeline.features.select import RecordFilter, listed_records
from pipeline.features.shard import has_writer
from pipeline.features.store import FeatureStore
from pipeline.features.tenants import TENANTS

_BY = ("tenant", "weights", "processor", "precision", "decode_backend", "resize_backend")


def check_is_store(store: FeatureStore) -> None:
    """Raise `ConfigError` for a folder that no store was ever in."""
    names = (CATALOGUE, SOURCES, TENANTS)
    if not any(store.folder.exists(name) for name in names) and not _open_shards(store):
        raise ConfigError(
            f"{store.folder.url}: not a feature store, for it has none of {', '.join(f'{name}/' for name in names)}"
        )


def _open_shards(store: FeatureStore) -> dict[str, str]:
    """Shard → its folder, of those that are open on this machine."""
    found = {}
    for root in (part.open_root for part in store.parts()):
        for name in os.listdir(root) if os.path.isdir(root) else ():
            path = os.path.join(root, name)
            if not name.startswith(".") and os.path.isdir(path):
                found[name] = path
    return dict(sorted(found.items()))


def describe_store(store: FeatureStore) -> dict[str, Any]:
    """Tiers, and what is open on this machine. Of a tier: `shards`, `records`, `bytes` (of records), `file_bytes`,
    `made_seconds` (of workers, that making its records took), `least`, `median` and `most` bytes a record, and records
    by tenant and by term."""
    tiers = {}
    for name, tier in (("features", store), ("frames", store.frames)):
        sizes: list[int] = []
        made_seconds = 0.0
        by: dict[str, Counter[str]] = {each: Counter() for each in _BY}
        for record in listed_records(tier, RecordFilter()):
            sizes.append(record.num_bytes)
            made_seconds += record.made_seconds
            for term in _BY:
                value = record.tenant if term == "tenant" else record.terms.get(term)
                if value is not None:
                    by[term][value] += 1
        if sizes or name == "features":
            shards = tier.sealed_shards()
            tiers[name] = {
                "shards": len(shards),
                "records": len(sizes),
                "bytes": sum(sizes),
                "file_bytes": sum(shard.num_bytes for shard in shards),
                "made_seconds": made_seconds,
                **{each: int(np.quantile(sizes, q)) if sizes else 0 for each, q in _QUANTILES.items()},
                "by": {term: dict(counts.most_common()) for term, counts in by.items() if counts},
            }
    opened = {name: has_writer(path) for name, path in _open_shards(store).items()}
    return {"store": store.folder.url, "tiers": tiers, "open_shards": opened}


_QUANTILES = {"least": 0.0, "median": 0.5, "most": 1.0}


def find_record(store: FeatureStore, prefix: str) -> tuple[str, FeatureRecord, bytes]:
    """(shard, record, its safetensors bytes) of the one key that begins with `prefix`, in features or frames.

    Raises `ConfigError` when no key or more than one does, or when the record cannot be read.
    """
    found = [
        (tier, record)
        for tier in (store, store.frames)
        for record in listed_records(tier, RecordFilter(key=f"{prefix}*"))
    ]
    keys = sorted({record.key for _, record in found})
    if len(keys) != 1:
        said = f"{len(keys)} keys begin with it: {', '.join(keys[:5])}" if keys else "no key begins with it"
        raise ConfigError(f"{prefix}: {said}")
    tier, listed = found[-1]
    try:
        data = tier.reader(listed.shard).get(listed.key)
        if data is None:
            raise ValueError("it is listed, and not there")
        return listed.shard, decode_record(data), bytes(data)
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(f"{listed.key}: cannot be read: {error}; headrace store verify looks further") from error


def describe_record(record: FeatureRecord) -> dict[str, Any]:
    """Terms, geometry and placeholder as they are, of each tensor dtype, shape, and least, mean and greatest value."""
    geometry = {name: getattr(record.geometry, name) for name in record.geometry.__slots__}
    return {
        "key_terms": dict(record.key_terms),
        "made_seconds": record.made_seconds,
        "container": record.container,
        "unit": record.unit,
        "slot": record.slot,
        "geometry": geometry,
        "placeholder": {"text": record.placeholder.text, "runs": list(record.placeholder.runs)},
        "tensors": {name: _describe_tensor(tensor) for name, tensor in record.tensors.items()},
        "inputs": {name: _describe_tensor(tensor) for name, tensor in record.inputs.items()},
    }


def _describe_tensor(tensor: TensorView) -> Mapping[str, Any]:
    values = as_float(tensor)
    told: dict[str, Any] = {"dtype": tensor.dtype, "shape": list(tensor.shape)}
    if values.size:
        finite = values[np.isfinite(values)]
        told["not_finite"] = int(values.size - finite.size)
        if finite.size:
            told |= {"least": float(finite.min()), "mean": float(finite.mean()), "most": float(finite.max())}
    return told


def as_float(tensor: TensorView) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The numbers of a tensor, as float64; of bfloat16 exactly those that its words stand for."""
    array = tensor.numpy()
    if tensor.dtype == "bfloat16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)
