"""Images to pixels."""

from __future__ import annotations

import io
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import PIL.Image
import pyarrow as pa
import simplejpeg
from PIL.Image import Image

from pipeline.errors import ItemError
from pipeline.media.pillow import PILLOW_ERRORS, SIDEWAYS, open_image, presented_transpose
from pipeline.media.resize import Resample, resize_frames
from pipeline.media.sniff import identify
from pipeline.schema import Frames

_WHITE = (255, 255, 255, 255)
_JPEG = "JPEG"
_TRUNCATION_WORDS = ("truncat", "unexpected end", "premature")


def decode_image(
    data: bytes | BinaryIO,
    size: tuple[int, int] | None,
    resample: Resample = "bicubic",
    *,
    dct_scaled: bool = False,
) -> Frames:
    """One frame, RGB, upright by EXIF, resized to `size` = (height, width) where given.

    With `dct_scaled` a JPEG comes out of its decoder at 1/2, 1/4 or 1/8 of its size, the smallest that is not below
    `size`, and is resized from there: faster, and not what the model's processor would have made.

    Transparency is composited on white; 16-bit grey keeps its high byte's scale (value / 257); CMYK converts as Pillow
    does; an animation shows its first frame. Raises `ItemError` (stage `decode`): `truncated`, `corrupt`,
    `unsupported_mode`.
    """
    file = io.BytesIO(data) if isinstance(data, bytes) else data
    pixels = _upright(file, size if dct_scaled else None)[np.newaxis]  # (1, H, W, 3 or 4)
    resized = pixels if size is None else resize_frames(pixels, size, resample)
    return Frames(pixels=np.ascontiguousarray(resized[..., :3]), pts_seconds=(0.0,))


def _upright(file: BinaryIO, least: tuple[int, int] | None) -> npt.NDArray[np.uint8]:
    """uint8 (H, W, 3 or 4): red, green, blue, and where it is Pillow's own memory what that has to fill four bytes.

    At the size of the file, or where its decoder scales at no less than `least` = (height, width).
    """
    signature = identify(file, stage="decode", name="image")
    try:
        with open_image(file, signature.format) as image:
            transpose = presented_transpose(image)
            if least is not None and signature.format == _JPEG:
                height, width = least if transpose not in SIDEWAYS else least[::-1]
                image.draft(image.mode, (width, height))
            elif transpose is None and image.format == _JPEG and image.mode == "RGB":
                pixels = _jpeg_pixels(file, image.size)
                if pixels is not None:
                    return pixels
            rgb = _to_rgb(image)
            return _pixels(rgb if transpose is None else rgb.transpose(transpose))
    except PILLOW_ERRORS as error:
        raise _failure(file, signature.format, error) from error


def _jpeg_pixels(file: BinaryIO, size: tuple[int, int]) -> npt.NDArray[np.uint8] | None:
    """uint8 (H, W, 3) of a JPEG without fault and of `size` = (width, height); None when that is for Pillow to judge.

    The same library as Pillow's makes the same pixels: at once, where Pillow has it give a row at a time into memory of
    four bytes a pixel. 3.9 ms for 5.0, of JPEGs of 1.1 megapixels.
    """
    file.seek(0)
    data = file.read()  # of a BytesIO its own bytes, not a copy
    try:
        # Before anything is allocated: it is Pillow's idea of the size that was admitted.
        height, width, _, _ = simplejpeg.decode_jpeg_header(data)
        return simplejpeg.decode_jpeg(data) if (width, height) == size else None
    except ValueError:
        return None


def _pixels(image: Image) -> npt.NDArray[np.uint8]:
    # Copies cost more than the decoder: of the time of a process that decodes JPEGs of a megapixel it took 32 %, making
    # one RGB image of another and an array of that 34 %.
    try:
        shared = pa.array(image)
    except ValueError:  # in several blocks of memory, as large images are
        return np.array(image)
    return np.asarray(shared.flatten().to_numpy()).reshape(image.height, image.width, 4)


def _to_rgb(image: Image) -> Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        image.load()
        return image
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        pixels = image.convert("RGBA")
        return PIL.Image.alpha_composite(PIL.Image.new("RGBA", pixels.size, _WHITE), pixels).convert("RGB")
    if image.mode == "I" or image.mode.startswith("I;16"):
        values = np.asarray(image).astype(np.int64)
        return PIL.Image.fromarray(((values.clip(0, 65535) + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.mode in ("F", "LAB"):
        raise ItemError(
            "decode", "unsupported_mode", f"{image.format} with pixels of mode {image.mode}: no one scale to 8 bits"
        )
    return image.convert("RGB")


def _failure(file: BinaryIO, format: str, error: Exception) -> ItemError:
    cut_off = any(word in str(error).lower() for word in _TRUNCATION_WORDS) or _riff_is_short(file, format)
    code = "truncated" if cut_off or isinstance(error, EOFError) else "corrupt"
    return ItemError("decode", code, f"{format}: {error}")


def _riff_is_short(file: BinaryIO, format: str) -> bool:
    """True for a WebP with fewer bytes than its header says; libwebp's own message does not tell."""
    if format != "WEBP":
        return False
    num_bytes = file.seek(0, io.SEEK_END)
    file.seek(4)
    return num_bytes < 8 + int.from_bytes(file.read(4), "little")
