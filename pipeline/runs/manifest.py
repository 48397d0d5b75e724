"""The listing of a run: read from a manifest file or a folder of media, checked, and frozen under the run.

A manifest is `.parquet`, `.jsonl` / `.ndjson` or `.csv`. Columns: `id` (required), then media as `media` (a list of
uris or of `{uri | data, modality, version, sha256, page}`) or as `uri`, `data`, `image(s)`, `video(s)`; optional
`prompt` or `messages`, `tenant`, and for rows with one media item `modality`, `version`, `sha256`. Jobs that embed
or score read `text`, jobs that rank `query` and `documents`. Other columns are ignored.
"""

from __future__ import annotations

import base64
import csv
import difflib
import functools
import hashlib
import io
import itertools
import json
import os
import posixpath
import re
import shutil
import struct
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import ConfigError, ManifestError
from pipeline.retry import Result
from pipeline.runs.pages import page_requests
from pipeline.schema import MediaItem, Modality, Request
from pipeline.storage import Folder, file_system, open_reading, reach

MANIFEST_SUFFIXES = (".parquet", ".jsonl", ".ndjson", ".csv")
IMAGE_SUFFIXES = "jpg jpeg jpe jfif png gif webp bmp dib tif tiff avif heic heif jp2 ppm pgm pbm pnm tga ico"
VIDEO_SUFFIXES = "mp4 m4v mov mkv webm avi mpg mpeg mpe m1v m2v ts m2ts mts wmv asf flv f4v 3gp 3g2 ogv mxf vob"
INPUT_SCHEMES = ("file", "s3", "gs", "memory")

FROZEN_INDEX = "_run/manifest.json"
FROZEN_PARTS = "_run/manifest"
FROZEN_SCHEMA = pa.schema(
    [
        ("item_index", pa.int64()),
        ("id", pa.string()),
        (
            "media",
            pa.list_(
                pa.struct(
                    [
                        ("uri", pa.string()),
                        ("data", pa.large_binary()),
                        ("modality", pa.string()),
                        ("version", pa.string()),
                        ("sha256", pa.string()),
                        ("page", pa.int32()),
                    ]
                )
            ),
        ),
        ("prompt", pa.string()),
        ("messages", pa.string()),
        ("tenant", pa.string()),
        ("text", pa.string()),
        ("query", pa.string()),
        ("documents", pa.list_(pa.string())),
    ]
)

# The column says what its uris are, and the order of the columns is the order of a row's media.
_URI_COLUMNS: dict[str, Modality | None] = {
    "uri": None,
    "image": "image",
    "images": "image",
    "video": "video",
    "videos": "video",
}
_SINGLE_MEDIA_COLUMNS = ("modality", "version", "sha256")
_MEDIA_COLUMNS = ("media", "data", *_URI_COLUMNS)
TEXT_COLUMNS = ("text", "query", "documents")
_COLUMNS = ("id", *_MEDIA_COLUMNS, "prompt", "messages", "tenant", *_SINGLE_MEDIA_COLUMNS, *TEXT_COLUMNS)
_JSON_IN_CSV = ("media", "images", "videos", "documents")
_MODALITIES: tuple[str, ...] = get_args(Modality)
_MODALITY_BY_SUFFIX: dict[str, Modality] = {
    **dict.fromkeys(IMAGE_SUFFIXES.split(), "image"),
    **dict.fromkeys(VIDEO_SUFFIXES.split(), "video"),
}

_MAX_PAGES = 2**31  # as the frozen listing holds them
_ROWS_PER_READ = 1024
_ROWS_PER_READ_INLINE = 32  # rows with inline bytes are megabytes each
_ROW_GROUP_BYTES = 32 * 2**20  # inline bytes held before a row group is written; not tuned
_COPY_THREADS = 8
_SPILL_BUCKETS = 64
_SPILL_RECORD = struct.Struct("<16sqq")
_SPILL_DTYPE = np.dtype([("high", "<u8"), ("low", "<u8"), ("row", "<i8"), ("item_index", "<i8")])


def read_manifest(input: str, *, limit: int | None, texts: Sequence[str] = ()) -> Iterator[Request]:
    """The rows of `input` in order, streamed; at most `limit`. `texts` are those of `TEXT_COLUMNS` that are read.

    `input` is a manifest file, or a folder, prefix or glob of media files (sorted by path, the relative path is the
    id; names that start with "." and manifest files are left out). Ids are not compared here: freezing does.
    Raises `ConfigError` at the call when `input` cannot be read from, `ManifestError` naming file, row and column.
    """
    return _without_rows(_numbered_requests(input, limit, texts))


def _without_rows(numbered: Generator[tuple[int, Request]]) -> Iterator[Request]:
    with closing(numbered):
        for _, request in numbered:
            yield request


def check_input(input: str) -> None:
    """Raise `ConfigError` when `input` is not there or storage refuses it, and read no row of it."""
    source = _locate(input)
    if source.format is None and _kind(source) is None and not _is_glob(source.path):
        raise ManifestError(f"{input}: no such file or folder, or nothing in it")


def freeze_manifest(
    input: str,
    folder: Folder,
    *,
    limit: int | None,
    texts: Sequence[str] = (),
    expand_pages: bool = False,
    rows_per_file: int = 4096,
) -> FrozenManifest:
    """Write the listing under `folder`, its index last; a listing already frozen there is only read.

    `expand_pages`: with a row for each page of a PDF, as `page_requests` makes them; `limit` counts those. Raises what
    `read_manifest` and `page_requests` raise, and `ManifestError` for an id that occurs twice.
    """
    if folder.exists(FROZEN_INDEX):
        return read_frozen(folder)
    digest, counts = hashlib.sha256(), Counter[str]()
    files: list[str] = []
    with _IdSpill() as ids:
        with closing(_listed_requests(input, limit, texts, expand_pages)) as numbered:
            requests = _observed(numbered, ids, digest, counts)
            for first in requests:
                files.append(f"{FROZEN_PARTS}/part-{len(files):05d}.parquet")
                with folder.writing(files[-1]) as file:
                    _write_rows(file, itertools.chain([first], itertools.islice(requests, rows_per_file - 1)))
        duplicate = ids.first_duplicate()
    if duplicate is not None:
        id_ = _id_at(folder, files, duplicate.item_index, rows_per_file)
        raise ManifestError(
            f"{input}: rows {duplicate.row} and {duplicate.repeated_row}, column 'id': duplicate id {_show(id_)}; "
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
    texts: Sequence[str] = (),
    expand_pages: bool = False,
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
            texts=texts,
            expand_pages=expand_pages,
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
    return [_frozen_request(row) for row in rows]


# ---- where the rows come from


def _listed_requests(
    input: str, limit: int | None, texts: Sequence[str], expand_pages: bool
) -> Generator[tuple[int, Request]]:
    numbered = _numbered_requests(input, limit, texts)
    return page_requests(numbered, limit=limit) if expand_pages else numbered


def _numbered_requests(input: str, limit: int | None, texts: Sequence[str]) -> Generator[tuple[int, Request]]:
    source = _locate(input)
    if source.format is None:
        rows = _list_media(source)
    else:
        rows = {".parquet": _parquet_rows, ".csv": _csv_rows}.get(source.format, _json_rows)(source)
    return _parse(source, rows, limit, texts)


def _parse(
    source: _Source, rows: Generator[tuple[int, Mapping[str, Any]]], limit: int | None, texts: Sequence[str]
) -> Generator[tuple[int, Request]]:
    item_index = -1
    # Closed here, with the file that it reads, whatever ends the reading: a limit, a wrong row, a caller that stops.
    with closing(rows):
        for item_index, (row, values) in enumerate(itertools.islice(rows, limit)):
            yield row, _request(values, item_index, _Place(file=source.input, row=row, base=source.base), texts)
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
    for row, (name, path) in enumerate(media, start=1):
        yield row, {"id": name, "uri": source.url(path)}


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
            _check_columns(tuple(names), _Place(file=source.input, row=1, base=source.base))
            columns = [name for name in names if name in _COLUMNS]
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
            place = _Place(file=source.input, row=row, base=source.base)
            try:
                values = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise place.refuse(None, f"not valid JSON: {error}; each line is one object") from error
            if not isinstance(values, dict):
                raise place.refuse(None, f"expected a JSON object, got {_show(values)}")
            _check_columns(tuple(values), place)
            yield row, values


def _csv_rows(source: _Source) -> Generator[tuple[int, Mapping[str, Any]]]:
    """Row 1 is the one after the header. An empty field is null; lists are JSON."""
    row = 0
    with source.open() as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as text:
        reader = csv.reader(text, strict=True)
        try:
            header = next(reader, [])
            _check_columns(tuple(header), _Place(file=source.input, row=1, base=source.base))
            for row, fields in enumerate((fields for fields in reader if fields), start=1):
                place = _Place(file=source.input, row=row, base=source.base)
                if len(fields) != len(header):
                    raise place.refuse(
                        None, f"{len(fields)} fields under {len(header)} columns; quote commas in values"
                    )
                yield row, {name: _csv_value(name, field, place) for name, field in zip(header, fields, strict=True)}
        except (csv.Error, UnicodeDecodeError) as error:
            raise ManifestError(f"{source.input}: row {row + 1}: not valid UTF-8 CSV: {error}") from error


def _csv_value(name: str, field: str, place: _Place) -> Any:
    if not field:
        return None
    if name in _JSON_IN_CSV and field.lstrip().startswith("["):
        return _parsed_json(field, name, place)
    return field


def _check_columns(names: tuple[str, ...], place: _Place) -> None:
    """Raise for a missing `id`, and for what looks like a misspelt column when no media column is there."""
    refused = _wrong_column(names)
    if refused is not None:
        raise place.refuse(*refused)


@functools.lru_cache(maxsize=1024)
def _wrong_column(names: tuple[str, ...]) -> tuple[str, str] | None:
    if "id" not in names:
        return "id", f"missing; every row needs an id, the columns are {_show(list(names))}"
    if any(name in names for name in _MEDIA_COLUMNS):
        return None
    for name in names:
        meant = None if name in _COLUMNS else _near_miss(name, names)
        if meant:
            return name, (
                f"unknown, and there is no media column; did you mean {meant!r}? "
                "(For text-only rows rename it, or add an empty 'media' column.)"
            )
    return None


def _near_miss(name: str, names: tuple[str, ...]) -> str | None:
    lowered = name.lower()
    for word in re.split(r"[^a-z0-9]+", lowered):
        if word in ("image", "images", "video", "videos", "uri", "media"):
            return word
        if word in ("url", "urls"):
            return "uri"
    # `data` is left out: ordinary columns such as `date` are closer to it than typing errors are.
    candidates = [column for column in _COLUMNS if column not in names and column != "data"]
    swapped = [column for column in candidates if sorted(column) == sorted(lowered)]
    close = swapped or difflib.get_close_matches(lowered, candidates, n=1, cutoff=0.7)
    return close[0] if close else None


# ---- one row


def _request(values: Mapping[str, Any], item_index: int, place: _Place, texts: Sequence[str] = ()) -> Request:
    prompt = _text(values.get("prompt"), "prompt", place)
    messages = _messages(values.get("messages"), place)
    if prompt is not None and messages is not None:
        raise place.refuse("messages", "both 'prompt' and 'messages' are given; keep one")
    return Request(
        item_index=item_index,
        id=_id(values.get("id"), place),
        media=_media(values, place),
        prompt=prompt,
        messages=messages,
        tenant=_text(values.get("tenant"), "tenant", place) or "",
        **{column: _TEXT_READERS[column](values.get(column), column, place) for column in texts},
    )


def _id(value: Any, place: _Place) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if value is None or value == "":
        raise place.refuse("id", f"{'null' if value is None else 'empty'}; every row needs an id")
    if not isinstance(value, str):
        raise place.refuse("id", f"expected a string or an integer, got {_show(value)}")
    return _text(value, "id", place) or ""


def _text(value: Any, column: str, place: _Place) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise place.refuse(column, f"expected a string, got {_show(value)}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise place.refuse(
                column, f"not valid Unicode: {_show(value)}; write it (or rename it) as UTF-8"
            ) from error
    return value


def _texts(value: Any, column: str, place: _Place) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise place.refuse(column, f"expected a list of strings, got {_show(value)}")
    return tuple(_text(text, column, place) or "" for text in value)


_TEXT_READERS: dict[str, Callable[[Any, str, _Place], Any]] = {"text": _text, "query": _text, "documents": _texts}


def _media(values: Mapping[str, Any], place: _Place) -> tuple[MediaItem, ...]:
    entries = _listed_media(values, place) if values.get("media") is not None else _media_by_column(values, place)
    for column in _SINGLE_MEDIA_COLUMNS:
        value = values.get(column)
        if value is None:
            continue
        if len(entries) != 1:
            raise place.refuse(
                column, f"describes one media item and the row has {len(entries)}; put it in the entries of 'media'"
            )
        if entries[0][1].get(column) not in (None, value):
            raise place.refuse(column, f"{_show(value)} contradicts {_show(entries[0][1][column])} of the media entry")
        entries[0][1][column] = value
    return tuple(_media_item(column, entry, place) for column, entry in entries)


def _listed_media(values: Mapping[str, Any], place: _Place) -> list[tuple[str, dict[str, Any]]]:
    others = [column for column in ("data", *_URI_COLUMNS) if values.get(column) is not None]
    if others:
        raise place.refuse("media", f"given together with {others}; media is either listed in 'media' or in columns")
    if not isinstance(values["media"], list):
        raise place.refuse("media", f"expected a list, got {_show(values['media'])}; a single uri goes in 'uri'")
    entries: list[tuple[str, dict[str, Any]]] = []
    for number, entry in enumerate(values["media"]):
        column = f"media[{number}]"
        if isinstance(entry, str):
            entries.append((column, {"uri": entry}))
        elif isinstance(entry, dict):
            entries.append((column, dict(entry)))
        else:
            raise place.refuse(column, f"expected a uri or an object with 'uri' or 'data', got {_show(entry)}")
    return entries


def _media_by_column(values: Mapping[str, Any], place: _Place) -> list[tuple[str, dict[str, Any]]]:
    entries: list[tuple[str, dict[str, Any]]] = []
    data = values.get("data")
    if data is not None:
        if not isinstance(data, bytes):
            raise place.refuse(
                "data", f"expected bytes (Parquet only), got {_show(data)}; in JSON write media: [{{data: BASE64}}]"
            )
        entries.append(("data", {"data": data}))
    for column, modality in _URI_COLUMNS.items():
        uris = values.get(column)
        if uris is None:
            continue
        if not isinstance(uris, str | list):
            raise place.refuse(column, f"expected a uri or a list of uris, got {_show(uris)}")
        for uri in [uris] if isinstance(uris, str) else uris:
            if not isinstance(uri, str):
                raise place.refuse(column, f"expected a uri, got {_show(uri)}")
            entries.append((column, {"uri": uri, "modality": modality}))
    return entries


def _media_item(column: str, entry: Mapping[str, Any], place: _Place) -> MediaItem:
    uri, data = _text(entry.get("uri"), column, place), entry.get("data")
    if (uri is None) == (data is None):
        given = "neither" if uri is None else "both"
        raise place.refuse(column, f"a media entry has either 'uri' or 'data', got {given}: {_show(dict(entry))}")
    modality = _text(entry.get("modality"), column, place)
    if modality is not None and modality not in _MODALITIES:
        raise place.refuse(
            column, f"unknown modality {_show(modality)}; use {' or '.join(_MODALITIES)}, or leave it out"
        )
    sha256 = _text(entry.get("sha256"), column, place)
    if sha256 is not None and not re.fullmatch(r"[0-9a-fA-F]{64}", sha256):
        raise place.refuse(column, f"sha256 is 64 hex digits, got {_show(sha256)}")
    page = _page(entry, modality, column, place)
    return MediaItem(
        uri=None if uri is None else _absolute(uri, column, place),
        data=None if data is None else _inline(data, column, place),
        modality=("page" if page is not None else modality) or _guess_modality(uri),  # type: ignore[arg-type]
        version=_text(entry.get("version"), column, place),
        sha256=None if sha256 is None else sha256.lower(),
        page=page,
    )


def _page(entry: Mapping[str, Any], modality: str | None, column: str, place: _Place) -> int | None:
    page: int | None = entry.get("page")
    is_index = isinstance(page, int) and not isinstance(page, bool) and 0 <= page < _MAX_PAGES
    if page is None or (is_index and modality in (None, "page")):
        return page
    raise place.refuse(column, f"page counts from 0 and is of modality 'page', got {_show(page)} of {_show(modality)}")


def _absolute(uri: str, column: str, place: _Place) -> str:
    if "://" in uri or uri.startswith("/"):
        return uri
    if not uri or uri.startswith("data:"):
        raise place.refuse(column, f"not a uri: {_show(uri)}; inline bytes go in 'data'")
    if "./" not in uri:
        return f"{place.base}/{uri}"
    scheme, separator, folder = place.base.rpartition("://")
    return f"{scheme}{separator}{posixpath.normpath(f'{folder}/{uri}')}"


def _inline(data: Any, column: str, place: _Place) -> bytes:
    if isinstance(data, bytes):
        return data
    if not isinstance(data, str):
        raise place.refuse(column, f"data is bytes or a base64 string, got {_show(data)}")
    try:
        return base64.b64decode(data, validate=True)
    except ValueError as error:
        raise place.refuse(column, f"data is not valid base64 ({error}): {_show(data)}") from error


def _guess_modality(uri: str | None) -> Modality | None:
    if uri is None:
        return None
    if uri.startswith(("http://", "https://")):
        uri = re.split(r"[?#]", uri, maxsplit=1)[0]
    return _MODALITY_BY_SUFFIX.get(uri.rpartition(".")[2].lower())


def _messages(value: Any, place: _Place) -> tuple[dict[str, Any], ...] | None:
    if value is None:
        return None
    if isinstance(value, str):
        value = _parsed_json(value, "messages", place)
    if not isinstance(value, list) or not value:
        raise place.refuse("messages", f"expected a list of {{role, content}}, got {_show(value)}")
    return tuple(_message(message, number, place) for number, message in enumerate(value))


def _message(message: Any, number: int, place: _Place) -> dict[str, Any]:
    column = f"messages[{number}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise place.refuse(column, f"expected {{role, content}}, got {_show(message)}")
    try:
        json.dumps(message, ensure_ascii=False).encode()
    except (TypeError, UnicodeEncodeError) as error:
        raise place.refuse(column, f"cannot be written as JSON ({error}): {_show(message)}") from error
    content = message.get("content")
    if isinstance(content, str):
        return message
    parts: list[Any] = content if isinstance(content, list) else [None]
    if not all(isinstance(part, dict) and isinstance(part.get("type"), str) for part in parts):
        raise place.refuse(column, f"content is a string or a list of parts with a 'type', got {_show(content)}")
    # Parquet gives every part all fields of the struct: {"type": "image", "text": None} is {"type": "image"}.
    return {**message, "content": [{key: v for key, v in part.items() if v is not None} for part in parts]}


def _parsed_json(text: str, column: str, place: _Place) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise place.refuse(column, f"not valid JSON ({error}): {_show(text)}") from error


def _show(value: Any) -> str:
    text = repr(value[:100] if isinstance(value, str | bytes) else value)
    return text if len(text) <= 120 else f"{text[:117]}..."


# ---- frozen files


def _observed(
    numbered: Iterable[tuple[int, Request]], ids: _IdSpill, digest: hashlib._Hash, counts: Counter[str]
) -> Iterator[dict[str, Any]]:
    """The rows to write, each counted, hashed and its id put down on the way."""
    for row, request in numbered:
        ids.add(request.id, row)
        counts["texts"] += request.text is not None
        frozen = _frozen_row(request)
        digest.update(_canonical(frozen))
        yield frozen


def _frozen_row(request: Request) -> dict[str, Any]:
    return {
        "item_index": request.item_index,
        "id": request.id,
        "media": [
            {
                "uri": item.uri,
                "data": item.data,
                "modality": item.modality,
                "version": item.version,
                "sha256": item.sha256,
                "page": item.page,
            }
            for item in request.media
        ],
        "prompt": request.prompt,
        "messages": None if request.messages is None else json.dumps(request.messages, sort_keys=True),
        "tenant": request.tenant,
        "text": request.text,
        "query": request.query,
        "documents": None if request.documents is None else list(request.documents),
    }


def _canonical(row: Mapping[str, Any]) -> bytes:
    """What the digest covers: the same for every format and file layout a row can come in."""
    media = [
        {**item, "data": None if item["data"] is None else hashlib.sha256(item["data"]).hexdigest()}
        for item in row["media"]
    ]
    for item in media:
        if item["page"] is None:  # as texts: listings without them keep the digests that they had
            del item["page"]
    given = {name: value for name, value in row.items() if name not in TEXT_COLUMNS or value is not None}
    return json.dumps({**given, "media": media}, sort_keys=True, separators=(",", ":")).encode() + b"\n"


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


def _frozen_request(row: Mapping[str, Any]) -> Request:
    messages = row["messages"]
    return Request(
        item_index=row["item_index"],
        id=row["id"],
        media=tuple(MediaItem(**item) for item in row["media"]),
        prompt=row["prompt"],
        messages=None if messages is None else tuple(json.loads(messages)),
        tenant=row["tenant"],
        text=row.get("text"),
        query=row.get("query"),
        documents=None if row.get("documents") is None else tuple(row["documents"]),
    )


def _id_at(folder: Folder, files: list[str], item_index: int, rows_per_file: int) -> str:
    part, row = divmod(item_index, rows_per_file)
    return next(_read_rows(folder, files[part], row, row + 1))["id"]  # type: ignore[no-any-return]


def _copy(source: Folder, target: Folder, name: str) -> None:
    with source.open(name) as reader, target.writing(name) as writer:
        shutil.copyfileobj(reader, writer)


# ---- values


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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Where in the manifest a value stands."""

    file: str
    row: int
    base: str

    def refuse(self, column: str | None, problem: str) -> ManifestError:
        """The error that names file, row and column."""
        where = f"row {self.row}" if column is None else f"row {self.row}, column {column!r}"
        return ManifestError(f"{self.file}: {where}: {problem}")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Duplicate:
    row: int
    repeated_row: int
    item_index: int


class _IdSpill:
    """Finds repeated ids in bounded memory: 16-byte digests on disk in 64 buckets, compared bucket by bucket."""

    def __init__(self) -> None:
        self.count = 0
        self._stack = ExitStack()
        self._files: list[IO[bytes]] = []

    def __enter__(self) -> _IdSpill:
        directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-ids-")))
        for bucket in range(_SPILL_BUCKETS):
            self._files.append(self._stack.enter_context(open(directory / str(bucket), "w+b", buffering=2**16)))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(self, id_: str, row: int) -> None:
        """Put down the id of the next item."""
        digest = hashlib.blake2b(id_.encode(), digest_size=16).digest()
        self._files[digest[0] % _SPILL_BUCKETS].write(_SPILL_RECORD.pack(digest, row, self.count))
        self.count += 1

    def first_duplicate(self) -> _Duplicate | None:
        """The repetition that a reader of the manifest meets first."""
        found = [duplicate for duplicate in map(_duplicate_in, self._files) if duplicate is not None]
        return min(found, key=lambda duplicate: duplicate.repeated_row, default=None)


def _duplicate_in(file: IO[bytes]) -> _Duplicate | None:
    file.seek(0)
    records = np.frombuffer(file.read(), dtype=_SPILL_DTYPE)
    records = records[np.lexsort((records["row"], records["low"], records["high"]))]
    same = (records["high"][1:] == records["high"][:-1]) & (records["low"][1:] == records["low"][:-1])
    repeats = np.flatnonzero(same)
    if not repeats.size:
        return None
    first = repeats[np.argmin(records["row"][repeats + 1])]
    return _Duplicate(
        row=int(records["row"][first]),
        repeated_row=int(records["row"][first + 1]),
        item_index=int(records["item_index"][first + 1]),
    )
