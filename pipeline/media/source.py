"""Objects in storage: what identifies them, and their bytes, whole or by range."""

from __future__ import annotations

import functools
import hashlib
import importlib
import io
import os
import random
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar, cast

import fsspec

from pipeline.errors import ConfigError, ItemError, TransientError
from pipeline.schema import MediaItem

SCHEMES = ("file", "s3", "gs", "memory")

_ATTEMPTS = 5
_BASE_SECONDS = 0.2
_CAP_SECONDS = 5.0

# Range reads: a header usually costs one or two blocks; 32 of them bound the cache to 16 MB. Not tuned against a store.
_BLOCK_BYTES = 512 * 1024
_MAX_BLOCKS = 32

_BAD_CREDENTIALS = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "TokenRetrievalError",
    "UnauthorizedSSOTokenError",
    "DefaultCredentialsError",
    "RefreshError",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "ExpiredToken",
    "InvalidToken",
}
_THROTTLED = {
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "RequestLimitExceeded",
    "TooManyRequests",
    "RequestTimeout",
}
_CUT_OFF = {
    "EndpointConnectionError",
    "ConnectionClosedError",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "ResponseStreamingError",
    "IncompleteReadError",
    "ClientConnectionError",
    "ClientPayloadError",
    "ServerDisconnectedError",
}
# What the clients of object stores raise besides OSError; imported with the scheme, for it takes a quarter of a second.
_CLIENT_ERRORS = {
    "s3": ("botocore.exceptions:BotoCoreError", "botocore.exceptions:ClientError", "aiohttp:ClientError"),
    "gs": ("gcsfs.retry:HttpError", "google.auth.exceptions:GoogleAuthError", "aiohttp:ClientError"),
}
_STAMPS = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFacts:
    """What identifies an object without reading it, and its size."""

    source_id: str
    num_bytes: int


@dataclass(slots=True)
class FetchCounter:
    """Mutable: objects opened in storage, and bytes that came from them."""

    fetches: int = 0
    bytes_fetched: int = 0


def stat_source(item: MediaItem) -> SourceFacts:
    """Size and source id; costs one metadata request, and no content.

    The id is the first there is of: the caller's `sha256` or `version`, the hash of inline bytes, ETag and size, size
    and modification time. Raises `ItemError` (stage `fetch`): `scheme_refused`, `not_found`, `access_denied`,
    `not_a_file`, `empty_file`; `TransientError` after `retrying`; `ConfigError` for credentials that are not valid.
    """
    if item.data is not None:
        return SourceFacts(
            source_id=_given_id(item) or _sha256_id(item.data), num_bytes=_not_empty(item, len(item.data))
        )
    place = _locate(item)
    num_bytes, found_id = _reach(lambda: _look(place), place)
    return SourceFacts(source_id=_given_id(item) or found_id, num_bytes=_not_empty(item, num_bytes))


def read_source(item: MediaItem, counter: FetchCounter) -> bytes:
    """The whole object. Raises as `stat_source` does."""
    if item.data is not None:
        return item.data
    place = _locate(item)
    counter.fetches += 1
    data = _reach(lambda: bytes(_regular(place).fs.cat_file(place.path)), place)
    counter.bytes_fetched += len(data)
    _not_empty(item, len(data))
    return data


def open_source(item: MediaItem, counter: FetchCounter) -> BinaryIO:
    """The object as a seekable file that fetches ranges as they are read. Raises as `stat_source`, reads included.
    An empty object opens.

    `counter` gets the bytes that callers read; a remote block is fetched whole, so the wire may carry more.
    """
    if item.data is not None:
        return io.BytesIO(item.data)
    place = _locate(item)
    counter.fetches += 1
    file = _reach(lambda: _open(place), place)
    return cast(BinaryIO, _RangeFile(file, place, counter))


def retrying(fetch: Callable[[], Result], place: Place, *, sleep: Callable[[float], None] = time.sleep) -> Result:
    """`fetch()`, tried up to 5 times with exponential back-off and full jitter (at most 0.2, 0.4, 0.8, 1.6 s).

    Only what may pass is tried again; the last failure becomes `TransientError`. Every other error of storage comes out
    as what it means (`ItemError`, `ConfigError`), and one that means nothing known as itself.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return fetch()
        except _failures(place.scheme) as error:
            verdict = _judge(error, place)
            if not isinstance(verdict, TransientError) or attempt == _ATTEMPTS:
                raise verdict from error
        sleep(random.uniform(0, min(_CAP_SECONDS, _BASE_SECONDS * 2 ** (attempt - 1))))
    raise AssertionError("unreachable: the last attempt returns or raises")


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where an object lies: its URI for messages, and a path on a file system."""

    uri: str
    scheme: str
    fs: Any
    path: str


class _RangeFile(io.RawIOBase):
    """A seekable file whose reads are counted and retried."""

    def __init__(self, file: Any, place: Place, counter: FetchCounter) -> None:
        super().__init__()
        self._file = file
        self._place = place
        self._counter = counter

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return int(self._file.tell())

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._file.seek(offset, whence))

    def read(self, size: int | None = -1) -> bytes:
        start = self._file.tell()
        data = retrying(lambda: self._read_at(start, -1 if size is None else size), self._place)
        self._counter.bytes_fetched += len(data)
        return data

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()

    def _read_at(self, start: int, size: int) -> bytes:
        self._file.seek(start)
        return bytes(self._file.read(size))


def _given_id(item: MediaItem) -> str | None:
    if item.sha256:
        return f"sha256:{item.sha256}"
    return f"version:{item.uri or ''}:{item.version}" if item.version else None


def _sha256_id(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _not_empty(item: MediaItem, num_bytes: int) -> int:
    if num_bytes == 0:
        raise ItemError("fetch", "empty_file", f"{item.name}: 0 bytes")
    return num_bytes


def _locate(item: MediaItem) -> Place:
    uri = item.uri or ""
    scheme = _scheme(uri)
    if scheme not in SCHEMES:
        raise ItemError(
            "fetch", "scheme_refused", f"{uri[:200]}: media is read from {', '.join(SCHEMES)} only, not {scheme!r}"
        )
    fs = _file_system(scheme)
    return Place(uri=uri, scheme=scheme, fs=fs, path=fs._strip_protocol(uri))


def _scheme(uri: str) -> str:
    if uri.startswith("data:"):
        return "data"
    scheme = uri.partition("://")[0].lower() if "://" in uri else "file"
    return {"gcs": "gs"}.get(scheme, scheme)


def _file_system(scheme: str) -> Any:
    # Not url_to_fs: it follows "::" chains, with which an s3:// URI can name a local file. No listing cache: an ETag
    # seen while the folder was listed may be an old one.
    try:
        return fsspec.filesystem(scheme, use_listings_cache=False)
    except ImportError as error:
        raise ConfigError(f"{scheme}:// needs a package that is not installed: {error}") from error


def _reach(fetch: Callable[[], Result], place: Place) -> Result:
    return retrying(lambda: _with_reason(fetch, place), place)


def _with_reason(fetch: Callable[[], Result], place: Place) -> Result:
    try:
        return fetch()
    except PermissionError:
        # The answer to a HEAD request has no body: only a read tells wrong credentials from a denied object.
        if place.scheme != "file":
            place.fs.cat_file(place.path, start=0, end=1)
        raise


def _look(place: Place) -> tuple[int, str]:
    """(bytes, source id) from metadata."""
    if place.scheme == "file":
        facts = os.stat(_regular(place).path)
        return facts.st_size, f"file:{place.path}:{facts.st_size}:{facts.st_mtime_ns}"
    info = place.fs.info(place.path)
    if info["type"] != "file":
        raise IsADirectoryError(place.uri)
    size = int(info["size"])
    etag = info.get("ETag") or info.get("etag")
    if etag:
        return size, f"etag:{place.uri}:{str(etag).strip(chr(34))}:{size}"
    stamp = next((info[name] for name in _STAMPS if info.get(name)), "")
    return size, f"object:{place.uri}:{size}:{stamp}"


def _regular(place: Place) -> Place:
    """`place`; raises IsADirectoryError for a local directory, pipe or device, which would be read for ever."""
    if place.scheme == "file" and not stat.S_ISREG(os.stat(place.path).st_mode):
        raise IsADirectoryError(place.uri)
    return place


def _open(place: Place) -> Any:
    if place.scheme == "file":
        return open(_regular(place).path, "rb")
    cache = (
        {"cache_type": "blockcache", "cache_options": {"maxblocks": _MAX_BLOCKS}} if place.scheme != "memory" else {}
    )
    file = place.fs.open(place.path, "rb", block_size=_BLOCK_BYTES, **cache)
    if getattr(file, "details", {}).get("type") == "directory":  # s3fs opens a prefix as an empty file
        file.close()
        raise IsADirectoryError(place.uri)
    return file


@functools.cache
def _failures(scheme: str) -> tuple[type[Exception], ...]:
    """Every error class with which a read from `scheme` can fail for reasons outside this program."""
    named = (name.split(":") for name in _CLIENT_ERRORS.get(scheme, ()))
    return (OSError, *(getattr(importlib.import_module(module), name) for module, name in named))


def _judge(error: Exception, place: Place) -> Exception:
    """What a storage error means for the item and the run; the error itself when it means nothing known."""
    causes = list(_causes(error))
    codes = {code for cause in causes for code in _service_codes(cause)}
    names = {type(cause).__name__ for cause in causes} | codes
    what = f"{place.uri}: {type(causes[-1]).__name__}: {causes[-1]}"
    if names & _BAD_CREDENTIALS:
        return ConfigError(f"the credentials for {place.scheme}:// are not valid; {what}")
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return ItemError("fetch", "not_found", f"{place.uri}: no such object")
    if isinstance(error, IsADirectoryError):
        return ItemError("fetch", "not_a_file", f"{place.uri}: a directory, or no regular file")
    if isinstance(error, PermissionError):
        return ItemError("fetch", "access_denied", what)
    if codes & _THROTTLED or any(code == "429" or (len(code) == 3 and code[0] == "5") for code in codes):
        return TransientError(what)
    if any(isinstance(cause, ConnectionError | TimeoutError) for cause in causes) or names & _CUT_OFF:
        return TransientError(what)
    return error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _service_codes(error: BaseException) -> Iterator[str]:
    """Error codes in the answer of S3 (botocore's `response`) and of Google (`code` or `status`)."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        yield str(response.get("Error", {}).get("Code", ""))
        yield str(response.get("ResponseMetadata", {}).get("HTTPStatusCode", ""))
    for name in ("code", "status"):
        yield str(getattr(error, name, ""))
