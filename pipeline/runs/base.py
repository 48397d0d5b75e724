"""The run before this one: which of its items are still what they were, and which have vanished.

`_run/base.json` names it, from the first start on. `_run/base.npy` is its index: an entry an item, sorted by a hash of
tenant and id. A hash only points to a row, whose tenant, id and source id are compared themselves.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import ConfigError
from pipeline.runs.manifest import FROZEN_INDEX, read_frozen
from pipeline.runs.summary import SUMMARY_NAME
from pipeline.sinks.parquet import part_name
from pipeline.sinks.vectors import read_described
from pipeline.storage import Folder

BASE_NAME = "_run/base.json"
LATEST_ENDED_NAME = "latest_ended"  # of an output folder
_INDEX_NAME = "_run/base.npy"
_ENTRY = np.dtype([("hash", "<u8"), ("window", "<u4"), ("row", "<u4")])
_SOURCE_COLUMNS = ["tenant", "id", "status", "source_id"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A row of the base run: in the part of `window`, counted from its first."""

    window: int
    row: int


def choose_base(run: Folder, output: Folder, wanted: str | None) -> str | None:
    """The id of the run to go on from, written down at the first start; None when there is none yet.

    `wanted` is a run's id, or `latest`, the last one that ended. Raises `ConfigError` for a run that is not there or
    has not ended.
    """
    if run.exists(BASE_NAME):
        return run.read_json(BASE_NAME)["run_id"]  # type: ignore[no-any-return]
    chosen = wanted if wanted != "latest" else _latest(output)
    if chosen is not None and not output.sub(chosen).exists(SUMMARY_NAME):
        raise ConfigError(
            f"incremental.base: {output.sub(chosen).url} is not a run that has ended; name one that has, or resume it"
        )
    run.write_json(BASE_NAME, {"run_id": chosen})
    return chosen


def _latest(output: Folder) -> str | None:
    return output.read_bytes(LATEST_ENDED_NAME).decode().strip() if output.exists(LATEST_ENDED_NAME) else None


def goes_on(run: Folder, base: Folder, spaces: Mapping[str, Any]) -> bool:
    """Whether rows of `base` can stand for those of `run`: of the same configuration, models and contracts."""
    digests = [folder.read_json("_run/config.json")["digest"] for folder in (run, base)]
    if digests[0] != digests[1]:
        return False
    with base.open(part_name(0)) as file:
        return bool(read_described(file) == json.loads(json.dumps(spaces)))


def index_base(run: Folder, base: Folder) -> None:
    """Write the index of `base`, in one go over the ids in its parts."""
    if run.exists(_INDEX_NAME):
        return
    index = index_items(base)
    file = io.BytesIO()
    np.save(file, index)
    run.write_bytes(_INDEX_NAME, file.getvalue())


def index_items(run: Folder) -> npt.NDArray[Any]:
    """Where each item of a run has its row (`hash`, `window`, `row`), sorted by the hash; 16 bytes an item."""
    entries = []
    for window, name in enumerate(run.list(suffix=".parquet")):
        with run.open(name) as file:
            part = pq.read_table(
                file, columns=[each for each in ("tenant", "id") if each in pq.read_schema(file).names]
            )
        places = np.zeros(len(part), _ENTRY)
        places["hash"], places["window"], places["row"] = hash_part(part), window, np.arange(len(part))
        entries.append(places)
    index = np.concatenate([*entries, np.zeros(0, _ENTRY)])
    index.sort(order="hash")
    return index


def hash_part(part: pa.Table) -> npt.NDArray[np.uint64]:
    """`hash_items` of a part's rows; those of captions have no tenant."""
    ids = part["id"].to_pylist()
    return hash_items(part["tenant"].to_pylist() if "tenant" in part.column_names else [""] * len(ids), ids)


def hash_items(tenants: Sequence[str], ids: Sequence[str]) -> npt.NDArray[np.uint64]:
    """8 bytes an item, of SHA-256 over tenant and id."""
    digests = (hashlib.sha256(json.dumps([t, i]).encode()).digest()[:8] for t, i in zip(tenants, ids, strict=True))
    return np.frombuffer(b"".join(digests), "<u8")


def unchanged(run: Folder, base: Folder, sources: Mapping[int, tuple[str, str, str]]) -> dict[int, Place]:
    """Item → its row in the base run, of those that have one which is ok and of the same source.

    `sources`: item → (tenant, id, source id).
    """
    items = list(sources)
    places = _places(run, [sources[item][:2] for item in items])
    wanted: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for item, found in zip(items, places, strict=True):
        for place in found:
            wanted[place.window].append((item, place.row))
    same = {}
    for window, pairs in wanted.items():
        rows = read_rows(base, window, [row for _, row in pairs], _SOURCE_COLUMNS).to_pylist()
        for (item, number), row in zip(pairs, rows, strict=True):
            if row["status"] == "ok" and (row["tenant"], row["id"], row["source_id"]) == sources[item]:
                same[item] = Place(window=window, row=number)
    return same


def read_rows(base: Folder, window: int, rows: Sequence[int], columns: Sequence[str] | None = None) -> pa.Table:
    """Rows of a part, in the order asked for."""
    with base.open(part_name(window)) as file:
        table = pq.read_table(file, columns=None if columns is None else list(columns))
    return table.take(pa.array(rows, pa.int64()))


def vanished(run: Folder, base: Folder) -> dict[str, list[str]]:
    """Tenant → ids of the base run's items that this run's listing no longer has."""
    index = _index(run.url)
    here = np.sort(np.concatenate([*_listed_hashes(run), np.zeros(0, np.uint64)]))
    gone = index[~np.isin(index["hash"], here)]
    found: dict[str, list[str]] = defaultdict(list)
    for window in np.unique(gone["window"]):
        rows = gone["row"][gone["window"] == window]
        for row in read_rows(base, int(window), rows.tolist(), ["tenant", "id"]).to_pylist():
            found[row["tenant"]].append(row["id"])
    return dict(found)


def _listed_hashes(run: Folder) -> Iterator[npt.NDArray[np.uint64]]:
    assert run.exists(FROZEN_INDEX)
    for name in read_frozen(run).files:
        with run.open(name) as file:
            table = pq.read_table(file, columns=["tenant", "id"])
        yield hash_items(table["tenant"].to_pylist(), table["id"].to_pylist())


def _places(run: Folder, items: Iterable[tuple[str, str]]) -> list[list[Place]]:
    """By item, rows that its hash points to: one, or none, or by an accident of hashing several."""
    index = _index(run.url)
    pairs = list(items)
    hashes = hash_items([tenant for tenant, _ in pairs], [item_id for _, item_id in pairs])
    low, high = (np.searchsorted(index["hash"], hashes, side=side) for side in ("left", "right"))
    return [
        [Place(window=int(entry["window"]), row=int(entry["row"])) for entry in index[start:stop]]
        for start, stop in zip(low, high, strict=True)
    ]


@functools.lru_cache(maxsize=2)
def _index(run_url: str) -> npt.NDArray[Any]:
    with Folder(run_url).open(_INDEX_NAME) as file:
        index: npt.NDArray[Any] = np.load(io.BytesIO(file.read()))
    return index
