"""Points to write, and the answers that plain numpy gives for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.sinks.contract import Collection, ItemKey, Metric, point_id, points_schema

DIMENSIONS = 8
VERSION = "0123456789abcdef" * 4
OTHER_VERSION = "fedcba9876543210" * 4
ROOT = Path(__file__).parents[2]


def make_collection(metric: Metric = "cosine", version: str = VERSION, dimensions: int = DIMENSIONS) -> Collection:
    return Collection(name="documents", dimensions=dimensions, metric=metric, version=version)


def vector(seed: int, dimensions: int = DIMENSIONS) -> Any:
    return np.random.default_rng(seed).normal(size=dimensions).astype(np.float32)


def make_row(
    item_id: str, part: int = 0, /, *, tenant: str = "", dimensions: int = DIMENSIONS, **changes: Any
) -> dict[str, Any]:
    """A chunk of a document; its vector follows from `seed`, else from the item and the part."""
    seed = changes.pop("seed", int.from_bytes(f"{tenant}/{item_id}/{part}".encode()) % 2**63)
    row = {
        "id": point_id(tenant, item_id, "chunk", part),
        "item_id": item_id,
        "tenant": tenant,
        "kind": "chunk",
        "uri": f"file:///{item_id}.pdf",
        "page": part + 1,
        "start_char": 100 * part,
        "end_char": 100 * part + 90,
        "text": f'It\'s part {part} of {item_id}, "so" it says: \\ %s ü 漢字',
        "source_id": f"etag-{item_id}",
        "vector": vector(seed, dimensions),
    }
    return {**row, **changes}


def make_points(rows: Sequence[dict[str, Any]], dimensions: int = DIMENSIONS) -> pa.Table:
    return pa.Table.from_pylist(list(rows), points_schema(dimensions))


def documents(num: int, parts: int = 2, *, tenant: str = "", first: int = 0, dimensions: int = DIMENSIONS) -> pa.Table:
    """`num` documents of `parts` chunks."""
    numbers = range(first, first + num)
    rows = [make_row(f"doc {n}", part, tenant=tenant, dimensions=dimensions) for n in numbers for part in range(parts)]
    return make_points(rows, dimensions)


def keys(points: pa.Table) -> list[ItemKey]:
    pairs = zip(points["tenant"].to_pylist(), points["item_id"].to_pylist(), strict=True)
    return [ItemKey(*pair) for pair in dict.fromkeys(pairs)]


def nearest(points: pa.Table, query: Any, metric: Metric, limit: int) -> list[tuple[str, float]]:
    """(id, score) of the best points, by comparing with every one in double precision."""
    vectors = np.array(points["vector"].to_pylist(), dtype=np.float64)
    query = np.asarray(query, dtype=np.float64)
    if metric == "cosine":
        scores = vectors @ query / (np.linalg.norm(vectors, axis=1) * np.linalg.norm(query))
    elif metric == "dot":
        scores = vectors @ query
    else:
        scores = -np.linalg.norm(vectors - query, axis=1)
    best = np.argsort(-scores)[:limit]
    return [(points["id"][int(i)].as_py(), float(scores[i])) for i in best]
