"""What a header tells is what decoding the first pictures tells, and a header that lies is found out."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import av
import numpy as np
import pytest
from media_files import Recipe, full_decode, make_video, shown_at
from odd_clips import ODD_CLIPS

from pipeline.media import streams
from pipeline.media.h264 import read_sequence
from pipeline.media.probe import probe_media
from pipeline.media.video import decode_video
from pipeline.schema import Probe, SamplePlan

SEQUENCES = {
    "B": Recipe(options={"bf": "3"}),
    "no B": Recipe(options={"bf": "0"}),
    "B pyramid": Recipe(options={"bf": "7", "x264-params": "b-pyramid=normal:b-adapt=0"}),
    "cropped": Recipe(size=(142, 174), options={"bf": "2"}),
    "interlaced, cropped": Recipe(size=(140, 174), options={"bf": "2", "x264-params": "tff=1"}),
    "4:4:4": Recipe(pix_fmt="yuv444p", size=(141, 173), options={"bf": "2"}),
    "4:2:2, 10 bit": Recipe(pix_fmt="yuv422p10le", size=(141, 174), options={"bf": "2"}),
    "baseline": Recipe(options={"profile": "baseline"}),
    "scaling lists": Recipe(options={"bf": "2", "x264-params": "cqm=jvt"}),
    "scaling lists of 4:4:4": Recipe(pix_fmt="yuv444p", options={"x264-params": "cqm=jvt"}),
    "HRD": Recipe(options={"bf": "2", "x264-params": "nal-hrd=vbr:vbv-maxrate=2000:vbv-bufsize=2000"}),
    "all of VUI": Recipe(
        options={
            "bf": "2",
            "x264-params": "sar=40/33:overscan=show:fullrange=on:colorprim=bt709:chromaloc=2:pic-struct=1",
        }
    ),
    "intra": Recipe(options={"g": "1"}),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_size_and_order_of_h264_are_those_that_libav_finds(name: str) -> None:
    with av.open(io.BytesIO(make_video(SEQUENCES[name]))) as container:
        context = container.streams.video[0].codec_context
        sequence = read_sequence(bytes(context.extradata))
        assert sequence is not None
        assert (sequence.width, sequence.height) == (context.width, context.height)
        assert sequence.num_reorder_frames == context.reorder_depth


def test_what_is_no_sequence_is_none() -> None:
    with av.open(io.BytesIO(make_video(SEQUENCES["HRD"]))) as container:
        avcc = bytes(container.streams.video[0].codec_context.extradata)
    whole = read_sequence(avcc)
    length = int.from_bytes(avcc[6:8], "big")
    for cut in range(len(avcc)):
        broken = avcc[:6] + min(length, max(0, cut - 8)).to_bytes(2, "big") + avcc[8:cut] if cut > 8 else avcc[:cut]
        assert read_sequence(broken) in (None, whole)
    assert read_sequence(avcc[:5] + b"\xe2" + avcc[6:]) is None  # two sets
    assert read_sequence(avcc[:8] + b"\x67" + bytes(length - 1)) is None


def both(data: bytes, monkeypatch: pytest.MonkeyPatch) -> tuple[Probe, Probe, bool]:
    """What is found as the header tells it, what without, and whether the header told."""
    told = []
    by_header = streams.open_by_header

    @contextmanager
    def watched(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with by_header(*args, **kwargs) as container:
            told.append(container is not None)
            yield container

    @contextmanager
    def never(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield None

    found = []
    for way in (watched, never):
        monkeypatch.setattr(streams, "open_by_header", way)
        found.append(probe_media(io.BytesIO(data), num_bytes=len(data), declared=None, name="item"))
    monkeypatch.setattr(streams, "open_by_header", by_header)
    return found[0], found[1], told[0]


TOLD = {"h264 10 bit", "hevc 10 bit", "h264 interlaced", "av1 mp4", "h264 slices", "h264 weighted", "h264 1 frame"} | {
    "h264 2 frames",
    "h264 60 fps",
    "h264 ntsc-like slow",
    "h264 mov",
    "h264 3gp",
    "h264 faststart",
    "h264 negative cts",
    "h264 no edit list",
    "h264 periodic no IDR",
}


@pytest.mark.parametrize("name", ODD_CLIPS)
def test_a_header_tells_what_decoding_tells(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told, decoded, is_told = both(make_video(ODD_CLIPS[name]), monkeypatch)
    assert told == decoded
    assert is_told or name not in TOLD


def test_pictures_of_another_size_than_the_container_says_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytearray(make_video(Recipe(size=(144, 176), options={"bf": "2"})))
    entry = data.index(b"avc1", data.index(b"stsd")) + 4 + 24  # ISO/IEC 14496-12, 12.1.3: width and height
    assert data[entry : entry + 4] == (176).to_bytes(2, "big") + (144).to_bytes(2, "big")
    data[entry : entry + 2] = (96).to_bytes(2, "big")
    told, decoded, is_told = both(bytes(data), monkeypatch)
    assert not is_told and told == decoded and told.width == 176


def without_reordering(data: bytes) -> bytes:
    """A file of whose pictures 2 are held back, with a sequence that says 0."""
    start = data.index(b"avcC") + 4
    length = int.from_bytes(data[start + 6 : start + 8], "big")
    unit = data[start + 8 : start + 8 + length]
    bits = "".join(f"{byte:08b}" for byte in unit).rstrip("0")[:-1]  # without the stop bit
    assert bits.endswith("011" + "00101")  # ue(v): max_num_reorder_frames 2, max_dec_frame_buffering 4
    changed = bits[: -len("01100101")] + "1" + "00101" + "1"
    changed = changed.ljust(8 * length, "0")
    patched = bytes(int(changed[at : at + 8], 2) for at in range(0, 8 * length, 8))
    return data[: start + 8] + patched + data[start + 8 + length :]


@pytest.mark.parametrize("has_times", [True, False])
@pytest.mark.parametrize("by_range", [False, True])
def test_of_a_header_that_breaks_its_word_the_frames_are_those_of_a_full_decode(
    by_range: bool, has_times: bool
) -> None:
    data = without_reordering(make_video(Recipe(options={"g": "15", "bf": "3", "x264-params": "b-adapt=0:bframes=3"})))
    if not has_times:  # all are shown in the order in which they are decoded, says the container
        data = data.replace(b"ctts", b"free")
    with streams.open_by_header(io.BytesIO(data), "mov", is_decoded=True) as container:
        assert container is not None
        assert read_sequence(bytes(container.streams.video[0].codec_context.extradata)).num_reorder_frames == 0
    truth = full_decode(data)
    times = [time for time, _ in truth][1::3]
    frames = decode_video(io.BytesIO(data), SamplePlan(pts_seconds=tuple(times)), None, by_range=by_range)
    for time, pixels in zip(times, frames.pixels, strict=True):
        assert np.array_equal(pixels, shown_at(truth, time)), time
