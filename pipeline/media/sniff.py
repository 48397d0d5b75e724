"""What a file is, from its first bytes; names and extensions are never asked. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import BinaryIO

from pipeline.errors import ItemError
from pipeline.schema import Modality

HEAD_BYTES = 1024  # a signature needs at most 389: three MPEG-TS packets of 192 bytes and their offset

_BMP_HEADER_SIZES = {12, 40, 52, 56, 64, 108, 124}
_AVIF_BRANDS = {b"avif", b"avis"}
_HEIC_BRANDS = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"}
# Brands of any picture in this container: which codec it is in, another of the file's brands says.
_PICTURE_BRANDS = {b"mif1", b"msf1"}
_MOV_BOXES = {b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot"}

_IMAGE_PREFIXES = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"II*\x00", "TIFF"),
    (b"MM\x00*", "TIFF"),
    (b"II+\x00", "TIFF"),
    (b"MM\x00+", "TIFF"),
    (b"\x00\x00\x00\x0cjP  \r\n\x87\n", "JPEG2000"),
    (b"\xff\x4f\xff\x51", "JPEG2000"),
)
_MEDIA_PREFIXES = (
    (b"\x1a\x45\xdf\xa3", "matroska"),
    (b"FLV\x01", "flv"),
    (b"OggS", "ogg"),
    (b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", "asf"),
    (b"\x00\x00\x01\xba", "mpeg"),
    (b"\x00\x00\x01\xb3", "mpegvideo"),
    (b"DKIF", "ivf"),
    (b"ID3", "mp3"),
    (b"fLaC", "flac"),
)
_PDF_MARK = b"%PDF-"
_RIFF_FORMATS = {b"AVI ": "avi", b"WAVE": "wav"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """`format` is what opens the file: a Pillow format for images, PDF for pages, a libav demuxer for everything else.

    A container of sound only counts as video here: whether it has pictures is known once it is open.
    """

    modality: Modality
    format: str


def sniff(head: bytes) -> Signature | None:
    """The signature that the first `HEAD_BYTES` of a file carry, or None when they carry no known one."""
    image = _image_format(head)
    if image is not None:
        return Signature(modality="image", format=image)
    media = _media_format(head)
    if media is not None:
        return Signature(modality="video", format=media)
    # Readers of PDF take what stands before the mark for rubbish, so this comes last.
    return Signature(modality="page", format="PDF") if _PDF_MARK in head else None


def identify(file: BinaryIO, *, stage: str, name: str) -> Signature:
    """The file's signature. Raises `ItemError` (`unknown_format`) when there is none."""
    file.seek(0)
    head = file.read(HEAD_BYTES)
    signature = sniff(head)
    if signature is None:
        raise ItemError(stage, "unknown_format", f"{name}: no known image, video or document starts with {head[:16]!r}")
    return signature


def _image_format(head: bytes) -> str | None:
    for prefix, name in _IMAGE_PREFIXES:
        if head.startswith(prefix):
            return name
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WEBP"
    # Two letters are a weak signature ("BM" also starts sentences): the size of the next header must be one there is.
    if head[:2] == b"BM" and int.from_bytes(head[14:18], "little") in _BMP_HEADER_SIZES:
        return "BMP"
    return _boxed_image_format(head) if head[4:8] == b"ftyp" else None


def _boxed_image_format(head: bytes) -> str | None:
    brand = head[8:12]
    if brand in _PICTURE_BRANDS:
        end = min(int.from_bytes(head[:4], "big"), len(head))
        compatible = {head[at : at + 4] for at in range(16, end, 4)}
        return "AVIF" if compatible & _AVIF_BRANDS and not compatible & _HEIC_BRANDS else "HEIF"
    if brand in _HEIC_BRANDS:
        return "HEIF"
    return "AVIF" if brand in _AVIF_BRANDS else None


def _media_format(head: bytes) -> str | None:
    for prefix, name in _MEDIA_PREFIXES:
        if head.startswith(prefix):
            return name
    if head[:4] == b"RIFF":
        return _RIFF_FORMATS.get(head[8:12])
    if head[4:8] == b"ftyp":
        return "mov"
    if head[4:8] in _MOV_BOXES:
        return "mov"
    return "mpegts" if _is_transport_stream(head) else None


def _is_transport_stream(head: bytes) -> bool:
    layouts = ((0, 188), (4, 192))  # bare, and with the four-byte time code of M2TS
    return any(len(head) > at + 2 * step and head[at : at + 2 * step + 1 : step] == b"GGG" for at, step in layouts)
