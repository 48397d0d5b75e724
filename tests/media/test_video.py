import io

import av
import numpy as np
import pytest
import torch
from media_files import Recipe, full_decode, long_video, make_video, picture, shown_at
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as reference

from pipeline.errors import ItemError, TransientError
from pipeline.media import clip, video
from pipeline.media.video import decode_video
from pipeline.schema import SamplePlan

X265 = "log-level=none:pools=none:frame-threads=1"
SCREEN_RECORDING = [0, 1, 2, 3, 10, 11, 12, 30, 31, 33, 60, 61, 75, 76, 77, 90, 91, 92, 93, 94, 95, 120, 121, 122]

CLIPS = {
    "h264 gop 12": Recipe(options={"g": "12", "bf": "3"}),
    "h264 gop 60": Recipe(options={"g": "60", "bf": "3"}, num_frames=150),
    "h264 gop 250": Recipe(options={"g": "250", "bf": "3"}, num_frames=150),
    "h264 no B": Recipe(options={"g": "12", "bf": "0"}),
    "h264 pyramid, 8 references": Recipe(options={"g": "30", "bf": "7", "x264-params": "b-pyramid=normal:ref=8"}),
    "h264 open gop": Recipe(options={"x264-params": "open-gop=1:keyint=15:bframes=3:scenecut=0"}),
    "h264 intra refresh": Recipe(options={"x264-params": "intra-refresh=1:keyint=20:bframes=0"}),
    "h264 mkv": Recipe(container="matroska", options={"g": "15", "bf": "2"}),
    "h264 mkv open gop": Recipe(
        container="matroska", options={"x264-params": "open-gop=1:keyint=15:bframes=5:b-adapt=0:scenecut=0"}
    ),
    "hevc mkv open gop": Recipe(
        container="matroska", library="libx265", options={"x265-params": f"{X265}:keyint=15:bframes=7:open-gop=1"}
    ),
    "h264 mpeg-ts": Recipe(container="mpegts", options={"g": "15", "bf": "3"}),
    "h264 mpeg-ts open gop": Recipe(
        container="mpegts", options={"x264-params": "open-gop=1:keyint=15:bframes=3:scenecut=0"}
    ),
    "h264 flv": Recipe(container="flv", options={"g": "15", "bf": "3"}),
    "h264 fragmented": Recipe(
        options={"g": "15", "bf": "3"}, container_options={"movflags": "frag_keyframe+empty_moov+default_base_moof"}
    ),
    "h264 starts at 5 s": Recipe(start=150, options={"g": "15", "bf": "3"}),
    "mkv starts at 5 s": Recipe(container="matroska", start=150, options={"g": "15", "bf": "3"}),
    "h264 VFR": Recipe(times=SCREEN_RECORDING, options={"g": "8", "bf": "2"}),
    "h264 VFR mkv": Recipe(container="matroska", times=SCREEN_RECORDING, options={"g": "8", "bf": "2"}),
    "h264 4:4:4": Recipe(pix_fmt="yuv444p", options={"g": "15"}),
    "h264 odd size": Recipe(size=(63, 97), pix_fmt="yuv444p", options={"g": "15"}),
    "hevc": Recipe(library="libx265", options={"x265-params": f"{X265}:keyint=15:bframes=3:open-gop=0"}),
    "hevc open gop": Recipe(library="libx265", options={"x265-params": f"{X265}:keyint=15:bframes=3:open-gop=1"}),
    "hevc mpeg-ts": Recipe(
        container="mpegts", library="libx265", options={"x265-params": f"{X265}:keyint=15:bframes=3:open-gop=1"}
    ),
    "vp9 webm": Recipe(
        container="webm", library="libvpx-vp9", options={"g": "30", "deadline": "realtime", "cpu-used": "8"}
    ),
    "vp9 alt-ref": Recipe(
        container="webm",
        library="libvpx-vp9",
        options={"g": "40", "deadline": "good", "cpu-used": "5", "auto-alt-ref": "1", "lag-in-frames": "16"},
    ),
    "vp8 hidden frames": Recipe(
        container="webm",
        library="libvpx",
        options={
            "g": "40",
            "deadline": "good",
            "cpu-used": "5",
            "auto-alt-ref": "1",
            "lag-in-frames": "16",
            "b": "200k",
        },
    ),
    "av1": Recipe(container="matroska", library="libsvtav1", num_frames=60, options={"g": "30", "preset": "12"}),
    "mpeg-4 avi": Recipe(container="avi", library="mpeg4", options={"g": "12"}),
    "mjpeg mov": Recipe(container="mov", library="mjpeg", pix_fmt="yuvj420p"),
}
RANGED = ("mp4", "mov", "matroska", "webm")
PLANS = {
    "every 1/7 s": [k / 7 for k in range(20)],
    "7 uniform": [k * 2.9 / 6 for k in range(7)],
    "few, late": [0.0, 2.31, 2.32, 2.85],
    "the same frame twice": [0.0, 0.001, 1.0, 1.0, 1.0001],
    "not from the start": [1.234],
}


@pytest.fixture(scope="module")
def clips():
    """Clips by name, encoded and fully decoded once."""
    cache = {}

    def get(name):
        if name not in cache:
            data = make_video(CLIPS[name])
            cache[name] = data, full_decode(data)
        return cache[name]

    return get


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", CLIPS)
def test_frames_equal_those_of_a_full_decode(clips, name, plan):
    data, truth = clips(name)
    times = [t for t in PLANS[plan] if t <= truth[-1][0]]
    frames = decode_video(io.BytesIO(data), SamplePlan(pts_seconds=tuple(times)), None)
    for shown, time, pixels in zip(frames.pts_seconds, times, frames.pixels, strict=True):
        assert np.array_equal(pixels, shown_at(truth, time)), time
        assert shown == pytest.approx(max(t for t, _ in truth if t <= time + 1e-6), abs=1e-9)


@pytest.mark.parametrize("name", ["h264 gop 12", "h264 VFR mkv", "h264 open gop", "hevc open gop", "vp9 webm"])
def test_every_frame_is_found_by_its_own_time(clips, name):
    data, truth = clips(name)
    frames = decode_video(io.BytesIO(data), SamplePlan(pts_seconds=tuple(t for t, _ in truth)), None)
    assert np.array_equal(frames.pixels, np.stack([pixels for _, pixels in truth]))


@pytest.mark.parametrize(
    "name",
    ["h264 gop 12", "h264 gop 60", "h264 gop 250", "h264 no B", "h264 mkv", "h264 VFR", "hevc", "hevc open gop"],
)
@pytest.mark.parametrize("plan", PLANS)
def test_no_more_is_decoded_than_the_pictures_need(clips, name, plan, monkeypatch):
    data, truth = clips(name)
    times = [t for t in PLANS[plan] if t <= truth[-1][0]]
    decoded = count_decoded(monkeypatch)
    decode_video(io.BytesIO(data), SamplePlan(pts_seconds=tuple(times)), (16, 16))
    assert len(decoded) == fewest_frames(data, [0.0, *times])


def fewest_frames(data: bytes, times: list[float]) -> int:
    """From each target's keyframe to the target in decode order: the targets, and what others may refer to.

    H.264, 7.4.1: nal_ref_idc is 0 for pictures that are not referred to. H.265, table 7-1: even types up to 14 are.
    """
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        packets = [packet for packet in container.demux(stream) if packet.size]
        is_hevc = stream.codec_context.codec.canonical_name == "hevc"
        shown = sorted(packet.pts for packet in packets)
        targets = {max(p for p in shown if (p - shown[0]) * stream.time_base <= t + 1e-6) for t in times}
        needed: set[int] = set()
        for target in targets:
            last = next(i for i, packet in enumerate(packets) if packet.pts == target)
            key = next(i for i in range(last, -1, -1) if packets[i].is_keyframe and packets[i].pts <= target)
            needed |= {
                i for i in range(key, last + 1) if packets[i].pts in targets or _is_reference(packets[i], is_hevc)
            }
    return len(needed)


def _is_reference(packet: av.Packet, is_hevc: bool) -> bool:
    data, at = bytes(packet), 0
    while at < len(data):
        length, head = int.from_bytes(data[at : at + 4], "big"), data[at + 4]
        kind = head >> 1 & 63 if is_hevc else head & 31
        if kind < 32 if is_hevc else kind in (1, 5):
            return not (kind <= 14 and kind % 2 == 0) if is_hevc else head >> 5 & 3 != 0
        at += 4 + length
    raise AssertionError("a packet without a slice")


@pytest.mark.parametrize(
    "name", [name for name in CLIPS if not any(word in name for word in ("refresh", "vp8", "avi"))]
)
def test_decoding_by_keyframe_needs_no_second_try_in_sequence(clips, name, monkeypatch):
    data, truth = clips(name)
    runs = count_runs_in_sequence(monkeypatch)
    decode_video(io.BytesIO(data), SamplePlan(pts_seconds=tuple(t for t, _ in truth)), (16, 16))
    assert not runs


def test_frames_out_of_an_edit_list_are_not_shown(monkeypatch):
    data = bytearray(make_video(Recipe(options={"g": "15", "bf": "0"})))
    entry = data.index(b"elst") + 12
    duration, media_time = (int.from_bytes(data[entry + k : entry + k + 4], "big") for k in (0, 4))
    timescale = 15360
    skipped = 20  # not a keyframe: frames 15 to 19 are decoded and thrown away
    dropped = 10
    data[entry : entry + 4] = (duration - 1000 * (skipped + dropped) // 30).to_bytes(4, "big")
    data[entry + 4 : entry + 8] = (media_time + skipped * timescale // 30).to_bytes(4, "big")
    truth = full_decode(bytes(data))
    assert len(truth) == 90 - skipped - dropped
    times = (0.0, 0.5, 1.0, 59 / 30, 2.05)
    runs = count_runs_in_sequence(monkeypatch)
    frames = decode_video(io.BytesIO(data), SamplePlan(pts_seconds=times), None)
    for time, pixels in zip(times, frames.pixels, strict=True):
        assert np.array_equal(pixels, shown_at(truth, time))
        assert np.abs(pixels.astype(int) - picture(round(min(time, 59 / 30) * 30) + skipped)).mean() < 20
    assert not runs


@pytest.mark.parametrize("container, library, slack", [("avi", "libx264", 0), ("mpeg", "mpeg2video", 2)])
def test_frames_without_times_of_their_own_come_in_the_order_of_display(container, library, slack):
    """libav's times for these containers are wrong under B-frames; the pictures tell which frame it is."""
    data = make_video(Recipe(container=container, library=library, options={"g": "30", "bf": "2", "b": "4M"}))
    indices = range(0, 85, 7)
    frames = decode_video(io.BytesIO(data), SamplePlan(pts_seconds=tuple(k / 30 for k in indices)), None)
    for k, pixels in zip(indices, frames.pixels, strict=True):
        distances = [np.abs(pixels.astype(int) - picture(i)).mean() for i in range(90)]
        assert abs(int(np.argmin(distances)) - k) <= slack


@pytest.mark.parametrize("container, library", [("mp4", "libx264"), ("mp4", "libx265"), ("webm", "libvpx-vp9")])
@pytest.mark.parametrize("rotation", [0, 90, 180, -90])
def test_rotation_is_applied(container, library, rotation):
    options = {"x265-params": X265} if library == "libx265" else {}
    data = make_video(Recipe(container=container, library=library, rotation=rotation, num_frames=3, options=options))
    with av.open(io.BytesIO(data)) as file:
        frame = next(file.decode(video=0))
        expected = np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90)
    assert frame.rotation % 360 == rotation % 360
    frames = decode_video(io.BytesIO(data), SamplePlan(pts_seconds=(0.0,)), None)
    assert np.array_equal(frames.pixels[0], expected)


def test_mirroring_is_applied():
    plain, mirrored = (make_video(Recipe(mirrored=m, num_frames=1)) for m in (False, True))
    plan = SamplePlan(pts_seconds=(0.0,))
    expected = decode_video(io.BytesIO(plain), plan, None).pixels[:, :, ::-1]
    assert np.array_equal(decode_video(io.BytesIO(mirrored), plan, None).pixels, expected)


def test_resizing_equals_resizing_the_full_decode(clips):
    data, truth = clips("h264 gop 12")
    frames = decode_video(io.BytesIO(data), SamplePlan(pts_seconds=(0.0, 1.5)), (40, 52))
    for time, pixels in zip((0.0, 1.5), frames.pixels, strict=True):
        full = torch.from_numpy(shown_at(truth, time)).permute(2, 0, 1).contiguous()
        expected = reference.resize(full, [40, 52], interpolation=InterpolationMode.BICUBIC, antialias=True)
        assert np.array_equal(pixels, expected.permute(1, 2, 0).numpy())


def test_the_larger_of_two_streams_is_shown():
    small, large = Recipe(size=(32, 48), num_frames=10), Recipe(size=(64, 96), num_frames=10)
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        inputs = [av.open(io.BytesIO(make_video(recipe))) for recipe in (small, large)]
        streams = [container.add_stream_from_template(source.streams.video[0]) for source in inputs]
        for source, stream in zip(inputs, streams, strict=True):
            for packet in source.demux(video=0):
                if packet.size:
                    packet.stream = stream
                    container.mux(packet)
            source.close()
    frames = decode_video(io.BytesIO(file.getvalue()), SamplePlan(pts_seconds=(0.0, 0.2)), None)
    assert frames.pixels.shape == (2, 64, 96, 3)


@pytest.mark.parametrize("container, options", [("mp4", {"movflags": "faststart"}), ("matroska", {}), ("mpegts", {})])
@pytest.mark.parametrize("fraction", [0.3, 0.6, 0.8])
def test_a_file_cut_off_is_truncated_behind_the_cut_and_usable_before_it(container, options, fraction):
    data = make_video(Recipe(container=container, options={"g": "15", "bf": "3"}, container_options=options))
    truth = full_decode(data)
    cut = data[: int(len(data) * fraction)]
    with pytest.raises(ItemError) as caught:
        decode_video(io.BytesIO(cut), SamplePlan(pts_seconds=(0.0, 2.9)), None)
    assert (caught.value.stage, caught.value.code) == ("decode", "truncated")
    times = (0.0, 0.2)
    frames = decode_video(io.BytesIO(cut), SamplePlan(pts_seconds=times), None)
    for time, pixels in zip(times, frames.pixels, strict=True):
        assert np.array_equal(pixels, shown_at(truth, time))


@pytest.mark.parametrize("library, pix_fmt", [("libx264", "yuv420p"), ("mpeg4", "yuv420p"), ("mjpeg", "yuvj420p")])
def test_a_frame_that_is_only_half_there_is_not_shown(library, pix_fmt):
    faststart = {"movflags": "faststart"}
    data = make_video(Recipe(container="mov", library=library, pix_fmt=pix_fmt, container_options=faststart))
    with av.open(io.BytesIO(data)) as container:
        last = [packet for packet in container.demux(video=0) if packet.size][-1]
    cut = data[: last.pos + last.size // 2]
    frames = decode_video(io.BytesIO(cut), SamplePlan(pts_seconds=(0.0, 89 / 30)), None)
    assert frames.pts_seconds[1] == pytest.approx(88 / 30)
    assert np.array_equal(frames.pixels[1], full_decode(data)[88][1])


def test_a_last_target_just_behind_the_end_shows_the_last_frame(clips):
    data, truth = clips("h264 gop 12")
    frames = decode_video(io.BytesIO(data), SamplePlan(pts_seconds=(0.0, 3.05)), None)
    assert np.array_equal(frames.pixels[1], truth[-1][1])


def test_a_frame_that_stays_on_screen_is_not_a_truncation():
    data = make_video(Recipe(container="matroska", times=[0, 1, 2, 120, 121, 122], options={"bf": "0"}))
    frames = decode_video(io.BytesIO(data), SamplePlan(pts_seconds=(0.0, 3.5, 4.0)), None)
    assert frames.pts_seconds == pytest.approx((0.0, 0.067, 4.0))


def test_damage_in_the_middle_leaves_the_rest_usable():
    data = bytearray(make_video(Recipe(options={"g": "10", "bf": "0"})))
    with av.open(io.BytesIO(data)) as container:
        packets = [(p.pos, p.size) for p in container.demux(video=0) if p.size]
    truth = full_decode(bytes(data))
    position, size = packets[45]
    data[position : position + size] = b"\xff" * size
    times = (0.0, 1.0, 2.5)
    frames = decode_video(io.BytesIO(data), SamplePlan(pts_seconds=times), None)
    for time, pixels in zip(times, frames.pixels, strict=True):
        assert np.array_equal(pixels, shown_at(truth, time))


def test_no_frame_at_all_is_corrupt():
    data = bytearray(make_video(Recipe(container_options={"movflags": "faststart"}, num_frames=30)))
    begin = data.index(b"mdat") + 4
    data[begin:] = b"\xff" * (len(data) - begin)
    with pytest.raises(ItemError) as caught:
        decode_video(io.BytesIO(data), SamplePlan(pts_seconds=(0.0,)), None)
    assert (caught.value.stage, caught.value.code) == ("decode", "corrupt")


@pytest.mark.parametrize("num_reads", [1, 2, 3, 5, 8])
def test_a_failing_source_is_not_the_clips_fault(num_reads):
    class Failing(io.BytesIO):
        reads = 0

        def read(self, size=-1):
            self.reads += 1
            if self.reads > num_reads:
                raise TransientError("reset")
            return super().read(size)

    data = make_video(Recipe(size=(240, 320), options={"crf": "5"}))
    assert len(data) > 300_000
    with pytest.raises(TransientError):
        decode_video(Failing(data), SamplePlan(pts_seconds=(0.0, 2.0)), None)


def test_the_file_stays_open(clips):
    file = io.BytesIO(clips("h264 gop 12")[0])
    decode_video(file, SamplePlan(pts_seconds=(0.0,)), None)
    assert not file.closed


def count_runs_in_sequence(monkeypatch) -> list[int]:
    """Grows by one for each time decoding starts at the first packet."""
    runs: list[int] = []
    in_sequence = video._frames_in_sequence
    monkeypatch.setattr(video, "_frames_in_sequence", lambda clip: runs.append(1) or in_sequence(clip))
    return runs


@pytest.mark.parametrize("by_range", [False, True])
@pytest.mark.parametrize(
    "name", ["h264 gop 12", "h264 open gop", "hevc open gop", "h264 VFR", "h264 starts at 5 s", "mkv starts at 5 s"]
)
def test_at_keyframes_the_keyframe_before_is_shown(clips, name, by_range, monkeypatch):
    data, truth = clips(name)
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        packets = [packet for packet in container.demux(stream) if packet.size]
        first = min(packet.pts for packet in packets)
        keys = sorted(float((packet.pts - first) * stream.time_base) for packet in packets if packet.is_keyframe)
    times = [0.0, 0.3, 1.1, 2.0, truth[-1][0]]
    expected = [max(key for key in keys if key <= time + 1e-6) for time in times]
    assert len(set(expected)) > 2
    decoded = count_decoded(monkeypatch)
    plan = SamplePlan(pts_seconds=tuple(times))
    frames = decode_video(io.BytesIO(data), plan, None, at_keyframes=True, by_range=by_range)
    assert frames.pts_seconds == pytest.approx(expected, abs=1e-6)
    assert all(np.array_equal(a, shown_at(truth, b)) for a, b in zip(frames.pixels, expected, strict=True))
    assert len(decoded) == len(set(expected))


class Counted(io.BytesIO):
    """Counts the bytes that are read."""

    num_read = 0

    def read(self, size=-1):
        data = super().read(size)
        self.num_read += len(data)
        return data


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", [name for name in CLIPS if CLIPS[name].container in RANGED])
def test_frames_read_by_range_equal_those_of_the_whole_file(clips, name, plan, monkeypatch):
    data, truth = clips(name)
    plan = SamplePlan(pts_seconds=tuple(t for t in PLANS[plan] if t <= truth[-1][0]))
    decoded = count_decoded(monkeypatch)
    whole = decode_video(io.BytesIO(data), plan, None)
    num_whole = len(decoded)
    ranged = decode_video(io.BytesIO(data), plan, None, by_range=True)
    assert ranged.pts_seconds == whole.pts_seconds
    assert np.array_equal(ranged.pixels, whole.pixels)
    # Of Matroska the beginning is decoded by itself, and a keyframe that an open group before it reached once more.
    assert len(decoded) == 2 * num_whole or CLIPS[name].container in ("matroska", "webm")


@pytest.mark.parametrize("movflags", ["", "faststart"])
def test_a_large_file_is_read_where_its_frames_are(movflags):
    data = long_video(num_groups=100, movflags=movflags)
    with av.open(io.BytesIO(data)) as container:
        sizes = [packet.size for packet in container.demux(video=0) if packet.size]
        length = float(container.streams.video[0].duration * container.streams.video[0].time_base)
    index_bytes = len(data) - sum(sizes)  # no sound in it: all else is the index
    times = tuple(k * (length - 0.5) / 7 for k in range(8))
    file = Counted(data)
    frames = decode_video(file, SamplePlan(pts_seconds=times), (64, 96), by_range=True)
    assert np.array_equal(frames.pixels, decode_video(io.BytesIO(data), SamplePlan(pts_seconds=times), (64, 96)).pixels)
    needed = sum(sum(sizes[30 * (frame // 30) : frame + 1]) for frame in {int(t * 30 + 1e-3) for t in times})
    assert needed < 0.1 * len(data)
    assert file.num_read <= 1.1 * needed + index_bytes


def test_of_a_large_matroska_file_what_lies_between_cues_and_frames_is_read():
    data = long_video(num_groups=100, container="matroska")
    with av.open(io.BytesIO(data)) as container:
        sizes = [packet.size for packet in container.demux(video=0) if packet.size]
    frames_wanted = [0, 299, 1234, 2999]
    plan = SamplePlan(pts_seconds=tuple((frame + 0.5) / 30 for frame in frames_wanted))
    file = Counted(data)
    frames = decode_video(file, plan, (64, 96), by_range=True)
    assert np.array_equal(frames.pixels, decode_video(io.BytesIO(data), plan, (64, 96)).pixels)
    # From the keyframe to 17 frames behind the last that is wanted, for pictures may be reordered; libav reads 32 KB at
    # a time, and goes to the beginning and to the cues besides.
    needed = sum(sum(sizes[frame // 30 * 30 : frame + 18]) for frame in frames_wanted)
    beginning = sum(sizes[:17])
    assert file.num_read <= needed + beginning + (3 * len(frames_wanted) + 5) * 32_768 < len(data) / 12


@pytest.mark.parametrize("name", ["h264 mkv", "vp9 webm"])
def test_cues_that_are_far_apart_have_everything_decoded_and_nothing_held(clips, name, monkeypatch):
    data, truth = clips(name)
    monkeypatch.setattr(clip, "_STRETCH_BYTES", 3_000)
    in_sequence = count_runs_in_sequence(monkeypatch)
    times = (0.0, 1.3, 2.9)
    frames = decode_video(io.BytesIO(data), SamplePlan(pts_seconds=times), None, by_range=True)
    assert all(np.array_equal(a, shown_at(truth, t)) for a, t in zip(frames.pixels, times, strict=True))
    assert in_sequence == [1]


def count_decoded(monkeypatch) -> list[av.VideoFrame]:
    """Grows by the frames that decoders give."""
    decoded: list[av.VideoFrame] = []
    fed = video._fed

    def counted(context, packet):
        frames = fed(context, packet)
        decoded.extend(frames)
        return frames

    monkeypatch.setattr(video, "_fed", counted)
    return decoded
