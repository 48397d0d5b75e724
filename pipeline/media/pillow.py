"""Pillow, set up once: which errors it raises on bad files, how an image is opened, and which way up it is."""

from __future__ import annotations

import struct
import zlib
from typing import BinaryIO

import PIL.Image
from PIL.ExifTags import Base
from PIL.Image import Image, Transpose

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


def open_image(file: BinaryIO, format: str) -> Image:
    """Read the header only. Raises one of `PILLOW_ERRORS`."""
    file.seek(0)
    return PIL.Image.open(file, formats=(format,))


def presented_transpose(image: Image) -> Transpose | None:
    """How to turn the stored pixels upright, by the EXIF orientation in the header; None when they are.

    Ask before the pixels are loaded. PNG: only EXIF ahead of the pixels counts, since looking for it behind them
    decodes the image. TIFF: Pillow turns the pixels itself and gives the turned size.
    """
    if image.format == "TIFF" or (image.format == "PNG" and "exif" not in image.info):
        return None
    try:
        orientation = image.getexif().get(Base.Orientation)
    except PILLOW_ERRORS:
        return None
    return _TRANSPOSES.get(orientation) if isinstance(orientation, int) else None


def presented_size(image: Image) -> tuple[int, int]:
    """(width, height) after the EXIF orientation."""
    width, height = image.size
    return (height, width) if presented_transpose(image) in SIDEWAYS else (width, height)
