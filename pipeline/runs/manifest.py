"""The listing of a run: frozen under the run at its first start, and read by ranges from then on."""

from __future__ import annotations

import functools
import hashlib
import itertools
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from types import TracebackType
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import ManifestError
from pipeline.media.in_process import InProcess
from pipeline.media.sandbox import Probers
from pipeline.media.source import ANYWHERE
from pipeline.media.url_policy import SourcePolicy
from pipeline.runs.frozen_rows import FROZEN_SCHEMA, canonical, frozen_request, frozen_row
from pipeline.runs.id_spill import IdSpill
from pipeline.runs.listing import numbered_requests
from pipeline.runs.pages import page_requests
from pipeline.runs.request_rows import show
from pipeline.schema import Request
from pipeline.storage import Folder

FROZEN_INDEX = "_run/manifest.json"
FROZEN_PARTS = "_run/manifest"
_ROW_GROUP_BYTES = 32 * 2**20  # inline bytes held before a row group is written; not tuned
_COPY_THREADS = 8


_ALL_ROWS = 2**62


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenManifest:
    """The index of a listing that no longer changes. `digest` is sha256 over its rows, in order.

    `num_texts` are the rows with a `text`; None in listings frozen before they were counted.
    """

    num_items: int
    num_texts: int | None
    digest: str
    files: tuple[str, ...]
    rows_per_file: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedManifest:
    """A frozen listing in a local temporary directory, which leaving the context (or `discard()`) removes."""

    directory: str
    num_items: int
    digest: str

    def discard(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> StagedManifest:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.discard()


def freeze_manifest(
    input: str,
    folder: Folder,
    *,
    limit: int | None,
    sample_fraction: float | None = None,
    texts: Sequence[str] = (),
    expand_pages: bool = False,
    policy: SourcePolicy = ANYWHERE,
    reader: Probers | InProcess | None = None,
    rows_per_file: int = 4096,
) -> FrozenManifest:
    """Write the listing under `folder`, its index last; a listing already frozen there is only read.

    `expand_pages`: with a row for each page of a PDF, as `page_requests` makes them under `policy`, by `reader`;
    `limit` counts those. With `sample_fraction` only that part of the rows, chosen by their ids. Raises what
    `read_manifest` and `page_requests` raise, and `ManifestError` for an id that occurs twice.
    """
    if folder.exists(FROZEN_INDEX):
        return read_frozen(folder)
    digest, counts = hashlib.sha256(), Counter[str]()
    files: list[str] = []
    with IdSpill() as ids:
        with closing(_listed_requests(input, limit, sample_fraction, texts, expand_pages, policy, reader)) as numbered:
            requests = _observed(numbered, ids, digest, counts)
            for first in requests:
                files.append(f"{FROZEN_PARTS}/part-{len(files):05d}.parquet")
                with folder.writing(files[-1]) as file:
                    _write_rows(file, itertools.chain([first], itertools.islice(requests, rows_per_file - 1)))
        duplicate = ids.first_duplicate()
    if duplicate is not None:
        id_ = _id_at(folder, files, duplicate.item_index, rows_per_file)
        raise ManifestError(
            f"{input}: rows {duplicate.row} and {duplicate.repeated_row}, column 'id': duplicate id {show(id_)}; "
            "an id names one row, make it unique"
        )
    index = {
        "num_items": ids.count,
        "num_texts": counts["texts"],
        "digest": digest.hexdigest(),
        "files": files,
        "rows_per_file": rows_per_file,
    }
    folder.write_json(FROZEN_INDEX, index)
    return read_frozen(folder)


def stage_manifest(
    input: str,
    *,
    limit: int | None,
    sample_fraction: float | None = None,
    texts: Sequence[str] = (),
    expand_pages: bool = False,
    policy: SourcePolicy = ANYWHERE,
    reader: Probers | InProcess | None = None,
    rows_per_file: int = 4096,
) -> StagedManifest:
    """Freeze the listing in a local temporary directory: the run's id needs its digest before the run has a folder.

    Use as a context manager, or call `discard()`: it removes the directory.
    """
    directory = tempfile.mkdtemp(prefix="headrace-manifest-")
    try:
        frozen = freeze_manifest(
            input,
            Folder(directory),
            limit=limit,
            sample_fraction=sample_fraction,
            texts=texts,
            expand_pages=expand_pages,
            policy=policy,
            reader=reader,
            rows_per_file=rows_per_file,
        )
    except BaseException:
        shutil.rmtree(directory)
        raise
    return StagedManifest(directory=directory, num_items=frozen.num_items, digest=frozen.digest)


def publish_manifest(staged: StagedManifest, folder: Folder) -> FrozenManifest:
    """Copy a staged listing under the run, its index last. Does nothing when the run has the same one already.

    Raises `ManifestError` when the run was started with another listing.
    """
    if folder.exists(FROZEN_INDEX):
        frozen = read_frozen(folder)
        if frozen.digest != staged.digest:
            raise ManifestError(
                f"{folder.url}: this run was started with another listing ({frozen.num_items} items, digest "
                f"{frozen.digest[:8]}; now {staged.num_items}, {staged.digest[:8]}); use another run_id or output"
            )
        return frozen
    source = Folder(staged.directory)
    frozen = read_frozen(source)
    with ThreadPoolExecutor(_COPY_THREADS) as pool:
        for _ in pool.map(functools.partial(_copy, source, folder), frozen.files):
            pass
    _copy(source, folder, FROZEN_INDEX)
    return frozen


def freeze_part(source: Folder, folder: Folder, start: int, stop: int) -> None:
    """Freeze items `[start, stop)` of the listing in `source` under `folder`, as a listing of its own."""
    digest, counts = hashlib.sha256(), Counter[str]()
    numbered = enumerate(read_range(source, start, stop))
    with IdSpill() as ids:
        rows = _observed(((n, replace(each, item_index=n)) for n, each in numbered), ids, digest, counts)
        name = f"{FROZEN_PARTS}/part-00000.parquet"
        with folder.writing(name) as file:
            _write_rows(file, rows)
    index = {
        "num_items": stop - start,
        "num_texts": counts["texts"],
        "digest": digest.hexdigest(),
        "files": [name],
        "rows_per_file": stop - start,
    }
    folder.write_json(FROZEN_INDEX, index)


def read_frozen(folder: Folder) -> FrozenManifest:
    """The index of a frozen listing. Raises `FileNotFoundError` when `folder` has none."""
    index = folder.read_json(FROZEN_INDEX)
    return FrozenManifest(
        num_items=index["num_items"],
        num_texts=index.get("num_texts"),
        digest=index["digest"],
        files=tuple(index["files"]),
        rows_per_file=index["rows_per_file"],
    )


def read_range(folder: Folder, start: int, stop: int) -> list[Request]:
    """The frozen requests with `start <= item_index < stop`; reads the row groups that hold them and nothing else."""
    frozen = read_frozen(folder)
    if not 0 <= start <= stop <= frozen.num_items:
        raise ValueError(f"items [{start}, {stop}) are not within the frozen listing of {frozen.num_items}")
    if start == stop:
        return []
    parts = range(start // frozen.rows_per_file, (stop - 1) // frozen.rows_per_file + 1)
    rows = itertools.chain.from_iterable(
        _read_rows(folder, frozen.files[part], start - part * frozen.rows_per_file, stop - part * frozen.rows_per_file)
        for part in parts
    )
    return [frozen_request(row) for row in rows]


def replace_rows(folder: Folder, replaced: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Write the files of a frozen listing anew, each row (`FROZEN_SCHEMA`) as `replaced` gives it.

    The listing's digest stays that of the rows as they were: it says which listing the run is of.
    """
    for name in read_frozen(folder).files:
        rows = list(_read_rows(folder, name, 0, _ALL_ROWS))
        changed = [replaced(row) for row in rows]
        if changed != rows:
            with folder.writing(name) as file:
                _write_rows(file, changed)


def _listed_requests(
    input: str,
    limit: int | None,
    sample_fraction: float | None,
    texts: Sequence[str],
    expand_pages: bool,
    policy: SourcePolicy,
    reader: Probers | InProcess | None,
) -> Generator[tuple[int, Request]]:
    # A document is in the sample with all of its pages, or not at all.
    numbered = numbered_requests(input, limit, texts, sample_fraction)
    return page_requests(numbered, limit=limit, policy=policy, reader=reader) if expand_pages else numbered


def _observed(
    numbered: Iterable[tuple[int, Request]], ids: IdSpill, digest: hashlib._Hash, counts: Counter[str]
) -> Iterator[dict[str, Any]]:
    """The rows to write, each counted, hashed and its id put down on the way."""
    for row, request in numbered:
        ids.add(request.id, row)
        counts["texts"] += request.text is not None
        frozen = frozen_row(request)
        digest.update(canonical(frozen))
        yield frozen


def _write_rows(file: IO[bytes], rows: Iterable[dict[str, Any]]) -> None:
    with pq.ParquetWriter(file, FROZEN_SCHEMA, compression="zstd") as writer:
        pending: list[dict[str, Any]] = []
        pending_bytes = 0
        for row in rows:
            pending.append(row)
            pending_bytes += sum(len(item["data"] or b"") for item in row["media"]) + _text_bytes(row)
            if pending_bytes >= _ROW_GROUP_BYTES:
                writer.write_table(pa.Table.from_pylist(pending, FROZEN_SCHEMA))
                pending, pending_bytes = [], 0
        if pending:
            writer.write_table(pa.Table.from_pylist(pending, FROZEN_SCHEMA))


def _text_bytes(row: Mapping[str, Any]) -> int:
    return len(row["text"] or "") + sum(map(len, row["documents"] or ()))


def _read_rows(folder: Folder, name: str, start: int, stop: int) -> Iterator[dict[str, Any]]:
    """Rows [start, stop) of one file, in row numbers of that file; either may lie outside it."""
    first = 0
    with folder.open(name) as raw, pq.ParquetFile(raw) as file:
        for group in range(file.num_row_groups):
            last = first + file.metadata.row_group(group).num_rows
            low, high = max(start, first), min(stop, last)
            if low < high:
                yield from file.read_row_group(group).slice(low - first, high - low).to_pylist()
            first = last


def _id_at(folder: Folder, files: list[str], item_index: int, rows_per_file: int) -> str:
    part, row = divmod(item_index, rows_per_file)
    return next(_read_rows(folder, files[part], row, row + 1))["id"]  # type: ignore[no-any-return]


def _copy(source: Folder, target: Folder, name: str) -> None:
    with source.open(name) as reader, target.writing(name) as writer:
        shutil.copyfileobj(reader, writer)
