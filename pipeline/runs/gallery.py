"""Pictures of a run's items beside what came out of them, for its page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow.parquet as pq

from pipeline.config import Config
from pipeline.errors import ItemError
from pipeline.media.sandbox import Sandbox, open_sandbox
from pipeline.media.source import stat_source
from pipeline.media.thumbnail import as_jpeg, thumbnail
from pipeline.runs.manifest import read_range
from pipeline.runs.report import Shown
from pipeline.schema import MediaItem
from pipeline.storage import Folder

_SIDE = 192  # pixels
_LARGEST_BYTES = 32 * 2**20  # of a media item that is fetched for a small picture
EXAMPLES_A_CODE = 3


def choose_rows(run: Folder, count: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """`count` items that are ok, evenly spaced over the run, and the first few of each code that are quarantined.

    Of vectors, chunks and tokens nothing is read. Looks at every part's verdicts.
    """
    verdicts = []
    for name in run.list(suffix=".parquet"):  # of a run that was cut off, parts may be missing in between
        with run.open(name) as file:
            table = pq.read_table(file, columns=["status", "code"])
        verdicts += [(name, row, *pair) for row, pair in enumerate(zip(*table.to_pydict().values(), strict=True))]
    fine = [(name, row) for name, row, status, _ in verdicts if status == "ok"]
    count = min(count, len(fine))
    chosen = [fine[round(n * (len(fine) - 1) / max(1, count - 1))] for n in range(count)]
    failed: dict[str, list[tuple[str, int]]] = {}
    for name, row, status, code in verdicts:
        places = failed.setdefault(code, []) if status == "quarantined" else []
        if len(places) < EXAMPLES_A_CODE:
            places.append((name, row))
    examples = [place for code in sorted(failed) for place in failed[code]]
    return _rows(run, sorted(set(chosen))), _rows(run, examples)


def _rows(run: Folder, places: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for part in sorted({part for part, _ in places}):
        with run.open(part) as file:
            schema = pq.read_schema(file)
            table = pq.read_table(file, columns=[n for n in schema.names if n not in ("vector", "chunks", "tokens")])
        rows = [row for of, row in places if of == part]
        found |= {(part, row): each for row, each in zip(rows, table.take(rows).to_pylist(), strict=True)}
    return [found[place] for place in places]


def with_pictures(run: Folder, config: Config, rows: Sequence[Mapping[str, Any]]) -> list[Shown]:
    """Small pictures of the items of `rows`, decoded in the sandbox where the run has one."""
    sandbox = open_sandbox(config.decode.sandbox, config.decode.item_seconds)
    try:
        return [Shown(row=row, picture=_picture(run, config, row["item_index"], sandbox)) for row in rows]
    finally:
        if sandbox is not None:
            sandbox.close()


def _picture(run: Folder, config: Config, item_index: int, sandbox: Sandbox | None) -> bytes | None:
    [request] = read_range(run, item_index, item_index + 1)
    for media in request.media:
        if not _is_small(media, config):
            continue
        pixels = thumbnail(media, _SIDE, config.source_policy(), config.limits(), sandbox)
        if pixels is not None:
            return as_jpeg(pixels)
    return None


def _is_small(media: MediaItem, config: Config) -> bool:
    try:
        return stat_source(media, config.source_policy()).num_bytes <= _LARGEST_BYTES
    except ItemError:
        return False
