"""What an image's header claims beside its size, held against its size before a decoder believes it.

A decoder that is told of a tile of 30,000 x 30,000 pixels allocates it, though the picture in it is 16 x 16. Only of
TIFFs, AVIFs and JP2s: the other decoders hold what they find against the size that they were given.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from pipeline.errors import ItemError
from pipeline.media.avif import coded_sizes

# TIFF 6.0, section 2, and BigTIFF for the types from 16 on; those whose values Pillow makes a tuple of.
_VALUE_BYTES = {3: 2, 4: 4, 5: 8, 6: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8}
_SIDES = (256, 257, 322, 323)  # of the image: width and length; of its tiles likewise
# A colour map of 16 bits has 196,608 values. Pillow takes 2 us and 40 bytes a value; of 10,000,000 offsets it made
# 2.3 GB, and was at it for 20 s.
_MAX_VALUES = 200_000
# Tiles may be larger than what they tile, by custom up to 1,024 a side in TIFFs.
_MAX_SPARE_PIXELS = 2048 * 2048
# There are 100 or so with a meaning.
_MAX_TAGS = 4_096
# Before its header a JP2 has a signature, its type, and seldom more.
_MAX_BOXES = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tag:
    number: int
    type: int
    count: int
    value: int  # or where the values are


def check_avif(data: bytes, size: tuple[int, int], *, stage: str) -> None:
    """Raise `ItemError` (`corrupt_header`) for a file of `size` = (width, height) with larger pictures in it."""
    for width, height in coded_sizes(data):
        if width * height > max(size[0] * size[1], _MAX_SPARE_PIXELS):
            raise ItemError(
                stage, "corrupt_header", f"AVIF of {size[0]}x{size[1]} pixels around one of {width}x{height}"
            )


def check_jp2(file: BinaryIO, *, stage: str) -> None:
    """Raise `ItemError` (`corrupt_header`) for a header that is longer than the file, which Pillow reads at once, or
    that comes behind more boxes than any file has. A file without one is the parser's to name."""
    num_bytes, at = file.seek(0, io.SEEK_END), 0
    for _ in range(_MAX_BOXES):
        file.seek(at)
        head = file.read(16)
        if len(head) < 16:
            return
        short, kind, long = struct.unpack(">I4sQ", head)
        length = long if short == 1 else short
        if kind == b"jp2h":
            if length > num_bytes - at:
                raise ItemError(stage, "corrupt_header", f"JP2 of {num_bytes:,} bytes with a header of {length:,}")
            return
        at += max(length, 8)  # what cannot be so short is the parser's to name, too
    raise ItemError(stage, "corrupt_header", f"JP2 without a header in its first {_MAX_BOXES} boxes")


def check_tiff(file: BinaryIO, *, stage: str) -> None:
    """Raise `ItemError` (`corrupt_header`) for tiles that are larger than their picture, or for more numbers than any
    picture needs. Reads the first directory; one that ends early is the parser's to name."""
    try:
        _check_directory(file, stage)
    except struct.error:
        return


def _check_directory(file: BinaryIO, stage: str) -> None:
    claimed: dict[int, int] = {}
    for tag in _tags(file, stage):
        if tag.type in _VALUE_BYTES and tag.count > _MAX_VALUES:
            raise ItemError(
                stage, "corrupt_header", f"TIFF with {tag.count:,} values in tag {tag.number}, {_MAX_VALUES:,} allowed"
            )
        claimed.setdefault(tag.number, tag.value)  # Pillow and libtiff take the first of a number
    width, height, tile_width, tile_length = (claimed.get(number, 0) for number in _SIDES)
    if tile_width * tile_length > max(width * height, _MAX_SPARE_PIXELS):
        raise ItemError(
            stage, "corrupt_header", f"TIFF of {width}x{height} pixels in tiles of {tile_width}x{tile_length}"
        )


def _tags(file: BinaryIO, stage: str) -> Iterator[_Tag]:
    """Of the first directory. Raises `struct.error` where the file ends."""
    file.seek(0)
    head = file.read(16)
    order = "<" if head[:2] == b"II" else ">"
    big = head[2:4] in (b"+\0", b"\0+")
    (start,) = struct.unpack_from(f"{order}Q", head, 8) if big else struct.unpack_from(f"{order}L", head, 4)
    file.seek(min(start, file.seek(0, io.SEEK_END)))
    (num_tags,) = struct.unpack(f"{order}Q", file.read(8)) if big else struct.unpack(f"{order}H", file.read(2))
    if num_tags > _MAX_TAGS:
        raise ItemError(stage, "corrupt_header", f"TIFF with {num_tags:,} tags, {_MAX_TAGS:,} allowed")
    layout = struct.Struct(f"{order}HHQ" if big else f"{order}HHL")
    field_bytes = 8 if big else 4
    for _ in range(num_tags):
        number, type, count = layout.unpack(file.read(layout.size))
        value = file.read(field_bytes)
        if len(value) < field_bytes:
            raise struct.error("the directory ends early")
        # Short values stand at the start of the field, in either order.
        used = value[: _VALUE_BYTES[type]] if type in _VALUE_BYTES and count == 1 else value
        yield _Tag(
            number=number, type=type, count=count, value=int.from_bytes(used, "little" if order == "<" else "big")
        )
