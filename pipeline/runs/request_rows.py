"""One row of a manifest, checked and made a request.

Columns: `id` (required), then media as `media` (a list of uris or of `{uri | data, modality, version, sha256, page,
start_seconds, stop_seconds}`) or as `uri`, `data`, `image(s)`, `video(s)`, `audio(s)`; optional `prompt` or `messages`,
`tenant`, and for rows with one media item `modality`, `version`, `sha256`. Jobs that embed or score read `text`, jobs
that rank `query` and `documents`. Other columns are ignored.
"""

from __future__ import annotations

import base64
import difflib
import functools
import json
import math
import posixpath
import re
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pipeline.errors import ManifestError
from pipeline.media.archive_index import split_member
from pipeline.schema import MediaItem, Modality, Request

IMAGE_SUFFIXES = "jpg jpeg jpe jfif png gif webp bmp dib tif tiff avif heic heif jp2 ppm pgm pbm pnm tga ico"
VIDEO_SUFFIXES = "mp4 m4v mov mkv webm avi mpg mpeg mpe m1v m2v ts m2ts mts wmv asf flv f4v 3gp 3g2 ogv mxf vob"
# Of what may as well hold pictures, such as ogg, the content decides.
AUDIO_SUFFIXES = "wav wave mp3 mp2 mpga flac oga opus m4a m4b aac aif aiff aifc caf au snd wv tta amr mka weba wma"
# The column says what its uris are, and the order of the columns is the order of a row's media.
_URI_COLUMNS: dict[str, Modality | None] = {
    "uri": None,
    "image": "image",
    "images": "image",
    "video": "video",
    "videos": "video",
    "audio": "audio",
    "audios": "audio",
}
_SINGLE_MEDIA_COLUMNS = ("modality", "version", "sha256")
_DATA = "data:"  # of a uri that brings its bytes, in any case of letters
_MEDIA_COLUMNS = ("media", "data", *_URI_COLUMNS)
TEXT_COLUMNS = ("text", "query", "documents")
COLUMNS = ("id", *_MEDIA_COLUMNS, "prompt", "messages", "tenant", *_SINGLE_MEDIA_COLUMNS, *TEXT_COLUMNS)
_MODALITIES: tuple[str, ...] = get_args(Modality)
_MODALITY_BY_SUFFIX: dict[str, Modality] = {
    **dict.fromkeys(IMAGE_SUFFIXES.split(), "image"),
    **dict.fromkeys(VIDEO_SUFFIXES.split(), "video"),
    **dict.fromkeys(AUDIO_SUFFIXES.split(), "audio"),
}
_MAX_PAGES = 2**31  # as the frozen listing holds them


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where in the manifest a value stands."""

    file: str
    row: int
    base: str

    def refuse(self, column: str | None, problem: str) -> ManifestError:
        """The error that names file, row and column."""
        where = f"row {self.row}" if column is None else f"row {self.row}, column {column!r}"
        return ManifestError(f"{self.file}: {where}: {problem}")


def check_columns(names: tuple[str, ...], place: Place) -> None:
    """Raise for a missing `id`, and for what looks like a misspelt column when no media column is there."""
    refused = _wrong_column(names)
    if refused is not None:
        raise place.refuse(*refused)


@functools.lru_cache(maxsize=1024)
def _wrong_column(names: tuple[str, ...]) -> tuple[str, str] | None:
    if "id" not in names:
        return "id", f"missing; every row needs an id, the columns are {show(list(names))}"
    if any(name in names for name in _MEDIA_COLUMNS):
        return None
    for name in names:
        meant = None if name in COLUMNS else _near_miss(name, names)
        if meant:
            return name, (
                f"unknown, and there is no media column; did you mean {meant!r}? "
                "(For text-only rows rename it, or add an empty 'media' column.)"
            )
    return None


def _near_miss(name: str, names: tuple[str, ...]) -> str | None:
    lowered = name.lower()
    for word in re.split(r"[^a-z0-9]+", lowered):
        if word in ("image", "images", "video", "videos", "audio", "audios", "uri", "media"):
            return word
        if word in ("url", "urls"):
            return "uri"
    # `data` is left out: ordinary columns such as `date` are closer to it than typing errors are.
    candidates = [column for column in COLUMNS if column not in names and column != "data"]
    swapped = [column for column in candidates if sorted(column) == sorted(lowered)]
    close = swapped or difflib.get_close_matches(lowered, candidates, n=1, cutoff=0.7)
    return close[0] if close else None


def request_from_row(values: Mapping[str, Any], item_index: int, place: Place, texts: Sequence[str] = ()) -> Request:
    """What a row's columns ask for; `texts` are those of `TEXT_COLUMNS` that are read.

    Raises `ManifestError` naming file, row and column.
    """
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


def _id(value: Any, place: Place) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if value is None or value == "":
        raise place.refuse("id", f"{'null' if value is None else 'empty'}; every row needs an id")
    if not isinstance(value, str):
        raise place.refuse("id", f"expected a string or an integer, got {show(value)}")
    return _text(value, "id", place) or ""


def _text(value: Any, column: str, place: Place) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise place.refuse(column, f"expected a string, got {show(value)}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise place.refuse(column, f"not valid Unicode: {show(value)}; write it (or rename it) as UTF-8") from error
    return value


def _texts(value: Any, column: str, place: Place) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise place.refuse(column, f"expected a list of strings, got {show(value)}")
    return tuple(_text(text, column, place) or "" for text in value)


_TEXT_READERS: dict[str, Callable[[Any, str, Place], Any]] = {"text": _text, "query": _text, "documents": _texts}


def _media(values: Mapping[str, Any], place: Place) -> tuple[MediaItem, ...]:
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
            raise place.refuse(column, f"{show(value)} contradicts {show(entries[0][1][column])} of the media entry")
        entries[0][1][column] = value
    return tuple(_media_item(column, entry, place) for column, entry in entries)


def _listed_media(values: Mapping[str, Any], place: Place) -> list[tuple[str, dict[str, Any]]]:
    others = [column for column in ("data", *_URI_COLUMNS) if values.get(column) is not None]
    if others:
        raise place.refuse("media", f"given together with {others}; media is either listed in 'media' or in columns")
    if not isinstance(values["media"], list):
        raise place.refuse("media", f"expected a list, got {show(values['media'])}; a single uri goes in 'uri'")
    entries: list[tuple[str, dict[str, Any]]] = []
    for number, entry in enumerate(values["media"]):
        column = f"media[{number}]"
        if isinstance(entry, str):
            entries.append((column, {"uri": entry}))
        elif isinstance(entry, dict):
            entries.append((column, dict(entry)))
        else:
            raise place.refuse(column, f"expected a uri or an object with 'uri' or 'data', got {show(entry)}")
    return entries


def _media_by_column(values: Mapping[str, Any], place: Place) -> list[tuple[str, dict[str, Any]]]:
    entries: list[tuple[str, dict[str, Any]]] = []
    data = values.get("data")
    if data is not None:
        if not isinstance(data, bytes):
            raise place.refuse(
                "data", f"expected bytes (Parquet only), got {show(data)}; in JSON write media: [{{data: BASE64}}]"
            )
        entries.append(("data", {"data": data}))
    for column, modality in _URI_COLUMNS.items():
        uris = values.get(column)
        if uris is None:
            continue
        if not isinstance(uris, str | list):
            raise place.refuse(column, f"expected a uri or a list of uris, got {show(uris)}")
        for uri in [uris] if isinstance(uris, str) else uris:
            if not isinstance(uri, str):
                raise place.refuse(column, f"expected a uri, got {show(uri)}")
            entries.append((column, {"uri": uri, "modality": modality}))
    return entries


def _media_item(column: str, entry: Mapping[str, Any], place: Place) -> MediaItem:
    uri, data = _text(entry.get("uri"), column, place), entry.get("data")
    if uri is not None and data is None and uri[: len(_DATA)].lower() == _DATA:
        data = _held(uri, column, place)
        uri = None
    if (uri is None) == (data is None):
        given = "neither" if uri is None else "both"
        raise place.refuse(column, f"a media entry has either 'uri' or 'data', got {given}: {show(dict(entry))}")
    modality = _text(entry.get("modality"), column, place)
    if modality is not None and modality not in _MODALITIES:
        raise place.refuse(
            column, f"unknown modality {show(modality)}; use {' or '.join(_MODALITIES)}, or leave it out"
        )
    sha256 = _text(entry.get("sha256"), column, place)
    if sha256 is not None and not re.fullmatch(r"[0-9a-fA-F]{64}", sha256):
        raise place.refuse(column, f"sha256 is 64 hex digits, got {show(sha256)}")
    page = _page(entry, modality, column, place)
    start, stop = _part(entry, modality, column, place)
    return MediaItem(
        uri=None if uri is None else _absolute(uri, column, place),
        data=None if data is None else _inline(data, column, place),
        modality=("page" if page is not None else modality) or _guess_modality(uri),  # type: ignore[arg-type]
        version=_text(entry.get("version"), column, place),
        sha256=None if sha256 is None else sha256.lower(),
        page=page,
        start_seconds=start,
        stop_seconds=stop,
    )


def _page(entry: Mapping[str, Any], modality: str | None, column: str, place: Place) -> int | None:
    page: int | None = entry.get("page")
    is_index = isinstance(page, int) and not isinstance(page, bool) and 0 <= page < _MAX_PAGES
    if page is None or (is_index and modality in (None, "page")):
        return page
    raise place.refuse(column, f"page counts from 0 and is of modality 'page', got {show(page)} of {show(modality)}")


def _part(
    entry: Mapping[str, Any], modality: str | None, column: str, place: Place
) -> tuple[float | None, float | None]:
    start, stop = (_seconds(entry.get(name), f"{column}.{name}", place) for name in ("start_seconds", "stop_seconds"))
    if start is None and stop is None:
        return None, None
    if modality in ("image", "page") or entry.get("page") is not None:
        raise place.refuse(column, f"start_seconds and stop_seconds are of videos and sounds, got {show(dict(entry))}")
    if stop is not None and stop <= (start or 0.0):
        raise place.refuse(column, f"a part stops behind its start, got start_seconds {start} and stop_seconds {stop}")
    return start, stop


def _seconds(value: Any, column: str, place: Place) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise place.refuse(column, f"expected seconds from the start of the file, got {show(value)}")
    return float(value)


def _absolute(uri: str, column: str, place: Place) -> str:
    if "://" in uri or uri.startswith("/"):
        return uri
    if not uri:
        raise place.refuse(column, f"not a uri: {show(uri)}; inline bytes go in 'data'")
    if "./" not in uri:
        return f"{place.base}/{uri}"
    file, member = split_member(uri) or (uri, None)
    scheme, separator, folder = place.base.rpartition("://")
    found = f"{scheme}{separator}{posixpath.normpath(f'{folder}/{file}')}"
    return found if member is None else f"{found}#{member}"


def _held(uri: str, column: str, place: Place) -> bytes:
    """What a `data:` URI holds (RFC 2397)."""
    kind, comma, body = uri[len(_DATA) :].partition(",")
    if not comma:
        raise place.refuse(column, f"a data: uri has a comma before its data, got {show(uri)}")
    data = urllib.parse.unquote_to_bytes(body)
    return _inline(data.decode("latin-1"), column, place) if kind.lower().endswith(";base64") else data


def _inline(data: Any, column: str, place: Place) -> bytes:
    if isinstance(data, bytes):
        return data
    if not isinstance(data, str):
        raise place.refuse(column, f"data is bytes or a base64 string, got {show(data)}")
    try:
        return base64.b64decode(data, validate=True)
    except ValueError as error:
        raise place.refuse(column, f"data is not valid base64 ({error}): {show(data)}") from error


def _guess_modality(uri: str | None) -> Modality | None:
    if uri is None:
        return None
    return _MODALITY_BY_SUFFIX.get(uri_path(uri).rpartition(".")[2].lower())


def is_media_name(name: str) -> bool:
    """True for an image, a video or a document by its suffix, and none that is hidden."""
    is_hidden = any(part.startswith(".") for part in name.split("/"))
    return not is_hidden and (_guess_modality(name) is not None or name.lower().endswith(".pdf"))


def uri_path(uri: str) -> str:
    """`uri` without the query and fragment that one of `http(s)://` has; in other uris these are part of a name.

    Of a member of an archive it is the member's name.
    """
    split = split_member(uri)
    if split is not None:
        return split[1]
    return re.split(r"[?#]", uri, maxsplit=1)[0] if uri.lower().startswith(("http://", "https://")) else uri


def _messages(value: Any, place: Place) -> tuple[dict[str, Any], ...] | None:
    if value is None:
        return None
    if isinstance(value, str):
        value = parsed_json(value, "messages", place)
    if not isinstance(value, list) or not value:
        raise place.refuse("messages", f"expected a list of {{role, content}}, got {show(value)}")
    return tuple(_message(message, number, place) for number, message in enumerate(value))


def _message(message: Any, number: int, place: Place) -> dict[str, Any]:
    column = f"messages[{number}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise place.refuse(column, f"expected {{role, content}}, got {show(message)}")
    try:
        json.dumps(message, ensure_ascii=False).encode()
    except (TypeError, UnicodeEncodeError) as error:
        raise place.refuse(column, f"cannot be written as JSON ({error}): {show(message)}") from error
    content = message.get("content")
    if isinstance(content, str):
        return message
    parts: list[Any] = content if isinstance(content, list) else [None]
    if not all(isinstance(part, dict) and isinstance(part.get("type"), str) for part in parts):
        raise place.refuse(column, f"content is a string or a list of parts with a 'type', got {show(content)}")
    # Parquet gives every part all fields of the struct: {"type": "image", "text": None} is {"type": "image"}.
    return {**message, "content": [{key: v for key, v in part.items() if v is not None} for part in parts]}


def parsed_json(text: str, column: str, place: Place) -> Any:
    """A column's value that is written as JSON. Raises `ManifestError` when it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise place.refuse(column, f"not valid JSON ({error}): {show(text)}") from error


def show(value: Any) -> str:
    """A value for messages, cut to what one line takes."""
    text = repr(value[:100] if isinstance(value, str | bytes) else value)
    return text if len(text) <= 120 else f"{text[:117]}..."
