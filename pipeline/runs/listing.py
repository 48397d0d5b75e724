"""Where a run's rows come from: a manifest file, or a folder, prefix or glob of media files.

A manifest is `.parquet`, `.jsonl` / `.ndjson` or `.csv`, with the columns of `pipeline.runs.request_rows`.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import itertools
import json
import os
import posixpath
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import IO, Any, BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import ConfigError, ManifestError
from pipeline.media.archive_index import ARCHIVE_SUFFIXES, index_archive
from pipeline.retry import Result
from pipeline.runs.request_rows import (
    COLUMNS,
    Place,
    check_columns,
    is_media_name,
    parsed_json,
    request_from_row,
    show,
)
from pipeline.schema import Request
from pipeline.storage import file_system, open_reading, reach

MANIFEST_SUFFIXES = (".parquet", ".jsonl", ".ndjson", ".csv")
INPUT_SCHEMES = ("file", "s3", "gs", "memory")
_JSON_IN_CSV = ("media", "images", "videos", "audios", "documents")
_ROWS_PER_READ = 1024
_ROWS_PER_READ_INLINE = 32  # rows with inline bytes are megabytes each


def read_manifest(input: str, *, limit: int | None, texts: Sequence[str] = ()) -> Iterator[Request]:
    """The rows of `input` in order, streamed; at most `limit`. `texts` are those of `TEXT_COLUMNS` that are read.

    `input` is a manifest file, or a folder, prefix or glob of media files (sorted by path, the relative path is the
    id; names that start with "." and manifest files are left out), or a tar or zip archive (its members by name, those
    that are named as media; of one in a folder the id is "path#member"). Ids are not compared here: freezing does.
    Raises `ConfigError` at the call when `input` cannot be read from, `ManifestError` naming file, row and column.
    """
    return _without_rows(numbered_requests(input, limit, texts))


def _without_rows(numbered: Generator[tuple[int, Request]]) -> Iterator[Request]:
    with closing(numbered):
        for _, request in numbered:
            yield request


def check_input(input: str) -> None:
    """Raise `ConfigError` when `input` is not there or storage refuses it, and read no row of it."""
    source = _locate(input)
    if source.format is None and _kind(source) is None and not _is_glob(source.path):
        raise ManifestError(f"{input}: no such file or folder, or nothing in it")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """Where rows are read from. `format` is a manifest suffix, or None for a listing of media files."""

    input: str
    fs: Any
    path: str
    prefix: str
    format: str | None

    @property
    def base(self) -> str:
        """The folder that relative uris start from."""
        return self.url(posixpath.dirname(self.path))

    def url(self, path: str) -> str:
        """`path` as a uri that any process can open."""
        return f"{self.prefix}{path.lstrip('/')}" if self.prefix else path

    def reach(self, call: Callable[[], Result]) -> Result:
        """`call()` on the storage of this place, as `storage.reach` does it."""
        return reach(call, self.input, lambda: self.fs.cat_file(self.path, start=0, end=1))

    def open(self) -> IO[bytes]:
        """The manifest file."""
        return open_reading(self.fs, self.path, self.input)


def numbered_requests(
    input: str, limit: int | None, texts: Sequence[str], sample_fraction: float | None = None
) -> Generator[tuple[int, Request]]:
    """(number of the row in its file, request) in order; arguments and errors are those of `read_manifest`.

    With `sample_fraction` only the rows that `in_sample` chooses by their id, of which `limit` are taken. Raises
    `ManifestError` when there are none.
    """
    source = _locate(input)
    if source.format is None and source.path.lower().endswith(ARCHIVE_SUFFIXES) and _kind(source) == "file":
        rows = _list_archive(source)
    elif source.format is None:
        rows = _list_media(source)
    else:
        rows = {".parquet": _parquet_rows, ".csv": _csv_rows}.get(source.format, _json_rows)(source)
    if sample_fraction is None:
        return _parse(source, rows, limit, texts)
    return _sampled(_parse(source, rows, None, texts), sample_fraction, limit, input)


def in_sample(id_: str, fraction: float) -> bool:
    """True for `fraction` of all ids, the same ones in whatever order, and all of them in every larger sample."""
    return int.from_bytes(hashlib.sha256(id_.encode()).digest()[:8], "big") < fraction * 2**64


def _sampled(
    numbered: Generator[tuple[int, Request]], fraction: float, limit: int | None, input: str
) -> Generator[tuple[int, Request]]:
    count = -1
    with closing(numbered):
        chosen = ((row, request) for row, request in numbered if in_sample(request.id, fraction))
        for count, (row, request) in enumerate(itertools.islice(chosen, limit)):
            yield row, dataclasses.replace(request, item_index=count)
    if count < 0:
        raise ManifestError(f"{input}: none of its items is in a sample of {fraction:.4%}; take a larger one")


def _parse(
    source: _Source, rows: Generator[tuple[int, Mapping[str, Any]]], limit: int | None, texts: Sequence[str]
) -> Generator[tuple[int, Request]]:
    item_index = -1
    # Closed here, with the file that it reads, whatever ends the reading: a limit, a wrong row, a caller that stops.
    with closing(rows):
        for item_index, (row, values) in enumerate(itertools.islice(rows, limit)):
            yield row, request_from_row(values, item_index, Place(file=source.input, row=row, base=source.base), texts)
    if item_index < 0:
        raise ManifestError(f"{source.input}: the manifest has no rows; there is nothing to do")


def _locate(input: str) -> _Source:
    scheme, separator, _ = input.partition("://")
    scheme = scheme if separator else "file"
    if scheme not in INPUT_SCHEMES or "::" in input:
        raise ConfigError(
            f"input {input!r}: {scheme}:// is not read from; copy the listing to a local path or to "
            + ", ".join(f"{known}://" for known in INPUT_SCHEMES)
        )
    fs = file_system(scheme)
    path = fs._strip_protocol(input)
    prefix = "" if scheme == "file" else f"{scheme}://"
    format = next((suffix for suffix in MANIFEST_SUFFIXES if path.lower().endswith(suffix)), None)
    source = _Source(input=input, fs=fs, path=path, prefix=prefix, format=format)
    if format is not None:
        _check_manifest_file(source)
    return source


def _check_manifest_file(source: _Source) -> None:
    kind = _kind(source)
    if kind == "file":
        return
    if kind == "directory":
        raise ManifestError(f"{source.input}: is a folder; a manifest is one file, name one of those inside it")
    raise ManifestError(f"{source.input}: no such manifest file")


def _kind(source: _Source) -> str | None:
    """What is there: "file", "directory" or nothing (None)."""
    if not source.prefix:
        return "file" if os.path.isfile(source.path) else "directory" if os.path.isdir(source.path) else None
    try:
        # Not `isfile`: it takes every failure for a no.
        return str(source.reach(lambda: source.fs.info(source.path))["type"])
    except FileNotFoundError:
        return None


def _list_media(source: _Source) -> Generator[tuple[int, Mapping[str, Any]]]:
    root, paths = _find(source)
    if not paths:
        raise ManifestError(f"{source.input}: no such file or folder, or nothing in it")
    names = sorted((path.removeprefix(f"{root.rstrip('/')}/"), path) for path in paths)
    visible = [(name, path) for name, path in names if not any(part.startswith(".") for part in name.split("/"))]
    media = [(name, path) for name, path in visible if not name.lower().endswith(MANIFEST_SUFFIXES)]
    if not media:
        left_out = f"; to read a manifest, name it: {source.url(visible[0][1])}" if visible else ""
        raise ManifestError(f"{source.input}: no media files there{left_out}")
    listed = itertools.chain.from_iterable(_list_file(source, name, path) for name, path in media)
    yield from enumerate(listed, start=1)


def _list_file(source: _Source, name: str, path: str) -> Iterator[Mapping[str, Any]]:
    """A media file, or the members of an archive."""
    if not name.lower().endswith(ARCHIVE_SUFFIXES):
        yield {"id": name, "uri": source.url(path)}
        return
    for member in _media_members(source, path):
        yield {"id": f"{name}#{member}", "uri": f"{source.url(path)}#{member}"}


def _list_archive(source: _Source) -> Generator[tuple[int, Mapping[str, Any]]]:
    members = _media_members(source, source.path)
    if not members:
        raise ManifestError(f"{source.input}: none of its members is named as media")
    for row, member in enumerate(members, start=1):
        yield row, {"id": member, "uri": f"{source.url(source.path)}#{member}"}


def _media_members(source: _Source, path: str) -> list[str]:
    """By name. One that is damaged is refused: what it had more would be missing from the run without a word."""
    with open_reading(source.fs, path, source.url(path)) as file:
        num_bytes = file.seek(0, io.SEEK_END)
        index = index_archive(cast(BinaryIO, file), num_bytes, path)
    if index.damage:
        raise ManifestError(f"{source.url(path)}: {index.damage}; list the members that are whole in a manifest")
    return [name for name in sorted(index.members) if is_media_name(name)]


def _find(source: _Source) -> tuple[str, list[str]]:
    """The folder that ids are relative to, and every file below it or matched by the glob."""
    fs, path = source.fs, source.path
    kind = _kind(source)
    if kind is not None or not _is_glob(path):
        if kind == "file":
            return posixpath.dirname(path), [path]
        if source.prefix:
            found = source.reach(lambda: fs.find(path))
            return path, [name for name in found if not name.endswith("/")]  # consoles make such objects for folders
        return path, list(_walk(path, frozenset())) if kind == "directory" else []
    entries = source.reach(lambda: fs.glob(path, detail=True))
    files = [name for name, info in entries.items() if info["type"] != "directory" and not name.endswith("/")]
    if not source.prefix:
        files = [name for name in files if not os.path.isdir(name)]
    return posixpath.dirname(re.split(r"[*?\[]", path, maxsplit=1)[0]), files


def _is_glob(path: str) -> bool:
    return re.search(r"[*?\[]", path) is not None


def _walk(directory: str, above: frozenset[str]) -> Iterator[str]:
    # fsspec lists a linked folder as one file; links are followed here, and a link to a folder above ends the branch.
    # A dangling link is listed, so that it is quarantined and not lost; pipes and sockets would block a reader.
    real = os.path.realpath(directory)
    if real in above:
        return
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _walk(entry.path, above | {real})
            elif entry.is_file() or entry.is_symlink():
                yield entry.path


def _parquet_rows(source: _Source) -> Generator[tuple[int, Mapping[str, Any]]]:
    try:
        with source.open() as raw, pq.ParquetFile(raw) as file:
            names = file.schema_arrow.names
            check_columns(tuple(names), Place(file=source.input, row=1, base=source.base))
            columns = [name for name in names if name in COLUMNS]
            inline = any("binary" in str(file.schema_arrow.field(name).type) for name in columns)
            batches = file.iter_batches(_ROWS_PER_READ_INLINE if inline else _ROWS_PER_READ, columns=columns)
            yield from enumerate((row for batch in batches for row in batch.to_pylist()), start=1)
    except pa.ArrowInvalid as error:
        raise ManifestError(f"{source.input}: not a readable Parquet file: {error}") from error


def _json_rows(source: _Source) -> Generator[tuple[int, Mapping[str, Any]]]:
    """A row's number is its line, so that an editor finds it; blank lines are passed over."""
    with source.open() as file:
        for row, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = Place(file=source.input, row=row, base=source.base)
            try:
                values = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise place.refuse(None, f"not valid JSON: {error}; each line is one object") from error
            if not isinstance(values, dict):
                raise place.refuse(None, f"expected a JSON object, got {show(values)}")
            check_columns(tuple(values), place)
            yield row, values


def _csv_rows(source: _Source) -> Generator[tuple[int, Mapping[str, Any]]]:
    """Row 1 is the one after the header. An empty field is null; lists are JSON."""
    row = 0
    with source.open() as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as text:
        reader = csv.reader(text, strict=True)
        try:
            header = next(reader, [])
            check_columns(tuple(header), Place(file=source.input, row=1, base=source.base))
            for row, fields in enumerate((fields for fields in reader if fields), start=1):
                place = Place(file=source.input, row=row, base=source.base)
                if len(fields) != len(header):
                    raise place.refuse(
                        None, f"{len(fields)} fields under {len(header)} columns; quote commas in values"
                    )
                yield row, {name: _csv_value(name, field, place) for name, field in zip(header, fields, strict=True)}
        except (csv.Error, UnicodeDecodeError) as error:
            raise ManifestError(f"{source.input}: row {row + 1}: not valid UTF-8 CSV: {error}") from error


def _csv_value(name: str, field: str, place: Place) -> Any:
    if not field:
        return None
    if name in _JSON_IN_CSV and field.lstrip().startswith("["):
        return parsed_json(field, name, place)
    return field
