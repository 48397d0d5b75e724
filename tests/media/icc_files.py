"""Profiles written by hand (ICC.1:2001-04), so that what they do to a colour is arithmetic."""

import struct
from collections.abc import Sequence

import numpy as np

# Red, green and blue as XYZ adapted to D50, one a row.
ADOBE_RGB = np.array([(0.60974, 0.31111, 0.01947), (0.20528, 0.62567, 0.06087), (0.14919, 0.06322, 0.74457)])
SRGB = np.array([(0.43607, 0.22249, 0.01392), (0.38515, 0.71687, 0.09708), (0.14307, 0.06061, 0.71410)])
_D50 = (0.9642, 1.0, 0.8249)


def _fixed(values: Sequence[float]) -> bytes:
    return b"".join(struct.pack(">i", round(value * 65536)) for value in values)


def _profile(kind: bytes, space: bytes, connection: bytes, tags: dict[bytes, bytes]) -> bytes:
    table, body = struct.pack(">I", len(tags)), b""
    start = 128 + 4 + 12 * len(tags)
    for name, data in tags.items():
        table += struct.pack(">4sII", name, start + len(body), len(data))
        body += data + bytes(-len(data) % 4)
    size = start + len(body)
    head = struct.pack(">I4sI4s4s4s", size, b"lcms", 0x02400000, kind, space, connection)
    head = head + bytes(12) + b"acsp" + bytes(28) + _fixed(_D50)
    return head.ljust(128, b"\0") + table + body


def _text(name: str) -> bytes:
    text = name.encode() + b"\0"
    return b"desc\0\0\0\0" + struct.pack(">I", len(text)) + text + bytes(78)


def _xyz(values: Sequence[float]) -> bytes:
    return b"XYZ \0\0\0\0" + _fixed(values)


def _gamma(gamma: float) -> bytes:
    return b"curv\0\0\0\0" + struct.pack(">IH", 1, round(gamma * 256))


def rgb_profile(primaries: np.ndarray, gamma: float) -> bytes:
    """Three primaries and one power law."""
    colours = {f"{c}XYZ".encode(): _xyz(xyz) for c, xyz in zip("rgb", primaries, strict=True)}
    curves = {f"{c}TRC".encode(): _gamma(gamma) for c in "rgb"}
    return _profile(b"mntr", b"RGB ", b"XYZ ", {b"desc": _text("test"), b"wtpt": _xyz(_D50), **colours, **curves})


def grey_profile(gamma: float) -> bytes:
    """A power law."""
    return _profile(b"mntr", b"GRAY", b"XYZ ", {b"desc": _text("test"), b"wtpt": _xyz(_D50), b"kTRC": _gamma(gamma)})


def cmyk_profile(lightness: Sequence[float]) -> bytes:
    """Inks that make grey: no ink is white, all of one is L* = `lightness` (0 to 100) of it, more inks are black."""
    corners = []
    for index in range(16):
        inks = [k for k in range(4) if index >> (3 - k) & 1]  # the last ink varies fastest
        level = 100.0 if not inks else lightness[inks[0]] if len(inks) == 1 else 0.0
        corners += [round(level * 2.55), 128, 128]
    ramp = bytes(range(256))
    lut = b"mft1\0\0\0\0" + bytes([4, 3, 2, 0]) + _fixed([1, 0, 0, 0, 1, 0, 0, 0, 1])
    table = lut + ramp * 4 + bytes(corners) + ramp * 3
    return _profile(b"prtr", b"CMYK", b"Lab ", {b"desc": _text("test"), b"wtpt": _xyz(_D50), b"A2B0": table})


def srgb_level(linear: np.ndarray) -> np.ndarray:
    """0 to 255 of linear light from 0 to 1 (IEC 61966-2-1)."""
    light = np.clip(linear, 0, 1)
    return 255 * np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)


def rgb_as_srgb(pixels: np.ndarray, primaries: np.ndarray, gamma: float) -> np.ndarray:
    """What `rgb_profile` says of uint8 (…, 3), in sRGB."""
    light = (pixels / 255.0) ** gamma
    return srgb_level(light @ primaries @ np.linalg.inv(SRGB))


def grey_of_lightness(lightness: float) -> float:
    """The sRGB level of L* (CIE 1976)."""
    f = (lightness + 16) / 116
    return float(srgb_level(np.array(f**3 if lightness > 8 else lightness / 903.3)))
