"""Images to pixels."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import PIL.Image
import pyarrow as pa
import simplejpeg
from PIL.Image import Image
from PIL.ImageCms import ImageCmsTransform

from pipeline.errors import ItemError
from pipeline.media.color import as_srgb, srgb_transform
from pipeline.media.pillow import (
    PILLOW_ERRORS,
    SIDEWAYS,
    open_image,
    presented_transpose,
    reason,
    truncation_forgiven,
)
from pipeline.media.png import png_pixels
from pipeline.media.resize import Resample, resize_frames
from pipeline.media.sniff import identify
from pipeline.media.webp import webp_pixels
from pipeline.schema import DEFAULT_IMAGE_RULES, Frames, ImageRules

_JPEG, _PNG, _WEBP = "JPEG", "PNG", "WEBP"
_START_OF_SCAN = b"\xff\xda"
# Encoders write about ten.
_MAX_SCANS = 200
_GREY_MODES = ("1", "LA", "La", "L", "I")  # "LAB" has been refused
# The formats of which Pillow gives what a file that ends early has of its pixels.
_KEPT_IN_PART = {"JPEG", "PNG"}
# What stands where nothing was decoded, by mode. Of a palette there is no grey: it is the first colour.
_GREY: dict[str, int | tuple[int, ...]] = {
    "L": 128,
    "LA": (128, 255),
    "I;16": 128 * 257,
    "RGB": (128, 128, 128),
    "RGBA": (128, 128, 128, 255),
}
_TRUNCATION_WORDS = ("truncat", "unexpected end", "premature")


def decode_image(
    data: bytes | BinaryIO,
    size: tuple[int, int] | None,
    resample: Resample = "bicubic",
    *,
    dct_scaled: bool = False,
    rules: ImageRules = DEFAULT_IMAGE_RULES,
    admitted: tuple[int, int] | None = None,
) -> Frames:
    """One frame, RGB, upright by EXIF, resized to `size` = (height, width) where given.

    With `dct_scaled` a JPEG comes out of its decoder at 1/2, 1/4 or 1/8 of its size, the smallest that is not below
    `size`, and is resized from there: faster, and not what the model's processor would have made.

    Transparency is composited on `rules.background`; 16-bit grey keeps its high byte's scale (value / 257), 16-bit
    colour its high byte, as Pillow has it; CMYK converts as Pillow does, or by its profile; an animation shows its
    first frame. Colours with a profile other than sRGB become sRGB, those of an opaque RGB image when it is resized (it
    takes 17 ms a megapixel, four times the decoder of a JPEG); a profile that cannot be used is as good as none.

    Raises `ItemError` (stage `decode`): `truncated`, `corrupt`, `unsupported_mode`, `unsupported_codec`, and
    `wrong_size` for a file that does not show `admitted` = (height, width), where given, before it is decoded.
    """
    file = io.BytesIO(data) if isinstance(data, bytes) else data
    draft = size if dct_scaled else None
    try:
        shown = _upright(file, draft, rules, admitted)
    except ItemError as error:
        is_kept = error.code == "truncated" and rules.keep_truncated
        if not is_kept or identify(file, stage="decode", name="image").format not in _KEPT_IN_PART:
            raise
        with truncation_forgiven():
            shown = _upright(file, draft, rules, admitted, kept=True)
    pixels = shown.pixels[np.newaxis]  # (1, H, W, 3 or 4)
    resized = np.ascontiguousarray((pixels if size is None else resize_frames(pixels, size, resample))[..., :3])
    if shown.to_srgb is not None:
        resized = np.asarray(as_srgb(PIL.Image.fromarray(resized[0]), shown.to_srgb))[np.newaxis]
    return Frames(pixels=resized, pts_seconds=(0.0,))


def _check_scans(file: BinaryIO) -> None:
    """A progressive JPEG is gone over by each of its scans: of 16 megapixels for 10 ms each, which may be 31 bytes."""
    file.seek(0)
    num_scans = file.read().count(_START_OF_SCAN)  # within a scan its bytes cannot stand next to each other
    if num_scans > _MAX_SCANS:
        raise ItemError("decode", "corrupt", f"JPEG in {num_scans:,} scans, {_MAX_SCANS} allowed")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shown:
    """uint8 (H, W, 3 or 4): red, green, blue, and where it is Pillow's own memory what that has to fill four bytes.

    `to_srgb` is what these colours have still to go through.
    """

    pixels: npt.NDArray[np.uint8]
    to_srgb: ImageCmsTransform | None


def _upright(
    file: BinaryIO,
    least: tuple[int, int] | None,
    rules: ImageRules,
    admitted: tuple[int, int] | None,
    kept: bool = False,
) -> _Shown:
    """At the size of the file, or where its decoder scales at no less than `least` = (height, width).

    With `kept`, what the decoder does not reach is grey.
    """
    signature = identify(file, stage="decode", name="image")
    try:
        with open_image(file, signature.format, stage="decode") as image:
            transpose = presented_transpose(image)
            _check_size(image.size if transpose not in SIDEWAYS else image.size[::-1], admitted)
            if signature.format == _JPEG and "progressive" in image.info:
                _check_scans(file)
            stored = image.size
            if signature.format == _JPEG and least is not None:
                height, width = least if transpose not in SIDEWAYS else least[::-1]
                image.draft(image.mode, (width, height))
            if transpose is None and image.mode == "RGB" and "transparency" not in image.info:
                pixels = _plain_pixels(file, image, signature.format, stored)
                if pixels is not None:
                    return _Shown(pixels=pixels, to_srgb=srgb_transform(image.info.get("icc_profile"), "RGB"))
            if kept and image.mode in _GREY:
                image.im = PIL.Image.new(image.mode, image.size, _GREY[image.mode]).im
            size = image.size
            source = _png_with_alpha(file, image) if signature.format == _PNG and image.mode == "RGBA" else image
            rgb, to_srgb = _to_rgb(source, rules.background_rgb)
            if rgb.size != size:
                raise ItemError("decode", "corrupt", f"{signature.format} of {size} decodes to {rgb.size} pixels")
            return _Shown(pixels=_pixels(rgb if transpose is None else rgb.transpose(transpose)), to_srgb=to_srgb)
    except PILLOW_ERRORS as error:
        raise _failure(file, signature.format, error) from error


def _check_size(shown: tuple[int, int], admitted: tuple[int, int] | None) -> None:
    """The file may have been replaced since it was probed, if nothing told."""
    if admitted is not None and shown[::-1] != admitted:
        raise ItemError(
            "decode", "wrong_size", f"{shown[0]}x{shown[1]} pixels where {admitted[1]}x{admitted[0]} were admitted"
        )


def _plain_pixels(file: BinaryIO, image: Image, format: str, stored: tuple[int, int]) -> npt.NDArray[np.uint8] | None:
    """uint8 (H, W, 3) of an opaque RGB `image`, which has yet to be decoded, without Pillow; None where Pillow has to.

    `stored` is its size = (width, height) in the file.
    """
    if format == _JPEG:
        return _jpeg_pixels(file, stored, image.size)
    if format == _WEBP:
        file.seek(0)
        return webp_pixels(file.read(), stored)
    return _png_pixels(file, image) if format == _PNG else None


def _png_pixels(file: BinaryIO, image: Image) -> npt.NDArray[np.uint8] | None:
    """uint8 (H, W, a channel for each of `image`'s), or None."""
    if getattr(image, "is_animated", False):
        return None
    file.seek(0)
    pixels = png_pixels(file.read(), image.size)
    return pixels if pixels is not None and pixels.shape[2] == len(image.mode) else None


def _png_with_alpha(file: BinaryIO, image: Image) -> Image:
    """The same image decoded otherwise where that can be; `image` itself, not decoded, where not."""
    pixels = _png_pixels(file, image)
    if pixels is None:
        return image
    decoded = PIL.Image.fromarray(pixels)
    decoded.info = image.info
    return decoded


def _jpeg_pixels(file: BinaryIO, size: tuple[int, int], scaled: tuple[int, int]) -> npt.NDArray[np.uint8] | None:
    """uint8 (H, W, 3) of a JPEG without fault and of `size` = (width, height), which its decoder scales to `scaled`.

    None when that is for Pillow to judge. The same library as Pillow's makes the same pixels: at once, where Pillow has
    it give a row at a time into memory of four bytes a pixel. 3.9 ms for 5.0, of JPEGs of 1.1 megapixels.
    """
    file.seek(0)
    data = file.read()  # of a BytesIO its own bytes, not a copy
    try:
        # Before anything is allocated: it is Pillow's idea of the size that was admitted.
        height, width, _, _ = simplejpeg.decode_jpeg_header(data)
        if (width, height) != size:
            return None
        # Of the scales that it knows it takes the smallest that is not below this: the very one.
        pixels: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(data, min_height=scaled[1], min_width=scaled[0])
        return pixels
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


def _to_rgb(image: Image, background: tuple[int, int, int]) -> tuple[Image, ImageCmsTransform | None]:
    """RGB on `background`, and what its colours have still to go through to be sRGB."""
    if image.mode in ("F", "LAB"):
        raise ItemError(
            "decode", "unsupported_mode", f"{image.format} with pixels of mode {image.mode}: no one scale to 8 bits"
        )
    profile = image.info.get("icc_profile")
    if image.mode == "RGB" and "transparency" not in image.info:
        image.load()
        return image, srgb_transform(profile, "RGB")
    if image.mode == "CMYK":
        return as_srgb(image, srgb_transform(profile, "CMYK")), None
    pixels = _straight(image)
    if profile is not None:
        pixels = _with_profile(pixels, profile, is_grey=image.mode.startswith(_GREY_MODES))
    if pixels.mode == "RGB":
        return pixels, None
    behind = PIL.Image.new("RGBA", pixels.size, (*background, 255))
    return PIL.Image.alpha_composite(behind, pixels).convert("RGB"), None


def _straight(image: Image) -> Image:
    """RGB, or RGBA where anything can be transparent."""
    if image.mode == "I" or image.mode.startswith("I;16"):
        values = np.asarray(image).astype(np.int64)
        grey = PIL.Image.fromarray(((values.clip(0, 65535) + 128) // 257).astype(np.uint8))
        clear = image.info.get("transparency")
        if clear is not None:
            grey.putalpha(PIL.Image.fromarray(np.where(values == clear, 0, 255).astype(np.uint8)))
        return grey.convert("RGB" if clear is None else "RGBA")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        pixels = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        # Of BMPs the fourth byte was long without a meaning, and is 0 in many that are not to be white all over.
        is_filler = image.format == "BMP" and pixels.getchannel("A").getextrema() == (0, 0)
        return pixels.convert("RGB") if is_filler else pixels
    return image.convert("RGB")


def _with_profile(pixels: Image, profile: bytes, *, is_grey: bool) -> Image:
    """RGB or RGBA in sRGB. A grey picture, whose three channels are one, may have a profile of grey or of colours."""
    grey = srgb_transform(profile, "L") if is_grey else None
    transform = grey or srgb_transform(profile, "RGB")
    if transform is None:
        return pixels
    colours = as_srgb(pixels.getchannel("R") if grey else pixels.convert("RGB"), transform)
    if pixels.mode == "RGBA":
        colours.putalpha(pixels.getchannel("A"))
    return colours


def _failure(file: BinaryIO, format: str, error: Exception) -> ItemError:
    cut_off = any(word in str(error).lower() for word in _TRUNCATION_WORDS) or _riff_is_short(file, format)
    code = "truncated" if cut_off or isinstance(error, EOFError) else "corrupt"
    return ItemError("decode", code, f"{format}: {reason(error)}")


def _riff_is_short(file: BinaryIO, format: str) -> bool:
    """True for a WebP with fewer bytes than its header says; libwebp's own message does not tell."""
    if format != "WEBP":
        return False
    num_bytes = file.seek(0, io.SEEK_END)
    file.seek(4)
    return num_bytes < 8 + int.from_bytes(file.read(4), "little")
