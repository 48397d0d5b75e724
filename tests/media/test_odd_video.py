"""Every clip's frames, whole and by range, beside a plain decode of everything."""

import io
from fractions import Fraction

import av
import numpy as np
import pytest
from media_files import HEIGHT, WIDTH, Recipe, full_decode, make_image, make_video, shown_at
from odd_clips import ODD_CLIPS

from pipeline.errors import ItemError
from pipeline.media import video
from pipeline.media.probe import probe_media
from pipeline.media.video import decode_video
from pipeline.schema import SamplePlan

PLANS = ([k / 7 for k in range(20)], [0.0, 1.3, 2.9], [1.234])
RANGED = ("mp4", "mov", "3gp", "matroska", "webm")


@pytest.mark.parametrize("name", ODD_CLIPS)
def test_frames_equal_those_of_a_full_decode(name: str) -> None:
    data = make_video(ODD_CLIPS[name])
    truth = full_decode(data)
    for times in PLANS:
        reached = [t for t in times if t <= truth[-1][0]] or [0.0]
        for by_range in (False, True) if ODD_CLIPS[name].container in RANGED else (False,):
            check(data, truth, reached, by_range)


def check(data: bytes, truth: list[tuple[float, np.ndarray]], times: list[float], by_range: bool = False) -> None:
    frames = decode_video(io.BytesIO(data), SamplePlan(pts_seconds=tuple(times)), None, by_range=by_range)
    for time, pixels in zip(times, frames.pixels, strict=True):
        assert np.array_equal(pixels, shown_at(truth, time)), (time, by_range)


@pytest.mark.parametrize("library, bf", [("libx264", "3"), ("libx264", "0"), ("mpeg2video", "2")])
@pytest.mark.parametrize("fraction", [0.2, 0.37, 0.5])
def test_a_transport_stream_that_begins_in_the_middle_of_a_group(library: str, bf: str, fraction: float) -> None:
    data = make_video(Recipe(container="mpegts", library=library, options={"g": "15", "bf": bf, "b": "1M"}))
    cut = data[int(len(data) * fraction) // 188 * 188 :]
    truth = full_decode(cut)
    check(cut, truth, [0.0, 0.31, truth[-1][0] - 0.2, truth[-1][0]])


def test_of_joined_transport_streams_the_frames_that_step_back_are_passed_over() -> None:
    part = make_video(Recipe(container="mpegts", num_frames=45, options={"g": "15", "bf": "2"}))
    longer = make_video(Recipe(container="mpegts", num_frames=90, options={"g": "15", "bf": "2"}))
    joined = part + longer
    with av.open(io.BytesIO(joined)) as container:
        decoded = [(frame.pts, frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]
    forward: list[tuple[int, np.ndarray]] = []
    for pts, pixels in decoded:
        if not forward or pts >= forward[-1][0]:
            forward.append((pts, pixels))
    truth = [((pts - forward[0][0]) / 90_000, pixels) for pts, pixels in forward]
    assert len(decoded) > len(truth)
    check(joined, truth, [0.0, 0.5, 1.2, 1.45])


def test_cover_art_is_not_the_video() -> None:
    film = make_video(Recipe(options={"g": "15", "bf": "2"}))
    file = io.BytesIO()
    with av.open(io.BytesIO(film)) as source, av.open(file, "w", format="mp4") as output:
        cover = output.add_stream("mjpeg", width=640, height=480)
        cover.pix_fmt = "yuvj420p"
        cover.disposition = av.stream.Disposition.attached_pic
        video = output.add_stream_from_template(source.streams.video[0])
        picture = av.Packet(make_image("JPEG"))
        picture.stream, picture.pts, picture.dts = cover, 0, 0
        output.mux(picture)
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream = video
                output.mux(packet)
    data = file.getvalue()
    probe = probe_media(io.BytesIO(data), num_bytes=len(data), declared="video", name="clip")
    assert (probe.width, probe.height) == (WIDTH, HEIGHT)
    check(data, full_decode(film), [0.0, 1.0, 2.5])


def test_pixels_that_are_not_square_are_taken_as_they_are() -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        stream = output.add_stream("libx264", rate=10, width=96, height=64)
        stream.pix_fmt, stream.codec_context.sample_aspect_ratio = "yuv420p", Fraction(4, 3)
        for number in range(5):
            frame = av.VideoFrame.from_ndarray(np.full((64, 96, 3), 40 * number, np.uint8), format="rgb24")
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    frames = decode_video(io.BytesIO(file.getvalue()), SamplePlan(pts_seconds=(0.0, 0.4)), None)
    assert frames.pixels.shape == (2, 64, 96, 3)


@pytest.mark.parametrize("name", ["h264 faststart", "hevc 10 bit", "vp9 mp4", "mkv live", "mpeg-2 ts"])
def test_damaged_files_give_frames_or_a_verdict(name: str) -> None:
    data = make_video(ODD_CLIPS[name])
    rng = np.random.default_rng(3)
    verdicts = []
    for damage in range(30):
        broken = bytearray(data)
        for place in rng.integers(0, len(data), 1 + damage % 7):
            broken[place] ^= int(rng.integers(1, 256))
        if damage % 3 == 0:
            del broken[int(rng.integers(1, len(broken))) :]
        for by_range in (False, True) if ODD_CLIPS[name].container in RANGED else (False,):
            try:
                decode_video(io.BytesIO(broken), SamplePlan(pts_seconds=(0.0, 1.0, 2.9)), (16, 16), by_range=by_range)
                verdicts.append("ok")
            except ItemError as error:
                verdicts.append(error.code)
    assert set(verdicts) <= {"ok", "corrupt", "truncated", "unknown_format", "no_video_stream"}
    assert len(set(verdicts)) > 1


AV1 = {
    "random access": Recipe(library="libsvtav1", options={"g": "30", "preset": "10"}),
    "low delay": Recipe(library="libsvtav1", options={"g": "60", "preset": "10", "svtav1-params": "pred-struct=1"}),
    "screen content": Recipe(library="libsvtav1", options={"g": "30", "preset": "8", "svtav1-params": "scm=1"}),
}


@pytest.mark.parametrize("times", [[k / 4 for k in range(12)], [0.0, 1.3, 2.9], [1.63]])
@pytest.mark.parametrize("name", AV1)
def test_av1_without_the_pictures_that_none_refers_to(name: str, times: list[float], monkeypatch) -> None:
    data = make_video(AV1[name])
    truth = full_decode(data)
    in_sequence = []
    monkeypatch.setattr(video, "_decode_in_sequence", lambda clip, wish: in_sequence.append(1))
    fed = []
    feed = video._fed
    monkeypatch.setattr(video, "_fed", lambda context, packet: fed.append(packet) or feed(context, packet))
    reached = [t for t in times if t <= truth[-1][0]]
    check(data, truth, reached)
    assert not in_sequence
    if name in ("random access", "low delay") and len(reached) < 12:
        assert len(fed) < 0.9 * (1 + reached[-1] * 30)
