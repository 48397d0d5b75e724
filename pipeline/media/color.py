"""Colours of images that carry a profile (ICC.1), brought to sRGB, which is what models were trained on."""

from __future__ import annotations

import functools
import io

import numpy as np
import PIL.Image
from PIL import ImageCms
from PIL.Image import Image
from PIL.ImageCms import ImageCmsTransform

# What a transform can be made from, with the profiles' own name for it.
_SPACES = {"RGB": "RGB", "L": "GRAY", "CMYK": "CMYK"}
# No printer's profile is as large; what an image brings in its place is not worth parsing.
_MAX_PROFILE_BYTES = 4 * 2**20
# Of 8 bits. The sRGB profiles in circulation are written with three kinds of rounding and off by up to 1.
_SAME_LEVELS = 2
# (1, 216) colours, 6 levels a channel: what is left where it is by a profile that means sRGB.
_LATTICE = np.stack(np.meshgrid(*[np.arange(0, 256, 51, dtype=np.uint8)] * 3), axis=-1).reshape(1, -1, 3)


def srgb_transform(profile: bytes | None, mode: str) -> ImageCmsTransform | None:
    """What takes pixels of `mode` (RGB, L or CMYK) with that profile to sRGB, of mode RGB; by its perceptual intent.

    None where nothing is to be done: without a profile, for one that is sRGB in all but name, and for one that cannot
    be used (damaged, or of another colour space than the pixels), which viewers ignore, too.
    """
    return _transform(profile, mode) if profile and len(profile) <= _MAX_PROFILE_BYTES else None


# Reading a profile and making its transform takes 0.2 to 5 ms; a collection comes from a few cameras and programs.
@functools.lru_cache(maxsize=16)
def _transform(profile: bytes, mode: str) -> ImageCmsTransform | None:
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if source.profile.xcolor_space.strip() != _SPACES[mode]:
            return None
        transform = ImageCms.buildTransform(source, ImageCms.createProfile("sRGB"), mode, "RGB")
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
        return None
    return None if mode != "CMYK" and _is_identity(transform, mode) else transform


def _is_identity(transform: ImageCmsTransform, mode: str) -> bool:
    colours = PIL.Image.fromarray(_LATTICE).convert(mode)
    expected = np.asarray(colours.convert("RGB")).astype(int)
    return bool(np.abs(np.asarray(transform.apply(colours)) - expected).max() <= _SAME_LEVELS)


def as_srgb(image: Image, transform: ImageCmsTransform | None) -> Image:
    """`image` in mode RGB; itself where it is that already and there is nothing to do."""
    if transform is None:
        return image if image.mode == "RGB" else image.convert("RGB")
    return transform.apply(image)
