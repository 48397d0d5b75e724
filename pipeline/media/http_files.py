"""Objects fetched by URL: every address is checked before it is connected to, every redirect before it is followed."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import email.utils
import functools
import hashlib
import io
import os
import re
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar, cast

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from fsspec.spec import AbstractBufferedFile
from yarl import URL

from pipeline.errors import ItemError
from pipeline.media.url_policy import (
    RefusedAddressError,
    SourcePolicy,
    Target,
    check_addresses,
    check_redirect,
    check_url,
    is_media_type,
    refuse_url,
    show_text,
    show_url,
)

Lookup = Callable[[str, int], Awaitable[list[str]]]
Taken = TypeVar("Taken")

# At a time; not tuned. A process has as many threads that read as `decode.io_threads`.
_MAX_CONNECTIONS = 64
_MAX_CONNECTIONS_PER_HOST = 8
_REMEMBERED_SECONDS = 60  # how long a host's checked addresses are connected to without another look-up
_ENDING_STEPS = 8  # of the loop, in which transports let go of sockets that were shut down; one was enough
_REDIRECTS = {301, 302, 303, 307, 308}
_MAY_PASS = {408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524}
_ABSENT = {404, 410}
_DENIED = {401, 402, 403, 407, 451}
_HEADERS = {"Accept-Encoding": "identity", "Accept": "*/*", "User-Agent": "headrace"}
_CONTENT_RANGE = re.compile(r"bytes (?:([0-9]{1,18})-([0-9]{1,18})|\*)/([0-9]{1,18})")


class UnavailableError(ConnectionError):
    """An answer that may be another the next time; `after_seconds` is when the server wants to be asked again."""

    def __init__(self, message: str, after_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.after_seconds = after_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class UrlFacts:
    """What an answer says of the object: its size, None when it does not say; its validators, "" for none; and whether
    parts of it can be asked for. `etag` is a strong one: weak ones do not promise the same bytes."""

    num_bytes: int | None
    etag: str = ""
    last_modified: str = ""
    has_ranges: bool = False


@functools.cache
def http_files(policy: SourcePolicy, pid: int) -> HttpFiles:
    """The process's one client under `policy`, which threads share; a forked process has another."""
    return HttpFiles(policy)


class HttpFiles:
    """Reads objects at `http(s)://` URLs. Connections are kept and shared; calls block, and any thread may call.

    Raises `ItemError` (stage `fetch`) for what the object or its server is at fault for: `url_refused`,
    `too_many_redirects`, `not_found`, `access_denied`, `wrong_content_type`, `too_large`, `content_mismatch`,
    `timed_out` (the total time), `unexpected_answer`; `UnavailableError` for what may pass.
    """

    def __init__(self, policy: SourcePolicy, lookup: Lookup | None = None) -> None:
        self._policy = policy
        self._lookup = lookup or look_up
        self._pid = os.getpid()
        # A TLS connection that is given up waits for the other side's farewell, for up to 30 s; not when all end.
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="headrace-http", daemon=True)
        self._thread.start()
        self._session = self._wait(self._opened())
        atexit.register(self.close)

    def close(self) -> None:
        """Close all connections. A forked process leaves its parent's alone."""
        atexit.unregister(self.close)
        if os.getpid() == self._pid and not self._loop.is_closed():
            self._wait(self._closed())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def look(self, url: str) -> tuple[int, str]:
        """(bytes, source id). The id is made of ETag and size, else of time of change and size.

        Where the server says neither, or no size, the object is read whole and its id is its hash.
        """
        facts = self.facts(url)
        if facts.num_bytes is None or not (facts.etag or facts.last_modified):
            data = self.read(url)
            return len(data), f"sha256:{hashlib.sha256(data).hexdigest()}"
        if facts.etag:
            return facts.num_bytes, f"etag:{url}:{facts.etag.strip(chr(34))}:{facts.num_bytes}"
        return facts.num_bytes, f"object:{url}:{facts.num_bytes}:{facts.last_modified}"

    def facts(self, url: str) -> UrlFacts:
        """What the server says of the object when it is asked for its first byte.

        A GET, for what a signed URL allows is often that alone.
        """
        return self._fetch(url, {"Range": "bytes=0-0"}, self._take_facts)

    def read(self, url: str) -> bytes:
        """The whole object."""
        return self._fetch(url, {}, self._take_whole)

    def read_range(self, url: str, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop`, as one answer. Raises `unexpected_answer` where no parts can be asked for."""
        return self._fetch(url, {"Range": f"bytes={start}-{stop - 1}"}, functools.partial(_take_part, start, stop))

    def open(self, url: str, *, block_bytes: int, max_blocks: int) -> BinaryIO:
        """A seekable file that fetches blocks as they are read; the whole object where no parts can be asked for.

        Reads raise `content_mismatch` when the object changed since it was opened.
        """
        facts = self.facts(url)
        if not facts.has_ranges or facts.num_bytes is None:
            return io.BytesIO(self.read(url))
        options = {"maxblocks": max_blocks}
        file = _RangedFile(functools.partial(self._read_range, url, facts), url, facts.num_bytes, block_bytes, options)
        return cast(BinaryIO, file)

    def _read_range(self, url: str, facts: UrlFacts, start: int, stop: int) -> bytes:
        headers = {"Range": f"bytes={start}-{stop - 1}"} | ({"If-Range": facts.etag} if facts.etag else {})
        return self._fetch(url, headers, functools.partial(_take_range, url, facts, start, stop))

    def _fetch(
        self, url: str, headers: dict[str, str], take: Callable[[aiohttp.ClientResponse], Awaitable[Taken]]
    ) -> Taken:
        return self._wait(self._timed(url, headers, take))

    def _wait(self, work: Coroutine[Any, Any, Taken]) -> Taken:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _opened(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(
            resolver=_CheckingResolver(self._policy, self._lookup),
            ttl_dns_cache=_REMEMBERED_SECONDS,
            socket_factory=self._new_socket,
            limit=_MAX_CONNECTIONS,
            limit_per_host=_MAX_CONNECTIONS_PER_HOST,
            ssl=ssl.create_default_context(),
        )
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,  # a proxy would resolve names itself
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=self._policy.connect_seconds, sock_read=self._policy.read_seconds
            ),
        )

    def _new_socket(self, address: aiohttp.AddrInfoType) -> socket.socket:
        made = socket.socket(*address[:3])
        self._sockets.add(made)
        return made

    async def _closed(self) -> None:
        await self._session.close()
        for each in list(self._sockets):
            with contextlib.suppress(OSError):  # closed already
                each.shutdown(socket.SHUT_RDWR)
        for _ in range(_ENDING_STEPS):
            await asyncio.sleep(0)

    async def _timed(
        self, url: str, headers: dict[str, str], take: Callable[[aiohttp.ClientResponse], Awaitable[Taken]]
    ) -> Taken:
        deadline = asyncio.timeout(self._policy.total_seconds)
        try:
            async with deadline:
                return await self._followed(check_url(url, self._policy), headers, take)
        except TimeoutError as error:
            if deadline.expired():
                message = f"{show_url(url)}: not done within {self._policy.total_seconds:g} s (sources.total_seconds)"
                raise ItemError("fetch", "timed_out", message) from error
            raise

    async def _followed(
        self, target: Target, headers: dict[str, str], take: Callable[[aiohttp.ClientResponse], Awaitable[Taken]]
    ) -> Taken:
        for hop in range(self._policy.max_redirects + 1):
            answer = await self._asked(target, hop, headers, take)
            if not isinstance(answer, _Redirect):
                return answer
            last, target = target, check_redirect(answer.location, target, self._policy, hop=hop + 1)
        message = f"{show_url(last.url)}: more than {self._policy.max_redirects} (sources.max_redirects)"
        raise ItemError("fetch", "too_many_redirects", message)

    async def _asked(
        self,
        target: Target,
        hop: int,
        headers: dict[str, str],
        take: Callable[[aiohttp.ClientResponse], Awaitable[Taken]],
    ) -> Taken | _Redirect:
        shown = show_url(target.url)
        try:
            if target.is_address:  # names are checked when they are resolved
                check_addresses(target.host, [target.host], self._policy)
            request = self._session.get(
                URL(target.url, encoded=True), headers=_HEADERS | headers, allow_redirects=False
            )
            async with request as response:
                try:
                    if response.status in _REDIRECTS and "Location" in response.headers:
                        return _Redirect(response.headers["Location"])
                    _check_status(response, shown)
                    return await take(response)
                finally:
                    _hang_up_unread(response)
        except RefusedAddressError as error:
            raise refuse_url(target.url, hop, str(error)) from error
        except aiohttp.ClientConnectorCertificateError as error:
            raise refuse_url(target.url, hop, f"its certificate does not hold ({error.certificate_error})") from error
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, UnavailableError):
                raise
            if _is_absent_host(error):
                raise ItemError("fetch", "not_found", f"{shown}: no such host as {target.host}") from error
            # The whole of an answer's error would repeat the URL with its query.
            said = error.message if isinstance(error, aiohttp.ClientResponseError) else str(error)
            raise UnavailableError(f"{shown}: {type(error).__name__}: {show_text(said)}") from error
        except ValueError as error:  # a Content-Length that is no number, among others
            raise ItemError("fetch", "unexpected_answer", f"{shown}: {show_text(str(error))}") from error

    async def _take_facts(self, response: aiohttp.ClientResponse) -> UrlFacts:
        etag, last_modified = _validator(response, "ETag"), _validator(response, "Last-Modified")
        etag = "" if etag.startswith("W/") else etag
        if response.status in (206, 416):
            begin, total = _content_range(response)
            if (begin, total > 0) not in ((0, True), (None, False)):
                raise _unexpected(response, f"its {total} bytes are said to begin at {begin}")
            if total:
                await _body(response, 1)  # so that the connection can be used again
            return UrlFacts(num_bytes=total, etag=etag, last_modified=last_modified, has_ranges=total > 0)
        return UrlFacts(num_bytes=response.content_length, etag=etag, last_modified=last_modified)

    async def _take_whole(self, response: aiohttp.ClientResponse) -> bytes:
        if response.status != 200:
            raise _unexpected(response, "the whole object was asked for")
        _check_size(response, response.content_length or 0, self._policy.max_bytes)
        return await _body(response, self._policy.max_bytes)


@dataclass(frozen=True, slots=True)
class _Redirect:
    location: str


class _CheckingResolver(AbstractResolver):
    """Gives the connector those addresses that it may connect to, so that there is no second look-up between."""

    def __init__(self, policy: SourcePolicy, lookup: Lookup) -> None:
        self._policy = policy
        self._lookup = lookup

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """The checked addresses of `host`. Raises `RefusedAddressError` when one of them is not to be connected to."""
        async with asyncio.timeout(self._policy.dns_seconds):
            addresses = await self._lookup(host, port)
        check_addresses(host, addresses, self._policy)
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address in addresses
        ]

    async def close(self) -> None:
        """There is nothing to close."""


class _RangedFile(AbstractBufferedFile):  # type: ignore[misc]
    def __init__(
        self, fetch: Callable[[int, int], bytes], url: str, num_bytes: int, block_bytes: int, options: dict[str, Any]
    ) -> None:
        super().__init__(
            None, url, size=num_bytes, block_size=block_bytes, cache_type="blockcache", cache_options=options
        )
        self._fetch = fetch

    def _fetch_range(self, start: int, end: int) -> bytes:
        return self._fetch(start, min(end, self.size))  # the last block is asked for as if it were whole


async def look_up(host: str, port: int) -> list[str]:
    """The addresses of `host` as the system resolves it, in its order."""
    found = await asyncio.get_running_loop().getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
    )
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


async def _take_range(url: str, facts: UrlFacts, start: int, stop: int, response: aiohttp.ClientResponse) -> bytes:
    changed = ItemError("fetch", "content_mismatch", f"{show_url(url)}: replaced while it was read")
    if response.status != 206:
        raise changed
    _, total = _content_range(response)
    if total != facts.num_bytes or response.headers.get("ETag", facts.etag) not in (facts.etag, f"W/{facts.etag}"):
        raise changed
    return await _take_part(start, stop, response)


async def _take_part(start: int, stop: int, response: aiohttp.ClientResponse) -> bytes:
    if response.status != 206 or _content_range(response)[0] != start:
        raise _unexpected(response, f"bytes {start} to {stop} were asked for")
    data = await _body(response, stop - start)
    if len(data) != stop - start:
        raise _unexpected(response, f"bytes {start} to {stop} were asked for")
    return data


def _hang_up_unread(response: aiohttp.ClientResponse) -> None:
    """Without a farewell, for which a server that goes on sending would be listened to. Read to its end, an answer has
    given its connection back."""
    if response.connection is not None and response.connection.transport is not None:
        response.connection.transport.abort()


async def _body(response: aiohttp.ClientResponse, most: int) -> bytes:
    parts, num_bytes = [], 0
    async for part in response.content.iter_any():
        num_bytes += len(part)
        _check_size(response, num_bytes, most)
        parts.append(part)
    return b"".join(parts)


def _check_size(response: aiohttp.ClientResponse, num_bytes: int, most: int) -> None:
    if num_bytes > most:
        message = f"{show_url(str(response.url))}: {num_bytes:,} bytes or more, {most:,} are allowed (max_bytes)"
        raise ItemError("fetch", "too_large", message)


def _check_status(response: aiohttp.ClientResponse, shown: str) -> None:
    """Raise for an answer that has no part of the object."""
    status = response.status
    if status in _MAY_PASS:
        raise UnavailableError(f"{shown}: HTTP {status}", _after_seconds(response.headers.get("Retry-After", "")))
    if status in _ABSENT:
        raise ItemError("fetch", "not_found", f"{shown}: no such object (HTTP {status})")
    if status in _DENIED:
        raise ItemError("fetch", "access_denied", f"{shown}: HTTP {status}")
    if status not in (200, 206, 416):
        raise ItemError("fetch", "unexpected_answer", f"{shown}: HTTP {status}")
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    kind = response.headers.get("Content-Type", "")
    if status != 416 and (encoding not in ("", "identity") or not is_media_type(kind)):
        said = f"Content-Type {kind[:100]!r}, Content-Encoding {encoding[:100]!r}"
        raise ItemError("fetch", "wrong_content_type", f"{shown}: {said}; expected media as they are")


def _validator(response: aiohttp.ClientResponse, name: str) -> str:
    """A header that tells versions apart, "" where there is none that can be one."""
    value = response.headers.get(name, "")
    return value if re.fullmatch(r"[ -~]{1,256}", value) else ""


def _content_range(response: aiohttp.ClientResponse) -> tuple[int | None, int]:
    """(first byte, None when there is none; bytes of the whole object)."""
    matched = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    if matched is None:
        raise _unexpected(response, f"Content-Range {response.headers.get('Content-Range', '')[:100]!r}")
    return None if matched[1] is None else int(matched[1]), int(matched[3])


def _unexpected(response: aiohttp.ClientResponse, reason: str) -> ItemError:
    return ItemError(
        "fetch", "unexpected_answer", f"{show_url(str(response.url))}: HTTP {response.status}, but {reason}"
    )


def _after_seconds(text: str) -> float:
    """What a `Retry-After` says, in seconds or as a date; 0 for what is neither."""
    if re.fullmatch(r"[0-9]{1,9}", text.strip()):
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except ValueError:
        return 0.0


def _is_absent_host(error: Exception) -> bool:
    """True when the system's resolver says that there is no such name, and not that it could not ask."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    return isinstance(cause, socket.gaierror) and cause.errno in (socket.EAI_NONAME, socket.EAI_NODATA)
