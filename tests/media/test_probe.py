import io
import resource
import tempfile
import zlib
from dataclasses import replace
from pathlib import Path

import av
import pytest
from av.video.frame import PictureType
from media_files import (
    HEIGHT,
    WIDTH,
    Recipe,
    full_decode,
    long_video,
    make_audio,
    make_image,
    make_video,
    picture,
    riff_wave,
)
from pdf_files import Page, make_pdf

from pipeline.errors import ItemError
from pipeline.media.budget import TIERS, admit, resolve_budget
from pipeline.media.probe import probe_media
from pipeline.media.sniff import Signature, sniff
from pipeline.schema import Modality, Probe, ResourceVector


def probe(data: bytes, declared: Modality | None = None) -> Probe:
    return probe_media(io.BytesIO(data), num_bytes=len(data), declared=declared, name="item")


def refusal(data: bytes, declared: Modality | None = None) -> str:
    with pytest.raises(ItemError) as caught:
        probe(data, declared)
    assert caught.value.stage == "probe"
    assert "item" in caught.value.message
    return caught.value.code


def hand_made_png(width: int, height: int) -> bytes:
    """A valid header, and ten bytes of pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return len(body).to_bytes(4, "big") + kind + body + zlib.crc32(kind + body).to_bytes(4, "big")

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(10))) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "AVIF", "JPEG2000"])
@pytest.mark.parametrize("declared", [None, "image"])
def test_images_by_content(format, declared):
    data = make_image(format)
    assert probe(data, declared) == Probe(
        modality="image",
        container=format.lower(),
        codec=format.lower(),
        width=WIDTH,
        height=HEIGHT,
        num_bytes=len(data),
    )


VIDEOS = [
    ("mov", "h264", Recipe(options={"bf": "3"})),
    ("mov", "h264", Recipe(start=150)),
    ("mov", "h264", Recipe(container_options={"movflags": "frag_keyframe+empty_moov"}, options={"g": "15"})),
    ("matroska", "h264", Recipe(container="matroska", options={"bf": "3"})),
    ("matroska", "h264", Recipe(container="matroska", start=150)),
    ("matroska", "vp9", Recipe(container="webm", library="libvpx-vp9", options={"deadline": "realtime"})),
    ("matroska", "vp9", Recipe(container="webm", library="libvpx-vp9", container_options={"live": "1"})),
    ("matroska", "av1", Recipe(container="matroska", library="libsvtav1", options={"preset": "12"})),
    ("mpegts", "h264", Recipe(container="mpegts", start=150)),
    ("avi", "mpeg4", Recipe(container="avi", library="mpeg4")),
    ("flv", "h264", Recipe(container="flv", options={"bf": "0"})),
]


@pytest.mark.parametrize("container, codec, recipe", VIDEOS, ids=lambda value: getattr(value, "container", value))
@pytest.mark.parametrize("declared", [None, "video"])
def test_videos_by_content(container, codec, recipe, declared):
    data = make_video(recipe)
    facts = probe(data, declared)
    assert (facts.modality, facts.container, facts.codec) == ("video", container, codec)
    assert (facts.width, facts.height, facts.num_bytes) == (WIDTH, HEIGHT, len(data))
    assert facts.rate_fps == pytest.approx(30)
    assert facts.duration_seconds == pytest.approx(3.0, abs=0.04)
    assert facts.num_frames == pytest.approx(90, abs=1)


@pytest.mark.parametrize("container", ["mp4", "matroska"])
@pytest.mark.parametrize("rotation, size", [(0, (96, 64)), (90, (64, 96)), (180, (96, 64)), (-90, (64, 96))])
def test_rotated_videos_give_the_size_as_presented(container, rotation, size):
    facts = probe(make_video(Recipe(container=container, rotation=rotation, num_frames=3)))
    assert (facts.width, facts.height) == size


def test_an_index_of_packets_that_cannot_be_says_nothing():
    """Found by `scripts/fuzz_media` (seed 14373): sizes below 0."""
    data = bytearray(make_video(Recipe(num_frames=12)))
    assert probe(bytes(data)).coded_frames == 12
    second_size = data.index(b"stsz") + 4 + 12 + 4  # behind version, common size and count: ISO/IEC 14496-12, 8.7.3.2
    data[second_size : second_size + 4] = (0x27000000).to_bytes(4, "big")
    facts = probe(bytes(data))
    assert (facts.coded_frames, facts.coded_bytes, facts.keyframes, facts.keyframe_bytes) == (0, 0, 0, 0)
    assert facts.num_frames == 12


def test_one_frame_lasts_one_frame():
    facts = probe(make_video(Recipe(num_frames=1)))
    assert (facts.num_frames, facts.duration_seconds) == (1, pytest.approx(1 / 30))


@pytest.mark.parametrize(
    "data, declared",
    [
        (b"", None),
        (b"hello, this is a text named holiday.jpg\n" * 100, "image"),
        (b"#EXTM3U\n#EXT-X-VERSION:3\n/etc/passwd\n", "video"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "video"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image"),
        (bytes(4096), None),
    ],
)
def test_what_is_no_known_medium(data, declared):
    assert refusal(data, declared) == "unknown_format"


def test_a_document_without_a_named_page():
    assert refusal(make_pdf([Page()])) == "unknown_format"
    assert refusal(b"%PDF-1.7") == "truncated"  # its own fault comes first


def test_content_against_declaration():
    assert refusal(make_image("PNG"), "video") == "modality_mismatch"
    assert refusal(make_video(Recipe(num_frames=2)), "image") == "modality_mismatch"
    with pytest.raises(ItemError, match=r"declared video, the content is image \(PNG\)"):
        probe(make_image("PNG"), "video")


@pytest.mark.parametrize(
    "data", [riff_wave(), make_audio("mp4", "aac"), make_audio("ogg", "flac")], ids=["wav", "m4a", "ogg"]
)
def test_sound_alone_is_no_video(data):
    assert probe(data).modality == "audio"
    assert refusal(data, "video") == "no_video_stream"
    assert refusal(data, "image") == "modality_mismatch"


@pytest.mark.parametrize("rate_hz", [0, 2**31 - 1])
def test_a_sound_at_no_possible_rate(rate_hz):
    data = bytearray(riff_wave())
    data[24:28] = rate_hz.to_bytes(4, "little")
    assert refusal(bytes(data)) == "corrupt_header"


def test_sound_is_held_against_the_budget():
    data = bytearray(riff_wave())
    data[40:44] = (10**9).to_bytes(4, "little")  # 2.9 hours
    facts = probe(bytes(data))
    assert facts.num_samples == 5 * 10**8 == facts.duration_seconds * 48_000
    vector = ResourceVector(
        num_bytes=1,
        pixels_per_frame=0,
        num_frames=0,
        duration_seconds=facts.duration_seconds,
        feature_tokens=1,
        num_samples=facts.num_samples,
    )
    admit(vector, TIERS["default"])
    with pytest.raises(ItemError, match=r"over_budget_samples: 500,000,000 samples .* allows 1,000 \(max_samples\)"):
        admit(vector, resolve_budget("default", {"max_samples": 1000}))


@pytest.mark.parametrize(
    ("brands", "format"),
    [
        (b"heic\0\0\0\0mif1heic", "HEIF"),
        (b"heix\0\0\0\0mif1heix", "HEIF"),
        (b"mif1\0\0\0\0mif1heic", "HEIF"),
        (b"msf1\0\0\0\0msf1hevc", "HEIF"),
        (b"mif1\0\0\0\0mif1avifmiaf", "AVIF"),
        (b"avif\0\0\0\0avifmif1miaf", "AVIF"),
        (b"avis\0\0\0\0avifavismsf1", "AVIF"),
    ],
)
def test_pictures_in_boxes_by_their_brands(brands, format):
    data = (len(brands) + 8).to_bytes(4, "big") + b"ftyp" + brands
    assert sniff(data + b"\0\0\0\x08meta") == Signature(modality="image", format=format)
    assert refusal(data) == "corrupt_header"


def test_the_reason_of_a_refusal_is_the_same_each_time():
    data = make_image("PNG")[:20]
    messages = set()
    for _ in range(3):
        with pytest.raises(ItemError) as caught:
            probe(bytes(data))
        messages.add(caught.value.message)
    assert len(messages) == 1 and "0x" not in messages.pop()


@pytest.mark.parametrize("num_bytes", [3, 8, 20, 50])
def test_a_header_cut_off_jpeg(num_bytes):
    assert refusal(make_image("JPEG")[:num_bytes]) == "corrupt_header"


@pytest.mark.parametrize("num_bytes", [8, 16, 24])
def test_a_header_cut_off_png(num_bytes):
    assert refusal(make_image("PNG")[:num_bytes]) == "corrupt_header"


@pytest.mark.parametrize("fraction", [0.05, 0.3, 0.6, 0.9])
def test_an_mp4_cut_off_before_its_index(fraction):
    data = make_video(Recipe())
    assert data.index(b"moov") > len(data) * 0.9 or fraction == 0.9
    cut = min(int(len(data) * fraction), data.index(b"moov"))
    assert refusal(data[:cut]) == "corrupt_header"


def test_an_mp4_cut_off_behind_its_index_passes():
    data = make_video(Recipe(container_options={"movflags": "faststart"}))
    assert probe(data[: len(data) // 2]).duration_seconds == pytest.approx(3.0)


def test_a_stream_that_is_announced_and_never_comes_has_no_size():
    tables_only = make_video(Recipe(container="mpegts"))[: 188 * 4]
    assert refusal(tables_only) == "zero_dimensions"


def test_a_bomb_costs_nothing_to_probe_and_is_refused_by_the_budget():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    facts = probe(hand_made_png(30_000, 30_000))
    assert (facts.width, facts.height) == (30_000, 30_000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024  # kilobytes; the pixels are 2.7 GB
    vector = ResourceVector(
        num_bytes=facts.num_bytes,
        pixels_per_frame=facts.width * facts.height,
        num_frames=1,
        duration_seconds=0.0,
        feature_tokens=1,
    )
    with pytest.raises(ItemError, match="over_budget_pixels"):
        admit(vector, TIERS["default"])
    with pytest.raises(ItemError, match=r"over_budget_decode: 700 estimated seconds .* 600\.0 \(max_decode_seconds\)"):
        admit(replace(vector, pixels_per_frame=1, decode_seconds=700), TIERS["default"])


@pytest.mark.parametrize("fraction", [k / 40 for k in range(1, 40)])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "TIFF", "AVIF", "mp4", "webm", "mpegts", "avi"])
def test_no_cut_raises_anything_but_an_item_error(kind, fraction, whole_files):
    data = whole_files[kind]
    try:
        probe(data[: int(len(data) * fraction)])
    except ItemError as error:
        assert error.stage == "probe"


@pytest.fixture(scope="module")
def whole_files():
    images = {format: make_image(format) for format in ("JPEG", "PNG", "GIF", "WEBP", "TIFF", "AVIF")}
    return images | {
        "mp4": make_video(Recipe(num_frames=20)),
        "webm": make_video(Recipe(container="webm", library="libvpx-vp9", num_frames=20)),
        "mpegts": make_video(Recipe(container="mpegts", num_frames=20)),
        "avi": make_video(Recipe(container="avi", library="mpeg4", num_frames=20)),
    }


def test_the_full_decode_agrees_with_the_probe_on_the_length():
    data = make_video(Recipe(container="mpegts", start=150))
    assert len(full_decode(data)) == probe(data).num_frames


def test_of_a_file_with_an_index_its_groups_and_bytes_are_known() -> None:
    data = make_video(Recipe(options={"g": "25", "bf": "0", "sc_threshold": "0"}))
    with av.open(io.BytesIO(data)) as container:
        packets = [(packet.size, packet.is_keyframe) for packet in container.demux(video=0) if packet.size]
    facts = probe(data)
    assert (facts.coded_frames, facts.coded_bytes) == (len(packets), sum(size for size, _ in packets))
    keyframes = [size for size, is_keyframe in packets if is_keyframe]
    assert (facts.keyframes, facts.keyframe_bytes) == (len(keyframes), sum(keyframes)) == (4, sum(keyframes))
    assert facts.keyframe_spacing == 25  # 25 + 25 + 25 + 15
    assert facts.group_frames == pytest.approx((3 * 25**2 + 15**2) / 90)
    assert facts.reorder_depth == 0
    assert probe(make_video(Recipe(options={"bf": "2"}))).reorder_depth > 0


def test_groups_of_unequal_lengths_have_no_spacing() -> None:
    with tempfile.NamedTemporaryFile() as file, av.open(file.name, "w", format="mp4") as container:
        stream = container.add_stream(
            "libx264", rate=30, width=WIDTH, height=HEIGHT, options={"bf": "0", "threads": "1"}
        )
        for number in range(40):
            frame = av.VideoFrame.from_ndarray(picture(number), format="rgb24")
            frame.pict_type = PictureType.I if number in (10, 30) else PictureType.NONE
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
        container.close()
        facts = probe(Path(file.name).read_bytes())
    assert (facts.keyframes, facts.keyframe_spacing) == (3, 0)
    assert facts.group_frames == pytest.approx((10**2 + 20**2 + 10**2) / 40)


@pytest.mark.parametrize("options", [{}, {"cues_to_front": "1"}])
def test_cues_say_where_keyframes_lie(options: dict[str, str]) -> None:
    recipe = Recipe(
        container="matroska", options={"g": "25", "bf": "0", "sc_threshold": "0"}, container_options=options
    )
    facts = probe(make_video(recipe))
    assert (facts.keyframe_spacing, facts.coded_frames) == (25, 0)
    assert facts.group_frames == pytest.approx((3 * 25**2 + 15**2) / 90)


def test_without_cues_nothing_is_said_of_keyframes_and_little_is_read() -> None:
    class Counted(io.BytesIO):
        num_read = 0

        def read(self, size: int = -1) -> bytes:
            data = super().read(size)
            self.num_read += len(data)
            return data

    data = long_video(num_groups=40, container="matroska", movflags="")
    cues = data.rindex(b"\x1c\x53\xbb\x6b")
    file = Counted(data[:cues])
    facts = probe_media(file, num_bytes=cues, declared=None, name="item")
    assert (facts.keyframe_spacing, facts.group_frames) == (0, 0.0)
    assert file.num_read < cues / 10
