"""Files of which several items are parts: documents fetched once for all their pages, files hashed once."""

from __future__ import annotations

import hashlib
import io
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import BinaryIO, cast

from pipeline.media.source import FetchCounter, read_source
from pipeline.media.url_policy import SourcePolicy
from pipeline.schema import MediaItem

_DOCUMENTS = 8  # as many as threads that read; each waits with its bytes for the next page


@dataclass(slots=True)
class _Document:
    lock: threading.Lock = field(default_factory=threading.Lock)
    data: bytes | None = None


class SharedSources:
    """Reads media items whole. The last few documents are kept, so that their pages are fetched once, by any thread."""

    def __init__(self, policy: SourcePolicy) -> None:
        self._policy = policy
        self._lock = threading.Lock()
        self._documents: OrderedDict[tuple[str, str | None], _Document] = OrderedDict()

    def read(self, media: MediaItem, counter: FetchCounter) -> bytes:
        """As `read_source`; `counter` counts what was fetched for this very page. Raises what `read_source` raises."""
        if media.page is None or media.uri is None:
            return read_source(media, counter, self._policy)
        document = self._document((media.uri, media.version))
        with document.lock:
            if document.data is None:
                document.data = read_source(media, counter, self._policy)
            return document.data

    def _document(self, key: tuple[str, str | None]) -> _Document:
        with self._lock:
            document = self._documents.setdefault(key, _Document())
            self._documents.move_to_end(key)
            if len(self._documents) > _DOCUMENTS:
                self._documents.popitem(last=False)
            return document


@dataclass(slots=True)
class _Digest:
    lock: threading.Lock = field(default_factory=threading.Lock)
    sha256: str = ""


class FileDigests:
    """The SHA-256 of files, which are streamed: each is hashed once, whoever asks for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._digests: dict[str, _Digest] = {}

    def of(self, source_id: str, file: BinaryIO) -> str:
        """In hex, of the whole of `file`, which is the one of `source_id`. Raises what its reads raise."""
        with self._lock:
            digest = self._digests.setdefault(source_id, _Digest())
        with digest.lock:
            if not digest.sha256:
                file.seek(0)
                digest.sha256 = hashlib.file_digest(cast(io.BufferedIOBase, file), "sha256").hexdigest()
            return digest.sha256
