"""Pillow, set up once: which errors it raises on bad files, how an image is opened, and which way up it is."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import io
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

import PIL
import PIL.Image
import PIL.ImageFile
from PIL import features
from PIL.ExifTags import Base
from PIL.Image import Image, Transpose

from pipeline.errors import ItemError
from pipeline.media.claims import check_avif, check_jp2, check_tiff

# Pillow's own limit warns, or raises, by a process-wide number. Admission has limits of its own, per item and before
# anything is allocated, so the number is switched off where Pillow is first imported and never touched again.
PIL.Image.MAX_IMAGE_PIXELS = None

# What Pillow's plugins let through on malformed files: parsers written over struct, zlib and indexing.
PILLOW_ERRORS = (
    OSError,
    EOFError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    RuntimeError,
    struct.error,
    zlib.error,
)

_TRANSPOSES = {
    2: Transpose.FLIP_LEFT_RIGHT,
    3: Transpose.ROTATE_180,
    4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270,
    7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}
# Of those, the ones after which width is height.
SIDEWAYS = {Transpose.TRANSPOSE, Transpose.ROTATE_270, Transpose.TRANSVERSE, Transpose.ROTATE_90}


# Formats whose decoder a build of Pillow may lack, by Pillow's name for it.
_OPTIONAL_CODECS = {"AVIF": "avif", "JPEG2000": "jpg_2000", "WEBP": "webp"}
_HEIF = "HEIF"
_forgiving = threading.Lock()


def open_image(file: BinaryIO, format: str, *, stage: str) -> Image:
    """Read the header only. Raises one of `PILLOW_ERRORS`, or `ItemError`: `unsupported_codec` where what decodes
    `format` is not installed, `corrupt_header` for claims that no decoder may believe."""
    missing = _missing_decoder(format)
    if missing is not None:
        raise ItemError(stage, "unsupported_codec", missing)
    if format == "TIFF":
        check_tiff(file, stage=stage)
    if format == "JPEG2000":
        check_jp2(file, stage=stage)
    file.seek(0)
    if format != "AVIF":
        return PIL.Image.open(file, formats=(format,))
    data = file.read()  # as Pillow would
    image = PIL.Image.open(io.BytesIO(data), formats=(format,))
    check_avif(data, image.size, stage=stage)
    return image


@functools.cache
def _missing_decoder(format: str) -> str | None:
    """What to do about the decoder of `format`; None when it is there, and ready."""
    if format == _HEIF:
        if importlib.util.find_spec("pillow_heif") is None:
            return "HEIC and HEIF need a decoder of their own: pip install 'headrace[heic]'"
        # Of the pictures in a file, the primary one; workers have a core each.
        importlib.import_module("pillow_heif").register_heif_opener(
            thumbnails=False, depth_images=False, aux_images=False, decode_threads=1
        )
    codec = _OPTIONAL_CODECS.get(format)
    if codec is None or features.check(codec):
        return None
    return f"this build of Pillow ({PIL.__version__}) has no decoder for {format}: pip install --force-reinstall pillow"


def reason(error: Exception) -> str:
    """What went wrong, the same each time: of a file that is no image Pillow tells the address in memory."""
    return "no such image" if isinstance(error, PIL.UnidentifiedImageError) else str(error)


@contextmanager
def truncation_forgiven() -> Iterator[None]:
    """Pillow takes files that end early for whole ones. A switch of the process: one thread at a time."""
    with _forgiving:
        PIL.ImageFile.LOAD_TRUNCATED_IMAGES = True
        try:
            yield
        finally:
            PIL.ImageFile.LOAD_TRUNCATED_IMAGES = False


def presented_transpose(image: Image) -> Transpose | None:
    """How to turn the stored pixels upright, by the EXIF orientation in the header; None when they are.

    Ask before the pixels are loaded. PNG: only EXIF ahead of the pixels counts, since looking for it behind them
    decodes the image. TIFF: Pillow turns the pixels itself and gives the turned size. HEIF: libheif does, by the
    container's own turns (`irot`, `imir`); EXIF and XMP only repeat them (ISO/IEC 23008-12, A.2.1), and pillow-heif
    takes them out.
    """
    if image.format == "TIFF" or (image.format == "PNG" and "exif" not in image.info):
        return None
    if image.format == "AVIF":
        # Pillow makes EXIF of the container's turns; what XMP repeats counts no more than in a HEIF.
        image.info.pop("xmp", None)
    try:
        orientation = image.getexif().get(Base.Orientation)
    except PILLOW_ERRORS:
        return None
    return _TRANSPOSES.get(orientation) if isinstance(orientation, int) else None


def presented_size(image: Image) -> tuple[int, int]:
    """(width, height) after the EXIF orientation."""
    width, height = image.size
    return (height, width) if presented_transpose(image) in SIDEWAYS else (width, height)
