"""Which libraries decode: a term of every feature's key."""

from __future__ import annotations

import av
import PIL
from pypdfium2.version import PDFIUM_INFO

_READING = ("libavformat", "libavcodec")


def _libav(*names: str) -> str:
    return ",".join(f"{name}-{'.'.join(map(str, av.library_versions[name]))}" for name in names)


DECODE_BACKEND: str = f"pyav-{av.__version__},{_libav(*_READING, 'libswscale')},pillow-{PIL.__version__}"
SOUND_BACKEND: str = f"pyav-{av.__version__},{_libav(*_READING, 'libswresample')}"
PAGE_BACKEND: str = f"pdfium-{PDFIUM_INFO.build}"
