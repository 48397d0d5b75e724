"""Listings in which a PDF document stands for its pages."""

from __future__ import annotations

import io
import itertools
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import BinaryIO

from pipeline.errors import ItemError
from pipeline.media.in_process import InProcess
from pipeline.media.sandbox import READER_LOST, Probers
from pipeline.media.source import ANYWHERE, FetchCounter, open_source, read_source, stat_source
from pipeline.media.url_policy import SourcePolicy
from pipeline.runs.request_rows import uri_path
from pipeline.schema import MediaItem, Request

_THREADS = 8
_ROWS_AHEAD = 4 * _THREADS  # rows that wait for the page count of one before them; not tuned
# Smaller documents are read whole, several at a time: range reads are PDFium's, which takes one document at a time.
_WHOLE_BYTES = 8 * 2**20
_UNCOUNTED = -1


def page_requests(
    numbered: Generator[tuple[int, Request]],
    *,
    limit: int | None = None,
    policy: SourcePolicy = ANYWHERE,
    reader: Probers | InProcess | None = None,
) -> Generator[tuple[int, Request]]:
    """(row of the manifest, request), with one request a page for each row that shows a PDF alone, in order.

    A PDF is a medium whose modality is page, or not given, and whose URI ends with .pdf or whose bytes begin as one.
    Ids get the page, counted from 1: "a.pdf#page=1". A document that cannot be opened stays one row, under its own id:
    as its first page it will meet the same error where items are judged; and without a page when it hung, broke or
    filled `reader` (this process for None), since its first page may do no harm. Rows that name their page, and rows
    with several media, stay as they are; inline bytes are in each row of their document. At most `limit` requests,
    `item_index` counted anew. Documents are opened several at a time, a few ahead; storage that keeps failing raises as
    `stat_source` does.
    """
    with closing(numbered), closing(_counted(numbered, policy, reader or InProcess())) as counted:
        requests = ((row, each) for row, request, count in counted for each in _pages(request, count))
        for item_index, (row, request) in enumerate(itertools.islice(requests, limit)):
            yield row, replace(request, item_index=item_index)


def _counted(
    numbered: Iterable[tuple[int, Request]], policy: SourcePolicy, reader: Probers | InProcess
) -> Generator[tuple[int, Request, int | None]]:
    """(row, request, pages of the document that it shows, None for others), in order."""
    pool = ThreadPoolExecutor(_THREADS)
    waiting: deque[tuple[int, Request, Future[int] | None]] = deque()
    try:
        for row, request in numbered:
            count = pool.submit(_count_pages, request.media[0], policy, reader) if _is_document(request) else None
            waiting.append((row, request, count))
            while waiting and (waiting[0][2] is None or len(waiting) > _ROWS_AHEAD):
                yield _resolved(waiting.popleft())
        while waiting:
            yield _resolved(waiting.popleft())
    finally:
        pool.shutdown(cancel_futures=True)


def _resolved(waiting: tuple[int, Request, Future[int] | None]) -> tuple[int, Request, int | None]:
    row, request, count = waiting
    return row, request, None if count is None else count.result()


def _is_document(request: Request) -> bool:
    if len(request.media) != 1:
        return False
    [item] = request.media
    looks = (
        uri_path(item.uri).lower().endswith(".pdf") if item.uri is not None else (item.data or b"").startswith(b"%PDF-")
    )
    return item.page is None and (item.modality == "page" or (item.modality is None and looks))


def _count_pages(item: MediaItem, policy: SourcePolicy, reader: Probers | InProcess) -> int:
    """0 when the document cannot be opened, `_UNCOUNTED` when it broke what opens it."""
    try:
        num_bytes = stat_source(item, policy).num_bytes
        with _open(item, num_bytes, policy) as file:
            return reader.page_count(file, num_bytes=num_bytes, name=item.name)
    except ItemError as error:
        return _UNCOUNTED if error.code in READER_LOST else 0


def _open(item: MediaItem, num_bytes: int, policy: SourcePolicy) -> BinaryIO:
    if num_bytes <= _WHOLE_BYTES:
        return io.BytesIO(read_source(item, FetchCounter(), policy))
    return open_source(item, FetchCounter(), policy)


def _pages(request: Request, count: int | None) -> Iterator[Request]:
    if count is None:
        yield request
        return
    [item] = request.media
    if count == _UNCOUNTED:
        yield replace(request, media=(replace(item, modality="page"),))
        return
    for page in range(max(1, count)):
        id_ = f"{request.id}#page={page + 1}" if count else request.id
        yield replace(request, id=id_, media=(replace(item, modality="page", page=page),))
