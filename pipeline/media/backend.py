"""Which libraries decode: a term of the key of every feature, and of all decoded frames."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import av
import PIL
from pypdfium2.version import PDFIUM_INFO

_READING = ("libavformat", "libavcodec")


def _libav(*names: str) -> str:
    return ",".join(f"{name}-{'.'.join(map(str, av.library_versions[name]))}" for name in names)


def _heif() -> str:
    try:
        return f",pillow-heif-{version('pillow-heif')}"
    except PackageNotFoundError:
        return ""


# What `pipeline.media.image` itself makes of the libraries' pixels; raised when that changes. 2: profiles to sRGB.
_IMAGE_RULES = 2

DECODE_BACKEND: str = f"pyav-{av.__version__},{_libav(*_READING, 'libswscale')},pillow-{PIL.__version__}"
SOUND_BACKEND: str = f"pyav-{av.__version__},{_libav(*_READING, 'libswresample')}"
PAGE_BACKEND: str = f"pdfium-{PDFIUM_INFO.build}"
IMAGE_BACKEND: str = f"pillow-{PIL.__version__},simplejpeg-{version('simplejpeg')},images-{_IMAGE_RULES}"
HEIF_BACKEND: str = IMAGE_BACKEND + _heif()
# What `pipeline.media` itself makes of the libraries' pixels, whatever they are of: a term of every key. Raised when
# other pixels come out of the same libraries.
DECODE_RULES = 1
