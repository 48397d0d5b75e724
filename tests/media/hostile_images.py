"""Hostile image files, the same each time: cut off, with flipped bits, with headers that lie, with huge metadata."""

import functools
import io
import random
import struct
import zlib
from collections.abc import Iterator, Sequence

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

SIZE = (61, 83)  # (height, width); neither is a multiple of anything that decoders work in
# TIFF 6.0, section 2.
SHORT, LONG, UNDEFINED = 3, 4, 7
_TYPE_CODES = {SHORT: "H", LONG: "I", UNDEFINED: "B"}


def photograph(seed: int = 3) -> Image.Image:
    """Smooth, with an edge and some grain."""
    rng = np.random.default_rng(seed)
    height, width = SIZE
    small = rng.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    large = np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    large[height // 2 :, : width // 3] = (250, 20, 40)
    return Image.fromarray((large + rng.integers(-4, 5, large.shape)).clip(0, 255).astype(np.uint8))


def saved(image: Image.Image, format: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


@functools.cache
def whole_files() -> dict[str, bytes]:
    """One file of each kind that is decoded."""
    rgb = photograph()
    rgba = rgb.copy()
    rgba.putalpha(Image.linear_gradient("L").resize(rgb.size))
    grey16 = Image.fromarray(np.asarray(rgb.convert("L")).astype(np.uint16) * 257)
    exif = Image.Exif()
    exif[0x0112] = 6
    more = [photograph(seed) for seed in (4, 5)]
    return {
        "jpeg": saved(rgb, "JPEG", exif=exif),
        "jpeg-progressive": saved(rgb, "JPEG", progressive=True),
        "jpeg-cmyk": saved(rgb.convert("CMYK"), "JPEG"),
        "png": saved(rgb, "PNG", exif=exif),
        "png-alpha": saved(rgba, "PNG"),
        "png-palette": saved(rgb.quantize(16), "PNG", transparency=1),
        "png-16": saved(grey16, "PNG"),
        "gif": saved(rgb.quantize(32), "GIF", save_all=True, append_images=[image.quantize(32) for image in more]),
        "webp": saved(rgba, "WEBP", exif=exif),
        "webp-lossless": saved(rgb, "WEBP", lossless=True),
        "webp-animated": saved(rgb, "WEBP", save_all=True, append_images=more),
        "bmp": saved(rgb, "BMP"),
        "tiff": saved(rgb, "TIFF"),
        "tiff-deflate": saved(rgb, "TIFF", compression="tiff_adobe_deflate", exif=exif),
        "tiff-lzw": saved(rgba, "TIFF", compression="tiff_lzw"),
        "tiff-jpeg": saved(rgb, "TIFF", compression="jpeg"),
        "tiff-16": saved(grey16, "TIFF"),
        "avif": saved(rgba, "AVIF", exif=exif, speed=10),
        "jp2": saved(rgb, "JPEG2000"),
    }


def cut_and_flipped(cuts: int = 12, flips: int = 20) -> Iterator[tuple[str, bytes]]:
    """Each file cut off at points from its first bytes to its last, and with bits flipped, half of them in its head."""
    for kind, data in whole_files().items():
        rng = random.Random(f"headrace {kind}")
        for number in range(cuts):
            yield f"{kind} cut {number}", data[: max(1, len(data) * (number + 1) // (cuts + 1) - rng.randrange(7))]
        for number in range(flips):
            damaged = bytearray(data)
            reach = min(len(data), 200) if number % 2 else len(data)
            for _ in range(rng.choice((1, 2, 8, 40))):
                damaged[rng.randrange(reach)] ^= 1 << rng.randrange(8)
            yield f"{kind} flipped {number}", bytes(damaged)


def png(width: int, height: int, chunks: Sequence[tuple[bytes, bytes]] = (), pixels: bytes = bytes(10)) -> bytes:
    """RGB of 8 bits, whatever its pixels are."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = [(b"IHDR", header), *chunks, (b"IDAT", zlib.compress(pixels)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in body
    )


def tiff(tags: dict[int, tuple[int, Sequence[int]]], pixels: bytes, next_directory: int = 0) -> bytes:
    """One directory, little endian; the tags 273 and 324 (where the pixels are) are filled in when they are (0,)."""
    values = 8 + 2 + 12 * len(tags) + 4
    packed = {number: struct.pack(f"<{len(v)}{_TYPE_CODES[kind]}", *v) for number, (kind, v) in tags.items()}
    where = values + sum(len(data) for data in packed.values() if len(data) > 4)
    fields, long = b"", b""
    for number, (kind, numbers) in sorted(tags.items()):
        data = struct.pack("<I", where) if number in (273, 324) and tuple(numbers) == (0,) else packed[number]
        if len(data) > 4:
            long, data = long + data, struct.pack("<I", values + len(long))
        fields += struct.pack("<HHI4s", number, kind, len(numbers), data)
    head = b"II*\0" + struct.pack("<IH", 8, len(tags))
    return head + fields + struct.pack("<I", next_directory) + long + pixels


def grey_tiff(width: int, height: int, **more: tuple[int, Sequence[int]]) -> dict[int, tuple[int, Sequence[int]]]:
    """The tags of 8-bit grey in one strip; `t278=…` replaces or adds tag 278."""
    tags: dict[int, tuple[int, Sequence[int]]] = {
        256: (LONG, (width,)),
        257: (LONG, (height,)),
        258: (SHORT, (8,)),
        259: (SHORT, (1,)),
        262: (SHORT, (1,)),
        273: (LONG, (0,)),
        277: (SHORT, (1,)),
        278: (LONG, (height,)),
        279: (LONG, (width * height,)),
    }
    return tags | {int(name[1:]): value for name, value in more.items()}


def tiled_tiff(tile_side: int) -> bytes:
    """16 x 16 pixels in one tile of that many, deflated."""
    pixels = zlib.compress(bytes(tile_side * min(tile_side, 4_000)), 9)
    tags = grey_tiff(16, 16, t259=(SHORT, (8,)), t322=(LONG, (tile_side,)), t323=(LONG, (tile_side,)))
    del tags[273], tags[278], tags[279]
    return tiff(tags | {324: (LONG, (0,)), 325: (LONG, (len(pixels),))}, pixels)


def with_numbers(data: bytes, at: int, layout: str, *numbers: int) -> bytes:
    """`data` with numbers written over what stands there."""
    return data[:at] + struct.pack(layout, *numbers) + data[at + struct.calcsize(layout) :]


def overlapping_exif(num_tags: int, num_bytes: int) -> bytes:
    """A directory whose every tag claims the same bytes."""
    end = 8 + 2 + 12 * num_tags + 4
    tags = b"".join(struct.pack("<HHII", 0x9000 + i, UNDEFINED, num_bytes, end) for i in range(num_tags))
    return b"Exif\0\0II*\0" + struct.pack("<IH", 8, num_tags) + tags + bytes(4) + bytes(num_bytes)


def jpeg_with(data: bytes, segments: Sequence[tuple[int, bytes]]) -> bytes:
    """A JPEG with segments (marker, content) right behind its start."""
    packed = b"".join(struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body for marker, body in segments)
    return data[:2] + packed + data[2:]


# The largest size that the headers below claim.
HUGE = 30_000
HUGE_WEBP = 16_383


def lying_sizes() -> dict[str, bytes]:
    """Files of a few kilobytes whose headers say that they are huge: bombs, caught by their size."""
    files = whole_files()
    jpeg, gif, bmp, avif, jp2, webp = (files[kind] for kind in ("jpeg", "gif", "bmp", "avif", "jp2", "webp"))
    frame = gif.index(b"\x2c\0\0\0\0")
    return {
        "png": png(HUGE, HUGE),
        "png of zeros": png(HUGE, HUGE, pixels=bytes(3_000_000)),
        "jpeg": with_numbers(jpeg, jpeg.index(b"\xff\xc0") + 5, ">HH", HUGE, HUGE),
        "gif": with_numbers(gif, 6, "<HH", HUGE, HUGE),
        "gif with a frame beyond its canvas": with_numbers(gif, frame + 5, "<HH", HUGE, HUGE),
        "gif with a frame far outside its canvas": with_numbers(gif, frame + 1, "<HH", HUGE, HUGE),
        "bmp": with_numbers(bmp, 18, "<ii", HUGE, HUGE),
        "bmp upside down": with_numbers(bmp, 18, "<ii", HUGE, -HUGE),
        "tiff": tiff(grey_tiff(HUGE, HUGE), bytes(256)),
        "tiff deflated": tiff(grey_tiff(HUGE, HUGE, t259=(SHORT, (8,))), zlib.compress(bytes(3_000_000), 9)),
        "webp": with_numbers(webp, webp.index(b"VP8X") + 12, "<3s3s", *[(HUGE_WEBP - 1).to_bytes(3, "little")] * 2),
        "avif": with_numbers(avif, avif.index(b"ispe") + 8, ">II", HUGE_WEBP, HUGE_WEBP),
        "jp2": with_numbers(jp2, jp2.index(b"ihdr") + 4, ">II", HUGE, HUGE),
        "j2k": with_numbers(jp2, jp2.index(b"\xff\x4f\xff\x51") + 8, ">II", HUGE, HUGE)[
            jp2.index(b"\xff\x4f\xff\x51") :
        ],
    }


def hidden_sizes() -> dict[str, bytes]:
    """Files whose headers say that they are small, and whose insides are large."""
    jp2, webp = whole_files()["jp2"], whole_files()["webp"]
    large = Image.new("RGB", (4_000, 4_000))
    avif, large_jp2, large_webp = (saved(large, format) for format in ("AVIF", "JPEG2000", "WEBP"))
    size_of_stream = jp2.index(b"\xff\x4f\xff\x51") + 8
    canvas = webp[: webp.index(b"VP8X") + 18]
    return {
        "tiff in a tile of 900 megapixels": tiled_tiff(30_000),
        "tiff with 3,000,000 strips": tiff(
            grey_tiff(16, 16, t278=(LONG, (1,)), t273=(LONG, [8] * 3_000_000), t279=(LONG, (256,))), bytes(256)
        ),
        "tiff with 3,000,000 sample widths": tiff(grey_tiff(16, 16, t258=(SHORT, [8] * 3_000_000)), bytes(256)),
        "tiff in strips of 4,000,000,000 rows": tiff(grey_tiff(16, 16, t278=(LONG, (4_000_000_000,))), bytes(256)),
        "tiff with a strip of 4 GB": tiff(
            grey_tiff(16, 16, t259=(SHORT, (8,)), t279=(LONG, (4_000_000_000,))), zlib.compress(bytes(256))
        ),
        "tiff with 65,535 samples a pixel": tiff(grey_tiff(16, 16, t277=(SHORT, (65_535,))), bytes(256)),
        "avif of 16 x 16 around 4,000 x 4,000": with_numbers(avif, avif.index(b"ispe") + 8, ">II", 16, 16),
        "jp2 of 16 x 16 around 4,000 x 4,000": with_numbers(large_jp2, large_jp2.index(b"ihdr") + 4, ">II", 16, 16),
        "jp2 with a stream of 30,000 x 30,000": with_numbers(jp2, size_of_stream, ">II", HUGE, HUGE),
        "jp2 with a tile of 30,000 x 30,000": with_numbers(jp2, size_of_stream + 16, ">II", HUGE, HUGE),
        "webp of 83 x 61 around 4,000 x 4,000": canvas + large_webp[12:],
        "jpeg with two sizes": jpeg_with(
            whole_files()["jpeg"], [(0xC0, struct.pack(">BHHB", 8, 4_000, 4_000, 1) + b"\1\x11\0")]
        ),
    }


def huge_metadata() -> dict[str, bytes]:
    """Files that bring more beside their pixels than anybody asked for."""
    zeros = zlib.compress(bytes(100_000_000), 9)
    jpeg, webp, gif, jp2 = (whole_files()[kind] for kind in ("jpeg-progressive", "webp-lossless", "gif", "jp2"))
    text = PngInfo()
    for number in range(90):
        text.add_text(f"key {number}", "x" * 900_000, zip=True)
    exif = overlapping_exif(5_000, 60_000)
    loop = tiff(grey_tiff(16, 16), bytes(256), next_directory=8)
    comment = b"\x21\xfe" + b"\xff" * 1 + b"c" * 255
    riff = b"VP8X" + struct.pack("<II3s3s", 10, 8, *[n.to_bytes(3, "little") for n in (SIZE[1] - 1, SIZE[0] - 1)])
    chunks = riff + webp[12:] + b"EXIF" + struct.pack("<I", len(exif)) + exif
    return {
        "png with a text of 100 MB": png(16, 16, [(b"zTXt", b"key\0\0" + zeros)], bytes(16 * 49)),
        "png with an international text of 100 MB": png(
            16, 16, [(b"iTXt", b"key\0\1\0en\0key\0" + zeros)], bytes(16 * 49)
        ),
        "png with a profile of 100 MB": png(16, 16, [(b"iCCP", b"name\0\0" + zeros)], bytes(16 * 49)),
        "png with 90 texts": saved(photograph(), "PNG", pnginfo=text),
        "png with overlapping exif": png(16, 16, [(b"eXIf", exif[6:])], bytes(16 * 49)),
        "png with a chunk of 2 GB": png(16, 16)[:33] + struct.pack(">I4s", 2**31 - 1, b"tEXt") + bytes(100),
        "jpeg with overlapping exif": jpeg_with(jpeg, [(0xE1, overlapping_exif(400, 60_000))]),
        "jpeg with exif in 200 parts": jpeg_with(jpeg, [(0xE1, b"Exif\0\0" + exif[6:65_000])] * 200),
        "jpeg with a profile in 255 parts": jpeg_with(
            jpeg, [(0xE2, b"ICC_PROFILE\0" + bytes([n, 255]) + bytes(60_000)) for n in range(1, 256)]
        ),
        "jpeg with many pictures": jpeg_with(jpeg, [(0xE2, b"MPF\0" + overlapping_exif(400, 60_000)[6:])]),
        "webp with overlapping exif": b"RIFF" + struct.pack("<I", len(chunks) + 4) + b"WEBP" + chunks,
        "gif with comments": gif[:13] + gif[13 : 13 + 96] + comment * 20_000 + b"\0" + gif[13 + 96 :],
        "tiff whose directories are a circle": loop,
        # Found by `scripts/fuzz_media`: read at once, 2 GB were asked for.
        "jp2 with a header of 2 GB": with_numbers(jp2, jp2.index(b"jp2h") - 4, ">I", 2**31 + 45),
        "jp2 with a header of an exabyte": with_numbers(jp2, jp2.index(b"jp2h") - 4, ">I4sQ", 1, b"jp2h", 2**60),
        "jp2 with a million boxes": jp2[:32] + struct.pack(">I4s", 8, b"free") * 1_000_000 + jp2[32:],
        "tiff with 60,000 tags": tiff(
            grey_tiff(16, 16) | {number: (LONG, (0,)) for number in range(1_000, 61_000)}, bytes(256)
        ),
    }


def jpeg_of_scans(num_scans: int) -> bytes:
    """A progressive JPEG of a megapixel whose last scan comes that often."""
    data = saved(Image.new("L", (1_000, 1_000)), "JPEG", progressive=True)
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + last * (num_scans - data.count(b"\xff\xda")) + data[-2:]


def no_images() -> dict[str, bytes]:
    """Formats that are not read, some of which hold pictures of several sizes."""
    image = photograph()
    return {
        "ico": saved(image, "ICO", sizes=[(16, 16), (32, 32)]),
        "icns": saved(image.resize((64, 64)), "ICNS"),
        "tga": saved(image, "TGA"),
        "ppm": saved(image, "PPM"),
        "empty": b"",
    }
