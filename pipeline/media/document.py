"""Pages of PDF documents: how many there are, how large each is, its picture and its text.

Not applied: a page's UserUnit, which PDFium does not know. Fonts that a document names and does not bring are PDFium's
own for the fourteen standard ones, and else the machine's.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from pipeline.errors import ItemError
from pipeline.media import pdfium
from pipeline.schema import Probe

DEFAULT_DPI = 144.0  # twice the unit of PDF: an A4 page is 1191 x 1684 pixels
MOST_PAGES = 2**20  # PDFium opens no document of more
MOST_LETTERS = 1_000_000  # of a page's text; a page full of small print has 10,000

_POINTS_PER_INCH = 72
_END_OF_FILE = b"%%EOF"
_TAIL_BYTES = 1024  # where readers look for that mark (ISO 32000-1, annex H, note 18)
# PDFium writes U+FFFE for the hyphen that parts a word at the end of a line, and joins the lines.
_PARTING = re.compile("[\x02\u00ad\ufffe]")
_LINE_END = re.compile("[ \t]*(?:\r\n|\r|\n)")
_HALF = re.compile("[\ud800-\udfff]")
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f\ufeff\uffff]")


def read_page_count(file: bytes | BinaryIO, name: str) -> int:
    """How many pages the document has, at least one.

    The last one has to be there: the number alone is written in the file, and may promise any. Raises `ItemError`
    (stage `probe`): `encrypted_document` (it asks for a password, or is encrypted in an unknown way),
    `empty_document`, `truncated` (not readable, and without the mark that ends a PDF), `unreadable_document`.
    """
    with _opened(file, "probe", name) as document:
        count = _page_count(document, "probe", name)
        pdfium.page_size(document, count - 1)
        return count


def probe_page(file: bytes | BinaryIO, page: int, *, num_bytes: int, dpi: float, name: str) -> Probe:
    """What is known of a page (from 0) before it is drawn; its size is that of the picture at `dpi`, upright.

    That is what a viewer shows, the part of MediaBox within CropBox, turned by the page's Rotate: sides in points
    x dpi / 72, rounded to whole pixels, at least one. Raises as `read_page_count` does, and `no_such_page`.
    """
    with _opened(file, "probe", name) as document:
        _check_page(document, page, "probe", name)
        sides = pdfium.page_size(document, page)
    if not all(math.isfinite(side) for side in sides):
        raise ItemError("probe", "zero_dimensions", f"{name}: a page of {sides[0]} x {sides[1]} points")
    width, height = (max(1, round(side * dpi / _POINTS_PER_INCH)) for side in sides)
    return Probe(modality="page", container="pdf", codec="pdf", width=width, height=height, num_bytes=num_bytes)


def render_page(file: bytes | BinaryIO, page: int, size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """`uint8 (H, W, 3)` RGB of a page (from 0), drawn to fill `size` = (height, width).

    On white, with annotations and form fields; what cannot be drawn, PDFium leaves out. Raises `ItemError` (stage
    `decode`) as `probe_page` does.
    """
    pixels = np.full((*size, 3), 255, np.uint8)
    with _opened(file, "decode", f"page {page + 1}") as document:
        _check_page(document, page, "decode", "page")
        pdfium.draw(document, page, pixels)
    return pixels


def page_text(file: bytes | BinaryIO, page: int) -> str:
    r"""The text layer of a page (from 0): "" where there is none, as on scanned pages. Annotations are not in it.

    The order is PDFium's: that in which the page draws its text, so columns come one after another where they were
    written so; pieces of one line from left to right, as most letters of the page stand. Text that is not seen, behind
    a picture or outside of what is shown, is in it. Lines end with "\n", without spaces before it. A word that a hyphen
    parts at the end of a line is joined, as PDFium does; soft hyphens and control characters are left out. Raises as
    `render_page` does, and `too_much_text` for more than `MOST_LETTERS`.
    """
    with _opened(file, "decode", f"page {page + 1}") as document:
        _check_page(document, page, "decode", "page")
        text = pdfium.text(document, page)
    if len(text) > MOST_LETTERS:
        raise ItemError("decode", "too_much_text", f"page {page + 1}: {len(text):,} letters, {MOST_LETTERS:,} allowed")
    return _UNSEEN.sub("", _LINE_END.sub("\n", _PARTING.sub("", text))).strip()


def is_clean(text: str) -> bool:
    """Whether `text` may be what `page_text` gives: nothing in it that it leaves out, and no halves of letters."""
    return not (_PARTING.search(text) or _UNSEEN.search(text) or _HALF.search(text))


@contextmanager
def _opened(file: bytes | BinaryIO, stage: str, name: str) -> Iterator[Any]:
    """The document; what PDFium refuses meanwhile is the item's failure."""
    try:
        with pdfium.opened(file) as document:
            yield document
    except pdfium.PdfiumError as error:
        raise _refusal(file, error, stage, name) from error


def _refusal(file: bytes | BinaryIO, error: pdfium.PdfiumError, stage: str, name: str) -> ItemError:
    if error.is_locked:
        return ItemError(stage, "encrypted_document", f"{name}: the document cannot be opened without its password")
    if _END_OF_FILE in _tail(file):
        return ItemError(stage, "unreadable_document", f"{name}: the PDF is damaged: {error}")
    return ItemError(stage, "truncated", f"{name}: the PDF is cut off, it ends without its mark of the end: {error}")


def _tail(file: bytes | BinaryIO) -> bytes:
    if isinstance(file, bytes):
        return file[-_TAIL_BYTES:]
    file.seek(max(0, file.seek(0, io.SEEK_END) - _TAIL_BYTES))
    return file.read()


def _page_count(document: Any, stage: str, name: str) -> int:
    count = pdfium.page_count(document)
    if count < 1:
        raise ItemError(stage, "empty_document", f"{name}: the document has no pages")
    return count


def _check_page(document: Any, page: int, stage: str, name: str) -> None:
    count = _page_count(document, stage, name)
    if page >= count:
        raise ItemError(stage, "no_such_page", f"{name}: page {page + 1} of a document of {count}")
