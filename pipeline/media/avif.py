"""How large the pictures inside an AVIF are, which its container may be lying about. Pure.

libavif decodes what it finds, up to 268 megapixels, and scales that to the size of the container.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

_CONTAINERS = {b"moov", b"trak", b"mdia", b"minf", b"stbl"}
_MAX_PICTURES = 4_096  # tiles of a grid, its alpha's, and thumbnails
_SEQUENCE_HEADER = 1  # obu_type, AV1 bitstream specification 6.2.2


def coded_sizes(data: bytes) -> list[tuple[int, int]]:
    """(width, height) by the sequence headers with which the file's AV1 items and tracks begin, where there are any.

    Raises `ValueError` for more of them than a picture is made of.
    """
    found: list[tuple[int, int]] = []
    for number, start in enumerate(_starts(data)):
        if number == _MAX_PICTURES:
            raise ValueError(f"more than {_MAX_PICTURES} pictures in one file")
        try:
            found += _first_sizes(data[start : start + 256])
        except IndexError:  # ends early, or is no AV1
            continue
    return found


def _starts(data: bytes) -> Iterator[int]:
    """Where items and tracks begin in the file."""
    for kind, begin, end in _boxes(data, 0, len(data)):
        try:
            if kind == b"iloc":
                yield from _item_starts(data[begin:end])
            elif kind == b"stco":
                yield struct.unpack_from(">I", data, begin + 8)[0]
            elif kind == b"co64":
                yield struct.unpack_from(">Q", data, begin + 8)[0]
        except struct.error:
            continue


def _boxes(data: bytes, begin: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """(type, first and last byte of the content) of boxes, and of boxes in them (ISO/IEC 14496-12, 4.2)."""
    while begin + 8 <= end:
        size, kind = struct.unpack_from(">I4s", data, begin)
        head = 8
        if size == 1 and begin + 16 <= end:
            size, head = struct.unpack_from(">Q", data, begin + 8)[0], 16
        last = end if size == 0 else begin + size
        if last < begin + head:
            return
        yield kind, begin + head, min(last, end)
        if kind in _CONTAINERS or kind == b"meta":
            yield from _boxes(data, begin + head + (4 if kind == b"meta" else 0), min(last, end))
        begin = last


def _item_starts(box: bytes) -> Iterator[int]:
    """ISO/IEC 14496-12, 8.11.3, of items that lie in the file itself."""
    if len(box) < 6:
        return
    version = box[0]
    offset_bytes, length_bytes = box[4] >> 4, box[4] & 15
    base_bytes, index_bytes = box[5] >> 4, box[5] & 15 if version else 0
    at = 6
    wide = 4 if version == 2 else 2

    def number(size: int) -> int:
        nonlocal at
        at += size
        if at > len(box):
            raise struct.error("the box ends early")
        return int.from_bytes(box[at - size : at], "big")

    for _item in range(number(wide)):
        number(wide)
        method = number(2) & 15 if version else 0
        number(2)
        base = number(base_bytes)
        extents = number(2)
        if extents and method == 0:
            yield base + int.from_bytes(box[at + index_bytes : at + index_bytes + offset_bytes], "big")
        at += extents * (index_bytes + offset_bytes + length_bytes)


def _first_sizes(data: bytes) -> list[tuple[int, int]]:
    """Of the sequence headers among the OBUs that `data` starts with (5.3 of the specification)."""
    found, at = [], 0
    while at < len(data):
        kind, extended, sized = data[at] >> 3 & 15, data[at] >> 2 & 1, data[at] >> 1 & 1
        at += 1 + extended
        size = len(data) - at
        if sized:
            size, shift = 0, 0
            while True:
                size |= (data[at] & 127) << shift
                at, shift = at + 1, shift + 7
                if data[at - 1] < 128 or shift > 28:
                    break
        if kind == _SEQUENCE_HEADER:
            found.append(_size(_Bits(data[at : at + size])))
        at += size
    return found


class _Bits:
    def __init__(self, data: bytes) -> None:
        self._number, self._left = int.from_bytes(data, "big"), 8 * len(data)

    def read(self, count: int) -> int:
        """The next bits as a number. Raises `IndexError` when there are no more."""
        self._left -= count
        if self._left < 0:
            raise IndexError("the header ends early")
        return self._number >> self._left & ((1 << count) - 1)


def _size(bits: _Bits) -> tuple[int, int]:
    """(width, height) of a sequence header (5.5.1)."""
    bits.read(4)  # seq_profile, still_picture
    if bits.read(1):  # reduced_still_picture_header
        bits.read(5)
    else:
        _skip_operating_points(bits)
    width_bits, height_bits = bits.read(4) + 1, bits.read(4) + 1
    return bits.read(width_bits) + 1, bits.read(height_bits) + 1


def _skip_operating_points(bits: _Bits) -> None:
    has_decoder_model, delay_bits = 0, 0
    if bits.read(1):  # timing_info_present_flag
        bits.read(64)
        if bits.read(1):  # equal_picture_interval
            zeros = 0
            while not bits.read(1):
                zeros += 1
            bits.read(zeros)
        has_decoder_model = bits.read(1)
        if has_decoder_model:
            delay_bits = bits.read(5) + 1
            bits.read(42)
    has_delays = bits.read(1)
    for _ in range(bits.read(5) + 1):
        bits.read(12)
        if bits.read(5) > 7:
            bits.read(1)
        if has_decoder_model and bits.read(1):
            bits.read(2 * delay_bits + 1)
        if has_delays and bits.read(1):
            bits.read(4)
