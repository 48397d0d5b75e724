"""What a file is, from its first bytes; names and extensions are never asked. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import BinaryIO

from pipeline.errors import ItemError
from pipeline.schema import Modality

HEAD_BYTES = 4096  # a signature needs at most 1,732: one frame of MPEG audio, and the header of the next

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
    (b"fLaC", "flac"),
    (b"wvpk", "wv"),
    (b"TTA1", "tta"),
    (b"caff", "caf"),
    (b".snd", "au"),
    (b"#!AMR", "amr"),
)
_PDF_MARK = b"%PDF-"
_RIFF_FORMATS = {b"AVI ": "avi", b"WAVE": "wav"}
_AIFF_KINDS = {b"AIFF", b"AIFC"}
# Of MPEG-1 audio, by layer (ISO/IEC 11172-3, 2.4.2.3) and of MPEG-2, by layer (13818-3): kilobits a second.
_BIT_RATES = {
    (1, 1): (32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448),
    (1, 2): (32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (1, 3): (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (2, 1): (32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    (2, 2): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_SAMPLE_RATES = (44_100, 48_000, 32_000)
_MOST_CHUNKS = 64  # of a WAV, ahead of its data
_UNWRITTEN_BYTES = 2**31 - 2**16
_LENGTH_TAGS = (b"Xing", b"Info", b"VBRI")


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """`format` is what opens the file: a Pillow format for images, PDF for pages, a libav demuxer for everything else.

    Sound counts as video here: whether a container has pictures is known once it is open.
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
        raise ItemError(
            stage, "unknown_format", f"{name}: no known image, video, sound or document starts with {head[:16]!r}"
        )
    return signature


def stated_seconds(file: BinaryIO, format: str) -> float | None:
    """How long a sound is by its header, where libav says something else; 0 for one that does not say.

    Of streams of MPEG or AAC frames without a header that counts them, libav makes a guess from the size and the first
    bit rate; of a WAV that breaks off it says what is left. None: libav says what the header does.
    """
    if format == "wav":
        return _wave_seconds(file)
    if format not in ("mp3", "aac", "amr"):
        return None
    file.seek(0)
    file.seek(_tag_bytes(file.read(10)))
    head = file.read(64)  # the tag's name lies behind 36 bytes at most
    return None if format == "mp3" and any(tag in head for tag in _LENGTH_TAGS) else 0.0


def _wave_seconds(file: BinaryIO) -> float | None:
    at, byte_rate = 12, 0
    for _ in range(_MOST_CHUNKS):
        file.seek(at)
        name, size = file.read(4), int.from_bytes(file.read(4), "little")
        if name == b"data":
            # Recorders that never came to write the size leave 0, or the largest there is.
            return size / byte_rate if byte_rate and 0 < size < _UNWRITTEN_BYTES else None
        if name == b"fmt ":
            byte_rate = int.from_bytes(file.read(12)[8:], "little")
        at += 8 + size + size % 2
    return None


def _tag_bytes(head: bytes) -> int:
    """Of an ID3v2 tag (ID3v2.4.0, 3.1) that the file begins with, or 0."""
    if head[:3] != b"ID3" or len(head) < 10:
        return 0
    size = 0
    for byte in head[6:10]:
        size = size << 7 | byte & 0x7F
    return size + (20 if head[5] & 0x10 else 10)


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
    if head[:4] == b"RF64" and head[8:12] == b"WAVE":
        return "wav"
    if head[:4] == b"FORM" and head[8:12] in _AIFF_KINDS:
        return "aiff"
    if head[:3] == b"ID3":
        return _tagged_format(head)
    return "mpegts" if _is_transport_stream(head) else _frames_format(head)


def _tagged_format(head: bytes) -> str:
    """What follows an ID3 tag, where that is within reach; else MP3, which such a tag is most often of."""
    body = head[_tag_bytes(head) :]
    return "flac" if body[:4] == b"fLaC" else _frames_format(body) or "mp3"


def _frames_format(head: bytes) -> str | None:
    """Streams of frames, by the first two: eleven bits are a weak signature."""
    for format, frame_bytes in (("mp3", _mpeg_frame_bytes), ("aac", _adts_frame_bytes)):
        first = frame_bytes(head)
        if first and frame_bytes(head[first:]):
            return format
    return None


def _mpeg_frame_bytes(head: bytes) -> int:
    """Of a frame of MPEG audio, layer I to III (ISO/IEC 11172-3, 2.4.3.1), its header included, or 0."""
    if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE0 != 0xE0:
        return 0
    version, layer = {3: 1, 2: 2, 0: 3}.get(head[1] >> 3 & 3, 0), 4 - (head[1] >> 1 & 3)  # 3: MPEG-2.5
    bit_rate, rate = head[2] >> 4, head[2] >> 2 & 3
    if not version or layer == 4 or bit_rate in (0, 15) or rate == 3:
        return 0
    table = _BIT_RATES[1, layer] if version == 1 else _BIT_RATES[2, min(layer, 2)]
    bits, hertz, padding = 1000 * table[bit_rate - 1], _SAMPLE_RATES[rate] >> (version - 1), head[2] >> 1 & 1
    if layer == 1:
        return (12 * bits // hertz + padding) * 4
    return (72 if layer == 3 and version > 1 else 144) * bits // hertz + padding


def _adts_frame_bytes(head: bytes) -> int:
    """Of an ADTS frame (ISO/IEC 13818-7, 6.2), its header included, or 0."""
    if len(head) < 7 or head[0] != 0xFF or head[1] & 0xF6 != 0xF0 or head[2] >> 2 & 15 > 12:
        return 0
    length = (head[3] & 3) << 11 | head[4] << 3 | head[5] >> 5
    return length if length > 7 else 0


def _is_transport_stream(head: bytes) -> bool:
    layouts = ((0, 188), (4, 192))  # bare, and with the four-byte time code of M2TS
    return any(len(head) > at + 2 * step and head[at : at + 2 * step + 1 : step] == b"GGG" for at, step in layouts)
