"""PDFium, one call at a time: what opens a document, a page or its text closes it again.

PDFium must not be called from two threads at a time, whatever the documents: whoever has one open has the lock of the
process, also while its file is read. Called without pypdfium2's own classes, which leave closing to the garbage
collector, and so to any thread at any time.
"""

from __future__ import annotations

import ctypes
import io
import math
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pypdfium2.raw as pdfium

_LOCKED = (pdfium.FPDF_ERR_PASSWORD, pdfium.FPDF_ERR_SECURITY)
_DRAWING = pdfium.FPDF_ANNOT | pdfium.FPDF_REVERSE_BYTE_ORDER
_LETTERS = 200  # of a page, asked for the way they stand
_LOCK = threading.Lock()


class PdfiumError(Exception):
    """PDFium has refused. `is_locked` when the document asks for a password, or is encrypted in an unknown way."""

    def __init__(self, message: str, *, is_locked: bool = False) -> None:
        super().__init__(message)
        self.is_locked = is_locked


@contextmanager
def opened(file: bytes | BinaryIO) -> Iterator[Any]:
    """The document; no other thread has one meanwhile. `file` stays open, and what its reads raise is raised.

    Raises `PdfiumError` when it cannot be opened.
    """
    if isinstance(file, io.BytesIO):
        file = file.getvalue()
    blocks = None if isinstance(file, bytes) else _Blocks(file)
    try:
        with _LOCK:
            document = _load(file, blocks)
            if not document:
                error = pdfium.FPDF_GetLastError()
                raise PdfiumError(f"PDFium cannot open it (error {error})", is_locked=error in _LOCKED)
            try:
                yield document
            finally:
                pdfium.FPDF_CloseDocument(document)
    finally:
        if blocks is not None and blocks.failure is not None:
            raise blocks.failure


def page_count(document: Any) -> int:
    """The number that the document says, or that PDFium found."""
    return int(pdfium.FPDF_GetPageCount(document))


def page_size(document: Any, page: int) -> tuple[float, float]:
    """(width, height) in points of what is shown of a page: MediaBox within CropBox, turned. Raises `PdfiumError`."""
    size = pdfium.FS_SIZEF()
    if not pdfium.FPDF_GetPageSizeByIndexF(document, page, size):
        raise PdfiumError("PDFium does not find the page")
    return float(size.width), float(size.height)


def draw(document: Any, page: int, pixels: npt.NDArray[np.uint8]) -> None:
    """Draw a page, its annotations and form fields over all of `pixels`, `uint8 (H, W, 3)` RGB.

    What cannot be drawn is left out. Raises `PdfiumError` when there is no page, or the picture is larger than PDFium's
    are.
    """
    height, width, _ = pixels.shape
    area = (0, 0, width, height, 0, _DRAWING)
    with _form(document) as form, _loaded(document, page, form) as shown, _bitmap(pixels) as bitmap:
        pdfium.FPDF_RenderPageBitmap(bitmap, shown, *area)
        if form is not None:
            pdfium.FPDF_FFLDraw(form, bitmap, shown, *area)


def text(document: Any, page: int) -> str:
    """The text of a page, as PDFium orders and marks it. Raises `PdfiumError`."""
    with _loaded(document, page) as loaded:
        with _text_layer(loaded) as layer:
            turn = _upright_turn(layer)
            if turn in (None, pdfium.FPDFPage_GetRotation(loaded)):
                return _whole_text(layer)
        # Where letters are shown running down the page, PDFium gives the lines of a page from the last to the first.
        pdfium.FPDFPage_SetRotation(loaded, turn)
        with _text_layer(loaded) as layer:
            return _whole_text(layer)


class _Blocks:
    """A file as PDFium reads it. Its failure is kept: ctypes prints what is raised in a callback, and goes on."""

    def __init__(self, file: BinaryIO) -> None:
        self.failure: Exception | None = None
        self._file = file
        callback = dict(pdfium.FPDF_FILEACCESS._fields_)["m_GetBlock"]
        self.access = pdfium.FPDF_FILEACCESS(m_FileLen=file.seek(0, io.SEEK_END), m_GetBlock=callback(self._get_block))

    def _get_block(self, _: Any, position: int, target: Any, size: int) -> int:
        """1 when `target` has the `size` bytes from `position`, 0 once anything has failed."""
        if self.failure is not None:
            return 0
        try:
            self._file.seek(position)
            data = self._file.read(size)
        except Exception as error:
            self.failure = error
            return 0
        ctypes.memmove(target, data, len(data))
        return int(len(data) == size)


def _load(file: bytes | BinaryIO, blocks: _Blocks | None) -> Any:
    if blocks is not None:
        return pdfium.FPDF_LoadCustomDocument(blocks.access, None)
    assert isinstance(file, bytes)
    return pdfium.FPDF_LoadMemDocument64(file, len(file), None)


@contextmanager
def _form(document: Any) -> Iterator[Any]:
    """What fills form fields in, None for a document that has none. Pages have to be loaded behind it."""
    if pdfium.FPDF_GetFormType(document) == pdfium.FORMTYPE_NONE:
        yield None
        return
    settings = pdfium.FPDF_FORMFILLINFO(version=2)
    form = pdfium.FPDFDOC_InitFormFillEnvironment(document, settings)
    if not form:
        raise PdfiumError("PDFium cannot read the form")
    try:
        yield form
    finally:
        pdfium.FPDFDOC_ExitFormFillEnvironment(form)


@contextmanager
def _loaded(document: Any, page: int, form: Any = None) -> Iterator[Any]:
    loaded = pdfium.FPDF_LoadPage(document, page)
    if not loaded:
        raise PdfiumError("PDFium cannot load the page")
    try:
        if form is not None:
            pdfium.FORM_OnAfterLoadPage(loaded, form)
        yield loaded
    finally:
        if form is not None:
            pdfium.FORM_OnBeforeClosePage(loaded, form)
        pdfium.FPDF_ClosePage(loaded)


@contextmanager
def _bitmap(pixels: npt.NDArray[np.uint8]) -> Iterator[Any]:
    """`uint8 (H, W, 3)` as what PDFium draws on, in the same memory."""
    height, width, channels = pixels.shape
    memory = pixels.ctypes.data_as(ctypes.c_void_p)
    bitmap = pdfium.FPDFBitmap_CreateEx(width, height, pdfium.FPDFBitmap_BGR, memory, width * channels)
    if not bitmap:
        raise PdfiumError(f"PDFium draws no picture of {width} x {height} pixels")
    try:
        yield bitmap
    finally:
        pdfium.FPDFBitmap_Destroy(bitmap)


@contextmanager
def _text_layer(page: Any) -> Iterator[Any]:
    layer = pdfium.FPDFText_LoadPage(page)
    if not layer:
        raise PdfiumError("PDFium cannot read the page's text")
    try:
        yield layer
    finally:
        pdfium.FPDFText_ClosePage(layer)


def _whole_text(layer: Any) -> str:
    """From the first to the last letter that has a place in the text: a range that others begin or end is empty.

    Not asked for within bounds, which loses line ends where the page is turned.
    """
    letters = range(pdfium.FPDFText_CountChars(layer))
    first, start = next(_placed(layer, letters), (0, 0))
    last, end = next(_placed(layer, reversed(letters)), (-1, -1))
    if last < first:
        return ""
    units = (ctypes.c_ushort * (2 * (end - start + 1) + 1))()  # at most two a letter, and one for the end
    count = pdfium.FPDFText_GetText(layer, first, last - first + 1, units)
    return bytes(units)[: 2 * max(0, count - 1)].decode("utf-16-le", errors="ignore")


def _placed(layer: Any, letters: Iterable[int]) -> Iterator[tuple[int, int]]:
    """(letter, its place in the text) of those that have one."""
    places = ((letter, pdfium.FPDFText_GetTextIndexFromCharIndex(layer, letter)) for letter in letters)
    return ((letter, place) for letter, place in places if place >= 0)


def _upright_turn(layer: Any) -> int | None:
    """By how many quarters a page has to be turned for most of its letters to stand upright; None without letters."""
    letters = range(min(_LETTERS, pdfium.FPDFText_CountChars(layer)))
    turns = Counter(-round(pdfium.FPDFText_GetCharAngle(layer, letter) / (math.pi / 2)) % 4 for letter in letters)
    return turns.most_common(1)[0][0] if turns else None
