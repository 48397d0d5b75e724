"""Objects in storage: what identifies them, and their bytes, whole or by range."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from pipeline.errors import ConfigError, ItemError, TransientError
from pipeline.media.archive import Archives, PartOfFile, content_offset
from pipeline.media.archive_index import member_bytes, split_member
from pipeline.media.source_id import SourceFacts, Strength, as_given, object_version
from pipeline.media.url_policy import URL_SCHEMES, SourcePolicy, is_within
from pipeline.retry import Fault, Result, RetryingFile, explain, judge, retry, with_reason
from pipeline.schema import MediaItem
from pipeline.storage import file_system

SCHEMES = ("file", "s3", "gs", "memory", *URL_SCHEMES)

# Range reads: a header usually costs one or two blocks. Not tuned against a store; nor are those of files read whole.
_BLOCK_BYTES = 512 * 1024
WHOLE_BLOCK_BYTES = 8 * 2**20
_CACHE_BYTES = 16 * 2**20

ANYWHERE = SourcePolicy()
"""The policy of those who have no configuration: any local path, and public https addresses."""


@dataclass(slots=True)
class FetchCounter:
    """Mutable: objects opened in storage, bytes that came from them, and attempts that had to be made again."""

    fetches: int = 0
    bytes_fetched: int = 0
    retries: int = 0

    def again(self) -> None:
        """One attempt more."""
        self.retries += 1


def stat_source(item: MediaItem, policy: SourcePolicy = ANYWHERE, counter: FetchCounter | None = None) -> SourceFacts:
    """Size and source id; costs one metadata request, and no content. `counter` gets repeated attempts.

    The id is the first there is of: the caller's `sha256`, the hash of inline bytes, the caller's `version`, what the
    storage says of the object (`object_version`), size and modification time; at a URL whose server says none of these,
    the hash, for which the object is read. Raises
    `ItemError` (stage `fetch`): `scheme_refused`, `path_refused`, `not_found`, `access_denied`, `not_a_file`,
    `empty_file`, at URLs those of `HttpFiles` and `unavailable`, of members of archives `corrupt_archive`,
    `member_refused`, `too_large`; `TransientError` after `retrying`; `ConfigError` for credentials that are not valid.
    """
    if item.data is not None:
        _not_empty(item, len(item.data))
        # Never the caller's version: of inline bytes there is no URI that it would be a version of.
        own_id = f"sha256:{item.sha256}" if item.sha256 else _sha256_id(item.data)
        return SourceFacts(source_id=own_id, strength="content", num_bytes=len(item.data))
    split = split_member(item.uri or "")
    if split is not None:
        archive, member = _archives.member(*split, policy)
        found_id = f"{archive.source_id}#{member.name}:{member.start}:{member.num_bytes}:{member.crc:08x}"
        # The hash of an archive, with a place in it, is none of the member's bytes, and says as much.
        strength: Strength = "weak" if archive.strength == "weak" else "strong"
        found = SourceFacts(source_id=found_id, strength=strength, num_bytes=member.num_bytes)
    else:
        found = _found(item.uri or "", policy, counter)
        if _scheme(item.uri or "") in URL_SCHEMES:
            _not_larger(item, found.num_bytes, policy)
    _not_empty(item, found.num_bytes)
    return as_given(item, found)


def read_source(item: MediaItem, counter: FetchCounter, policy: SourcePolicy = ANYWHERE) -> bytes:
    """The whole object. Raises as `stat_source` does."""
    if item.data is not None:
        return item.data
    split = split_member(item.uri or "")
    if split is not None:
        return _read_member(item, split, counter, policy)
    place = _locate(item.uri or "", policy)
    counter.fetches += 1
    data = _reach(lambda: _whole(place), place, counter)
    counter.bytes_fetched += len(data)
    _not_empty(item, len(data))
    return data


def open_source(
    item: MediaItem, counter: FetchCounter, policy: SourcePolicy = ANYWHERE, block_bytes: int = _BLOCK_BYTES
) -> BinaryIO:
    """The object as a seekable file that fetches ranges as they are read. Raises as `stat_source`, reads included.
    An empty object opens.

    `counter` gets the bytes that callers read; a remote block is fetched whole, so the wire may carry more.
    """
    if item.data is not None:
        return io.BytesIO(item.data)
    split = split_member(item.uri or "")
    if split is not None:
        return _open_member(item, split, counter, policy, block_bytes)
    place = _locate(item.uri or "", policy)
    counter.fetches += 1
    file = _reach(lambda: _open(place, block_bytes), place, counter)

    def counted(read: Callable[[], bytes]) -> bytes:
        data = retrying(read, place, counter)
        counter.bytes_fetched += len(data)
        return data

    return cast(BinaryIO, RetryingFile(file, counted))


def retrying(
    fetch: Callable[[], Result],
    place: Place,
    counter: FetchCounter | None = None,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> Result:
    """`fetch()`, tried as `retry` does, its failures raised as what they mean to the item and the run.

    What keeps failing is a `TransientError`, what storage refuses or lacks an `ItemError`, wrong credentials a
    `ConfigError`, and what means nothing known comes out as itself. At a URL, what keeps failing is an `ItemError`
    (`unavailable`): each may have a server of its own, and one that is down is to stop nothing else.
    """
    try:
        again = (counter or FetchCounter()).again
        return retry(fetch, scheme=place.scheme, meaning=lambda error: _meaning(error, place), sleep=sleep, again=again)
    except TransientError as error:
        if place.scheme in URL_SCHEMES:
            raise ItemError("fetch", "unavailable", str(error)) from error
        raise


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where an object lies: its URI for messages, and a path on a file system."""

    uri: str
    scheme: str
    fs: Any
    path: str


def _read_member(item: MediaItem, split: tuple[str, str], counter: FetchCounter, policy: SourcePolicy) -> bytes:
    _, member = _archives.member(*split, policy)
    _not_larger(item, max(member.num_bytes, member.stored_bytes), policy)
    place = _locate(split[0], policy)
    counter.fetches += 1
    data = _reach(lambda: _range(place, member.start, member.stop), place, counter)
    if len(data) != member.stop - member.start:
        raise ItemError("fetch", "content_mismatch", f"{item.name}: its archive changed since it was indexed")
    counter.bytes_fetched += len(data)
    content = member_bytes(member, data)
    _not_empty(item, len(content))
    return content


def _open_member(
    item: MediaItem, split: tuple[str, str], counter: FetchCounter, policy: SourcePolicy, block_bytes: int
) -> BinaryIO:
    _, member = _archives.member(*split, policy)
    if member.is_deflated:
        return io.BytesIO(_read_member(item, split, counter, policy))
    with contextlib.ExitStack() as until_known:
        file = until_known.enter_context(open_source(MediaItem(uri=split[0]), counter, policy, block_bytes))
        begin = member.start + content_offset(member, file)
        until_known.pop_all()
    return cast(BinaryIO, PartOfFile(file, begin, member.num_bytes))


_archives = Archives(
    look=lambda uri, policy: _found(uri, policy, None),
    open=lambda uri, policy: open_source(MediaItem(uri=uri), FetchCounter(), policy),
)


def _sha256_id(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _not_larger(item: MediaItem, num_bytes: int, policy: SourcePolicy) -> None:
    if num_bytes > policy.max_bytes:
        message = f"{item.name}: {num_bytes:,} bytes, {policy.max_bytes:,} are allowed (max_bytes)"
        raise ItemError("fetch", "too_large", message)


def _not_empty(item: MediaItem, num_bytes: int) -> int:
    if num_bytes == 0:
        raise ItemError("fetch", "empty_file", f"{item.name}: 0 bytes")
    return num_bytes


def _found(uri: str, policy: SourcePolicy, counter: FetchCounter | None) -> SourceFacts:
    place = _locate(uri, policy)
    return _reach(lambda: _look(place), place, counter)


def _locate(uri: str, policy: SourcePolicy) -> Place:
    scheme = _scheme(uri)
    if scheme not in SCHEMES:
        raise ItemError(
            "fetch", "scheme_refused", f"{uri[:200]}: media is read from {', '.join(SCHEMES)} only, not {scheme!r}"
        )
    if scheme in URL_SCHEMES:
        # Not at the top: it takes an eighth of a second, and few runs have URLs.
        from pipeline.media.http_files import http_files

        return Place(uri=uri, scheme=scheme, fs=http_files(policy, os.getpid()), path=uri)
    # Not url_to_fs: it follows "::" chains, with which an s3:// URI can name a local file.
    fs = file_system(scheme)
    path = fs._strip_protocol(uri)
    return Place(uri=uri, scheme=scheme, fs=fs, path=_within_roots(uri, path, policy) if scheme == "file" else path)


def _within_roots(uri: str, path: str, policy: SourcePolicy) -> str:
    """The path to read; with roots, links are resolved first, so that what is checked is what is opened."""
    if not policy.roots:
        return path
    real = os.path.realpath(path)
    if not is_within(real, [os.path.realpath(root) for root in policy.roots]):
        raise ItemError("fetch", "path_refused", f"{uri[:200]}: {real} is in none of sources.roots {policy.roots}")
    return real


def _scheme(uri: str) -> str:
    if uri.startswith("data:"):
        return "data"
    scheme = uri.partition("://")[0].lower() if "://" in uri else "file"
    return {"gcs": "gs"}.get(scheme, scheme)


def _reach(fetch: Callable[[], Result], place: Place, counter: FetchCounter | None) -> Result:
    if place.scheme in ("file", *URL_SCHEMES):
        return retrying(fetch, place, counter)
    return retrying(lambda: with_reason(fetch, lambda: place.fs.cat_file(place.path, start=0, end=1)), place, counter)


def _look(place: Place) -> SourceFacts:
    """From metadata."""
    if place.scheme == "file":
        facts = os.stat(_regular(place).path)
        own_id = f"file:{place.path}:{facts.st_size}:{facts.st_mtime_ns}"
        return SourceFacts(source_id=own_id, strength="weak", num_bytes=facts.st_size)
    if place.scheme in URL_SCHEMES:
        num_bytes, source_id = place.fs.look(place.path)
        # Servers make ETags as they like, many of them of time and size.
        strength: Strength = "content" if source_id.startswith("sha256:") else "weak"
        return SourceFacts(source_id=source_id, strength=strength, num_bytes=num_bytes)
    info = place.fs.info(place.path)
    if info["type"] != "file":
        raise IsADirectoryError(place.uri)
    source_id, strength = object_version(place.scheme, place.uri, info)
    return SourceFacts(source_id=source_id, strength=strength, num_bytes=int(info["size"]))


def _whole(place: Place) -> bytes:
    if place.scheme in URL_SCHEMES:
        return bytes(place.fs.read(place.path))
    return bytes(_regular(place).fs.cat_file(place.path))


def _range(place: Place, start: int, stop: int) -> bytes:
    if place.scheme in URL_SCHEMES:
        return bytes(place.fs.read_range(place.path, start, stop))
    return bytes(_regular(place).fs.cat_file(place.path, start=start, end=stop))


def _regular(place: Place) -> Place:
    """`place`; raises IsADirectoryError for a local directory, pipe or device, which would be read for ever."""
    if place.scheme == "file" and not stat.S_ISREG(os.stat(place.path).st_mode):
        raise IsADirectoryError(place.uri)
    return place


def _open(place: Place, block_bytes: int) -> Any:
    if place.scheme == "file":
        return open(_regular(place).path, "rb")
    max_blocks = _CACHE_BYTES // block_bytes
    if place.scheme in URL_SCHEMES:
        return place.fs.open(place.path, block_bytes=block_bytes, max_blocks=max_blocks)
    cache = {"cache_type": "blockcache", "cache_options": {"maxblocks": max_blocks}} if place.scheme != "memory" else {}
    file = place.fs.open(place.path, "rb", block_size=block_bytes, **cache)
    if getattr(file, "details", {}).get("type") == "directory":  # s3fs opens a prefix as an empty file
        file.close()
        raise IsADirectoryError(place.uri)
    return file


def _meaning(error: Exception, place: Place) -> Exception:
    if place.scheme in URL_SCHEMES and isinstance(error, ConnectionError):
        return TransientError(str(error), getattr(error, "after_seconds", 0.0))
    what = f"{place.uri}: {explain(error)}"
    match judge(error):
        case Fault.CREDENTIALS:
            return ConfigError(f"the credentials for {place.scheme}:// are not valid; {what}")
        case Fault.ABSENT | Fault.NO_BUCKET:
            return ItemError("fetch", "not_found", f"{place.uri}: no such object")
        case Fault.EXISTS:
            return ItemError("fetch", "content_mismatch", f"{place.uri}: replaced while it was read")
        case Fault.NOT_A_FILE:
            return ItemError("fetch", "not_a_file", f"{place.uri}: a directory, or no regular file")
        case Fault.DENIED:
            return ItemError("fetch", "access_denied", what)
        case Fault.PASSING:
            return TransientError(what)
        case Fault.UNKNOWN:
            return error
