"""What the sandbox does, done by the process itself: for media that are trusted, or where there is no sandbox."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO

from pipeline.errors import ItemError
from pipeline.media.decode import decode_media
from pipeline.media.document import DEFAULT_DPI, page_text, read_page_count
from pipeline.media.probe import probe_media
from pipeline.media.undecoded import Outcome, Undecoded
from pipeline.schema import Frames, Modality, Probe


class InProcess:
    """As `pipeline.media.sandbox.Sandbox`, with no time limit, and of its verdicts `out_of_memory` only: for what an
    allocation was refused. An item that takes all there is, or breaks its decoder, ends the process."""

    def decode(self, items: Sequence[Undecoded]) -> Iterator[Outcome]:
        """As `Sandbox.decode`, each when it is asked for."""
        return map(_decoded, items)

    def probe(
        self,
        file: BinaryIO,
        *,
        num_bytes: int,
        declared: Modality | None,
        name: str,
        page: int | None = None,
        dpi: float = DEFAULT_DPI,
    ) -> Probe:
        """As `Sandbox.probe`."""
        with _memory_errors("probe", name):
            return probe_media(file, num_bytes=num_bytes, declared=declared, name=name, page=page, dpi=dpi)

    def page_count(self, file: BinaryIO, *, num_bytes: int, name: str) -> int:
        """As `Sandbox.page_count`."""
        with _memory_errors("probe", name):
            return read_page_count(file, name)

    def page_text(self, data: bytes, page: int) -> str:
        """As `Sandbox.page_text`."""
        with _memory_errors("decode", f"page {page + 1}"):
            return page_text(data, page)


def _decoded(item: Undecoded) -> Outcome:
    started = time.perf_counter()
    result: Frames | ItemError
    try:
        with _memory_errors("decode", item.probe.container):
            result = decode_media(
                io.BytesIO(item.data) if item.file is None else item.file,
                item.probe,
                item.plan,
                item.size,
                item.resample,
                page=item.page,
                dct_scaled=item.dct_scaled,
                by_range=item.file is not None,
                at_keyframes=item.at_keyframes,
                rules=item.rules,
            )
    except ItemError as error:
        result = error
    return Outcome(result=result, seconds=time.perf_counter() - started)


@contextmanager
def _memory_errors(stage: str, name: str) -> Iterator[None]:
    """A header that promises much has a decoder ask for it: what is refused is that item's failure."""
    try:
        yield
    except MemoryError as error:
        raise ItemError(stage, "out_of_memory", f"{name}: it takes more memory than there is: {error!r}") from error
