import io
import random
import tracemalloc

import av
import numpy as np
import pytest
import scipy.signal
import soundfile
import soxr
from media_files import Recipe, make_image, make_video
from sound_files import lag, make_sound, sweep, wave, with_cover

from pipeline.errors import ItemError, TransientError
from pipeline.media.audio import Sound, chunks, decode_audio, sound_blocks
from pipeline.media.probe import probe_media
from pipeline.schema import Modality, Probe

# container, encoder, rate; and by how many samples the encoder is late where the container cannot say so.
LOSSLESS = {
    "wav 16": ("wav", "pcm_s16le", 44_100),
    "wav 24": ("wav", "pcm_s24le", 44_100),
    "wav float": ("wav", "pcm_f32le", 44_100),
    "wav double": ("wav", "pcm_f64le", 44_100),
    "flac": ("flac", "flac", 44_100),
    "flac in ogg": ("ogg", "flac", 44_100),
    "alac": ("mp4", "alac", 44_100),
    "mov": ("mov", "pcm_s16be", 48_000),
    "matroska": ("matroska", "pcm_s16le", 44_100),
    "aiff": ("aiff", "pcm_s16be", 44_100),
    "caf": ("caf", "pcm_s16be", 44_100),
    "au": ("au", "pcm_s16be", 44_100),
}
LOSSY = {
    "mp3": ("mp3", "libmp3lame", 44_100, 0),
    "aac mp4": ("mp4", "aac", 44_100, 0),
    "aac matroska": ("matroska", "aac", 44_100, 0),
    "opus ogg": ("ogg", "libopus", 48_000, 0),
    "opus webm": ("webm", "libopus", 48_000, 0),
    "opus mp4": ("mp4", "libopus", 48_000, 0),
    "vorbis ogg": ("ogg", "vorbis", 44_100, 0),
    "vorbis webm": ("webm", "vorbis", 44_100, 0),
    "aac mpeg-ts": ("mpegts", "aac", 44_100, 1024),
    "aac adts": ("adts", "aac", 44_100, 1024),
    "aac flv": ("flv", "aac", 44_100, 1024),
    "mp3 flv": ("flv", "libmp3lame", 44_100, 1105),
    "mp2": ("mp2", "mp2", 44_100, 481),
}
ENDS_EXACTLY = {"mp3", "aac mp4", "opus ogg", "opus webm", "opus mp4"}  # by a tag, an edit list, or what is discarded
FRAME = 1152  # the longest frame of these codecs but Opus: 2,880
SECONDS = 6.0


@pytest.fixture(scope="module")
def files() -> dict[str, tuple[bytes, int, np.ndarray]]:
    """Name → (file, rate, what was encoded)."""
    made = {}
    for name, (container, library, rate, *_) in {**LOSSLESS, **LOSSY}.items():
        samples = sweep(rate, SECONDS)
        options = {"b": "192k"} if name in LOSSY else {}
        encoded = np.stack([samples, samples]) if library == "vorbis" else samples  # that encoder takes no other
        made[name] = make_sound(container, library, encoded, rate, options=options), rate, samples
    return made


def decoded(data: bytes, rate_hz: int, **options: float) -> Sound:
    return decode_audio(io.BytesIO(data), rate_hz=rate_hz, **options)


def failure(data: bytes, **options: float) -> str:
    with pytest.raises(ItemError) as caught:
        decoded(data, 16_000, **options)
    assert caught.value.stage == "decode"
    return caught.value.code


def probe(data: bytes, declared: Modality | None = None) -> Probe:
    return probe_media(io.BytesIO(data), num_bytes=len(data), declared=declared, name="item")


@pytest.mark.parametrize("name", LOSSLESS)
def test_lossless_sound_is_what_was_encoded(name, files):
    data, rate, samples = files[name]
    sound = decoded(data, rate)
    assert sound.samples.shape == samples.shape
    np.testing.assert_allclose(sound.samples, samples, atol=1.01 / 2**15)


@pytest.mark.parametrize("name", LOSSY)
def test_lossy_sound_lies_at_its_very_place(name, files):
    data, rate, samples = files[name]
    late = LOSSY[name][3]
    found = decoded(data, rate).samples
    assert lag(found, samples) == late
    assert abs(len(found) - late - len(samples)) < 2880
    assert len(found) == len(samples) or name not in ENDS_EXACTLY
    inner = slice(rate // 2, len(samples) - rate // 2)
    error = found[late:][inner] - samples[inner]
    assert np.sqrt(np.mean(error**2)) < 0.1 * np.sqrt(np.mean(samples[inner] ** 2))


@pytest.mark.parametrize("name", [*LOSSLESS, *LOSSY])
def test_the_probe_says_what_decodes(name, files):
    data, rate, _ = files[name]
    facts = probe(data)
    assert facts == probe(data, "audio")
    assert (facts.modality, facts.sample_rate_hz) == ("audio", rate)
    assert facts.num_channels == (2 if name.startswith("vorbis") else 1)
    assert (facts.width, facts.height, facts.num_frames, facts.num_bytes) == (0, 0, 0, len(data))
    assert facts.duration_seconds == pytest.approx(len(decoded(data, rate).samples) / rate, abs=0.03)


@pytest.mark.parametrize("rate", [8000, 11_025, 22_050, 24_000, 32_000, 44_100, 48_000, 88_200, 96_000, 192_000])
def test_resampling_agrees_with_other_resamplers(rate):
    samples = sweep(rate, 2.0, highest=2500.0)
    samples *= scipy.signal.windows.tukey(len(samples), 0.1).astype(np.float32)  # edges are each one's own
    found = decoded(make_sound("wav", "pcm_f32le", samples, rate), 16_000).samples
    by_soxr = soxr.resample(samples, rate, 16_000, quality="VHQ")
    by_scipy = scipy.signal.resample_poly(samples.astype(np.float64), 16_000, rate, window=("kaiser", 14.0))
    assert len(found) == len(by_scipy) == 32_000
    np.testing.assert_allclose(found, by_soxr[:32_000], atol=1e-4)  # -74 dB of the sweep's peak
    # Its own filter is short: ten samples of the slower rate on each side.
    np.testing.assert_allclose(found[200:-200], by_scipy[200:-200], atol=3e-3)


@pytest.mark.parametrize("rate", [44_100, 48_000, 8000])
def test_tones_above_the_new_nyquist_frequency_are_gone_and_those_below_are_not(rate):
    t = np.arange(rate) / rate
    for hertz in (500, 3000, 3599):
        tone = decoded(wave(0.5 * np.sin(2 * np.pi * hertz * t)[None], rate), 8000).samples[400:-400]
        assert np.sqrt(2 * np.mean(tone.astype(np.float64) ** 2)) == pytest.approx(0.5, rel=0.01)
    for hertz in (4200, 6000, 15_000):
        if hertz < rate / 2:
            tone = decoded(make_sound("wav", "pcm_f32le", 0.5 * np.sin(2 * np.pi * hertz * t), rate), 8000).samples
            assert np.abs(tone[400:-400]).max() < 0.5 * 10 ** (-90 / 20)


@pytest.mark.parametrize("rate", [8000, 16_000, 44_100, 48_000])
def test_an_impulse_stays_where_it_is(rate):
    samples = np.zeros(3 * rate, np.float32)
    samples[2 * rate] = 1.0
    found = decoded(make_sound("wav", "pcm_f32le", samples, rate), 16_000).samples
    assert np.argmax(np.abs(found)) == 32_000
    np.testing.assert_allclose(found[32_000 - 50 : 32_000], found[32_001:32_051][::-1], atol=1e-6)


@pytest.mark.parametrize("channels", range(1, 9))
@pytest.mark.parametrize("container, library", [("wav", "pcm_f32le"), ("flac", "flac"), ("matroska", "pcm_s16le")])
def test_channels_are_averaged(channels, container, library):
    samples = np.stack([sweep(16_000, 0.5, 500.0 + 300 * k) * (k + 1) / 8 for k in range(channels)])
    data = make_sound(container, library, samples, 16_000)
    np.testing.assert_allclose(decoded(data, 16_000).samples, samples.mean(axis=0), atol=1.01 / 2**15)
    assert probe(data).num_channels == channels


def test_eight_planes_are_averaged():
    samples = np.stack([sweep(48_000, 1.0, 500.0 + 300 * k) * (k + 1) / 8 for k in range(8)])
    samples[3] = 0  # the place of low effects, of which AAC keeps little
    found = decoded(make_sound("mp4", "aac", samples, 48_000, options={"b": "1M"}), 48_000).samples
    expected = samples.mean(axis=0)
    assert lag(found, expected) == 0
    error = (found - expected)[2048:40_000]
    assert np.sqrt(np.mean(error**2)) < 0.1 * np.sqrt(np.mean(expected**2))


@pytest.mark.parametrize("format", ["u8", "s16", "s32", "s64", "flt", "dbl"])
def test_sample_formats_have_one_scale(format):
    library = {
        "u8": "pcm_u8",
        "s16": "pcm_s16le",
        "s32": "pcm_s32le",
        "s64": "pcm_s64le",
        "flt": "pcm_f32le",
        "dbl": "pcm_f64le",
    }[format]
    samples = sweep(16_000, 0.2)
    data = make_sound("wav", library, samples, 16_000, sample_format=format)
    np.testing.assert_allclose(decoded(data, 16_000).samples, samples, atol=1.01 / 2**7 if format == "u8" else 1e-4)


@pytest.mark.parametrize(
    "name, tolerance", [("wav 16", 0), ("wav 24", 0), ("flac", 0), ("aiff", 0), ("mp3", 2e-3), ("vorbis ogg", 1e-4)]
)
def test_libsndfile_decodes_the_same(name, tolerance, files):
    data, rate, _ = files[name]
    expected, their_rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    expected = expected.mean(axis=1)
    found = decoded(data, rate).samples
    assert their_rate == rate
    late = lag(found, expected)  # some versions of libsndfile leave an MP3's priming in
    assert late == 0 or name == "mp3"
    length = min(len(found), len(expected)) - abs(late) - FRAME
    np.testing.assert_allclose(found[max(0, late) :][:length], expected[max(0, -late) :][:length], atol=tolerance)


def test_what_is_not_a_number_is_silence():
    samples = sweep(16_000, 0.1)
    samples[100:200], samples[300], samples[400], samples[500] = np.nan, np.inf, -np.inf, 3e38
    data = make_sound("wav", "pcm_f32le", samples, 16_000)
    np.testing.assert_array_equal(decoded(data, 16_000).samples, np.where(np.abs(samples) < 1, samples, 0))


# A part


@pytest.mark.parametrize("name", [*LOSSLESS, *LOSSY])
@pytest.mark.parametrize("rate_hz", [16_000, 44_100, 48_000])
def test_a_part_has_the_samples_of_the_whole(name, rate_hz, files):
    data, _, _ = files[name]
    whole = decoded(data, rate_hz).samples
    choose = random.Random(f"{name} {rate_hz}")
    for _ in range(3):
        start, stop = sorted(choose.uniform(0, SECONDS) for _ in range(2))
        part = decoded(data, rate_hz, start_seconds=start, stop_seconds=stop)
        assert part.start_seconds == round(start * rate_hz) / rate_hz
        np.testing.assert_array_equal(part.samples, whole[round(start * rate_hz) : round(stop * rate_hz)])


def test_parts_that_follow_each_other_are_the_whole(files):
    data, _, _ = files["mp3"]
    whole = decoded(data, 16_000)
    pieces = [decoded(data, 16_000, start_seconds=a, stop_seconds=b) for a, b in chunks(SECONDS, seconds=1.7)]
    np.testing.assert_array_equal(np.concatenate([piece.samples for piece in pieces]), whole.samples)


@pytest.mark.parametrize("container, library", [("wav", "pcm_s16le"), ("flac", "flac")])
def test_a_part_reads_a_part_where_packets_stand_alone(container, library):
    noise = np.random.default_rng(3).uniform(-0.5, 0.5, 120 * 16_000).astype(np.float32)
    data = make_sound(container, library, noise, 16_000)
    file = Counted(data)
    part = decode_audio(file, rate_hz=8000, start_seconds=90.0, stop_seconds=92.0)
    assert file.num_bytes < len(data) / 4
    np.testing.assert_array_equal(part.samples, decoded(data, 8000).samples[720_000:736_000])


class Counted(io.BytesIO):
    num_bytes = 0

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self.num_bytes += len(data)
        return data


def test_a_part_may_stop_at_the_end_and_not_far_behind_it(files):
    data, _, _ = files["wav 16"]
    assert decoded(data, 16_000, start_seconds=5.0, stop_seconds=6.0).duration_seconds == 1.0
    assert decoded(data, 16_000, start_seconds=5.0, stop_seconds=9.0).duration_seconds == 1.0  # the header says 6
    assert failure(data, start_seconds=6.5, stop_seconds=7.0) == "truncated"
    with pytest.raises(ValueError, match="starts at 0 or later"):
        decoded(data, 16_000, start_seconds=2.0, stop_seconds=2.0)


# The container's clock


def test_a_gap_is_silence_of_its_length():
    rate = 16_000
    samples = sweep(rate, 2.0) + 0.1
    data = make_sound("matroska", "pcm_s16le", samples, rate, starts=(0, 3 * rate))
    found = decoded(data, rate).samples
    expected = np.concatenate([samples[:rate], np.zeros(2 * rate, np.float32), samples[rate:]])
    np.testing.assert_allclose(found, expected, atol=1.01 / 2**15)
    part = decoded(data, rate, start_seconds=0.5, stop_seconds=3.5).samples
    np.testing.assert_array_equal(part, found[rate // 2 : 7 * rate // 2])


@pytest.mark.parametrize("container", ["mp4", "mpegts", "matroska"])
def test_a_gap_between_frames_of_aac(container):
    rate, piece = 48_000, 50 * 1024
    samples = sweep(rate, 2 * piece / rate)
    data = make_sound(container, "aac", samples, rate, starts=(0, 2 * piece))
    found = decoded(data, rate).samples
    late = 1024 if container == "mpegts" else 0
    assert lag(found[: piece + late], samples[:piece]) == late
    assert abs(lag(found[-piece - rate // 10 :], samples[piece:]) - rate // 10) < 1024 + late
    assert not found[piece + 3000 : 2 * piece - 3000].any()


def test_packets_a_few_milliseconds_apart_follow_each_other():
    rate = 16_000
    samples = sweep(rate, 2.0)
    data = make_sound("matroska", "pcm_s16le", samples, rate, starts=(0, rate + 100))  # 6 ms
    np.testing.assert_allclose(decoded(data, rate).samples, samples, atol=1.01 / 2**15)


@pytest.mark.parametrize("container, library", [("mp4", "aac"), ("matroska", "pcm_s16le"), ("mpegts", "aac")])
def test_sound_that_comes_in_behind_the_pictures_has_silence_before_it(container, library):
    rate = 48_000
    samples = sweep(rate, 2.0)
    data = make_sound(container, library, samples, rate, starts=(rate // 2,), video_seconds=3.0)
    found = decoded(data, rate).samples
    # MP4 and Matroska count their milliseconds.
    assert abs(lag(found, samples) - rate // 2) <= (0 if container == "mpegts" else 48)
    assert not found[: rate // 4].any()
    facts = probe(data, "audio")
    assert (facts.modality, facts.sample_rate_hz) == ("audio", rate)
    assert facts.duration_seconds == pytest.approx(2.5, abs=0.05)
    assert probe(data).modality == "video"


@pytest.mark.parametrize("container", ["matroska", "mp4", "mpegts"])
def test_a_file_that_starts_late_alone_has_no_silence_before_it(container):
    library = "aac" if container != "matroska" else "pcm_s16le"
    samples = sweep(48_000, 2.0)
    data = make_sound(container, library, samples, 48_000, starts=(5 * 48_000,))
    sound = decoded(data, 48_000)
    # MP4 says by an edit that nothing is heard before: libav starts there, and so does time 0.
    assert lag(sound.samples, samples) in (0, 1024)
    assert sound.duration_seconds == pytest.approx(2.0, abs=0.05)
    assert probe(data).duration_seconds == pytest.approx(2.0, abs=0.05)


# What is wrong


@pytest.mark.parametrize(
    "name", ["wav 16", "flac", "mp3", "aac mp4", "opus ogg", "vorbis webm", "aac mpeg-ts", "aac flv"]
)
def test_no_damage_raises_anything_but_an_item_error(name, files):
    data, _, _ = files[name]
    choose = random.Random(name)
    for k in range(30):
        broken = bytearray(data)
        for _ in range(choose.choice([1, 20, 300])):
            broken[choose.randrange(len(broken))] = choose.randrange(256)
        cut = bytes(broken[: choose.randrange(1, len(broken))]) if k % 2 else bytes(broken)
        for take in (probe, lambda data: decoded(data, 16_000)):
            try:
                take(cut)
            except ItemError as error:
                assert error.stage in ("probe", "decode")


@pytest.mark.parametrize("name", ["wav 16", "flac", "mp3"])
def test_a_file_that_breaks_off_is_used_up_to_a_twentieth(name, files):
    data, rate, _ = files[name]
    whole = decoded(data, rate).samples
    found = decoded(data[: int(len(data) * 0.97)], rate).samples
    assert 0.95 * len(whole) < len(found) < len(whole)
    length = len(found) - 2 * FRAME
    np.testing.assert_array_equal(found[:length], whole[:length])
    assert failure(data[: len(data) // 2]) == "truncated"
    part = decoded(data[: len(data) // 2], rate, start_seconds=0.5, stop_seconds=2.0).samples  # that is there
    np.testing.assert_array_equal(part, whole[round(0.5 * rate) : 2 * rate])


def test_a_cut_mp4(files):
    samples = sweep(44_100, SECONDS)
    data = make_sound("mp4", "aac", samples, 44_100, container_options={"movflags": "faststart"})
    assert failure(data[: len(data) // 2]) == "truncated"
    assert probe(data[: len(data) // 2]).duration_seconds == pytest.approx(SECONDS, abs=0.01)
    assert failure(files["aac mp4"][0][:1000]) == "corrupt"


def test_a_damaged_stretch_is_silence_and_what_follows_keeps_its_place():
    samples = np.random.default_rng(5).uniform(-0.5, 0.5, 100 * 16_000).astype(np.float32)
    data = bytearray(make_sound("matroska", "flac", samples, 16_000))
    data[len(data) // 2 : len(data) // 2 + 3000] = bytes(3000)
    found = decoded(bytes(data), 16_000).samples
    assert len(found) == pytest.approx(len(samples), abs=200)
    assert lag(found[-16_000:], samples[-16_000:]) in range(-16, 17)


def test_more_than_a_twentieth_of_damaged_packets_is_no_sound():
    samples = np.random.default_rng(5).uniform(-0.5, 0.5, 20 * 16_000).astype(np.float32)
    data = make_sound("matroska", "flac", samples, 16_000)
    with av.open(io.BytesIO(data)) as container:
        packets = [bytes(packet) for packet in container.demux(audio=0) if packet.size]
    for share, code in ((0.02, None), (0.2, "corrupt")):
        broken = data
        for packet in packets[1 :: round(1 / share)]:
            broken = broken.replace(packet, bytes(len(packet)))
        if code is None:
            assert len(decoded(broken, 16_000).samples) == pytest.approx(len(samples), abs=20)
        else:
            assert failure(broken) == code


def test_what_steps_back_in_time_is_passed_over():
    first, second = (make_sound("mpegts", "aac", sweep(48_000, seconds), 48_000) for seconds in (2.0, 3.0))
    alone, joined = decoded(first, 16_000).samples, decoded(first + second, 16_000, stop_seconds=2.0).samples
    np.testing.assert_array_equal(joined, alone[:32_000])
    # What the second has behind the end of the first goes on there.
    assert decoded(first + second, 16_000).duration_seconds == pytest.approx(3.0, abs=0.1)


@pytest.mark.parametrize(
    "data, code",
    [
        (b"", "unknown_format"),
        (b"RIFF\x24\x00\x00\x00WAVE", "corrupt"),
        (make_video(Recipe(num_frames=3)), "no_audio_stream"),
        (wave(np.zeros((1, 0)), 16_000), "corrupt"),
    ],
    ids=["empty", "head", "video", "no samples"],
)
def test_what_has_no_sound(data, code):
    assert failure(data) == code


def test_a_jump_in_time_does_not_fill_the_memory():
    data = make_sound("matroska", "pcm_s16le", sweep(16_000, 2.0), 16_000, starts=(0, 16_000 * 10**6))
    tracemalloc.start()
    assert failure(data, longest_seconds=600.0) == "over_budget_duration"
    assert tracemalloc.get_traced_memory()[1] < 100 * 10**6
    tracemalloc.stop()
    assert decoded(data, 16_000, stop_seconds=5.0).duration_seconds == 5.0
    assert failure(data, stop_seconds=10.0**6) == "over_budget_duration"


def test_long_sound_is_never_held_at_the_sources_rate():
    data = make_sound("flac", "flac", np.zeros((2, 300 * 48_000), np.float32), 48_000)
    tracemalloc.start()
    for block in sound_blocks(io.BytesIO(data), rate_hz=16_000):
        assert block.nbytes < 2**20
    assert tracemalloc.get_traced_memory()[1] < 5 * 10**6  # 115 MB at 48 kHz in stereo, 19 MB at 16 kHz
    tracemalloc.stop()


def test_the_failure_of_a_read_comes_out():
    class Failing(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if self.tell() > 60_000:
                raise TransientError("reset")
            return super().read(size)

    data = wave(sweep(16_000, 10.0)[None], 16_000)
    with pytest.raises(TransientError, match="reset"):
        decode_audio(Failing(data), rate_hz=16_000)


# Headers that are missing, or wrong


@pytest.mark.parametrize("quality", ["0", "9"])
def test_an_mp3_without_a_header_has_the_length_of_its_frames(quality):
    quiet, loud = np.zeros(30 * 44_100, np.float32), np.random.default_rng(1).uniform(-0.9, 0.9, 30 * 44_100)
    samples = np.concatenate([quiet, loud.astype(np.float32)])
    data = make_sound(
        "mp3", "libmp3lame", samples, 44_100, options={"q": quality}, container_options={"write_xing": "0"}
    )
    assert probe(data).duration_seconds == pytest.approx(60.0, abs=0.1)
    assert decoded(data, 44_100).duration_seconds == pytest.approx(60.0, abs=0.1)
    headless = data[data.index(b"\xff\xfb") :]
    assert not headless.startswith(b"ID3")
    assert probe(headless).duration_seconds == pytest.approx(60.0, abs=0.1)


@pytest.mark.parametrize("data_bytes", [0, 2**31 - 1, 2**32 - 1])
def test_a_wav_whose_length_was_never_written(data_bytes):
    samples = sweep(16_000, 3.0)[None]
    data = wave(samples, 16_000, data_bytes=data_bytes)
    assert probe(data).duration_seconds == pytest.approx(3.0, abs=0.01)
    np.testing.assert_allclose(decoded(data, 16_000).samples, samples[0], atol=1 / 2**15)


def test_cover_art_is_no_video():
    samples = sweep(44_100, 2.0)
    data = with_cover(make_sound("mp3", "libmp3lame", samples, 44_100), make_image("PNG"))
    assert probe(data).modality == "audio"
    assert lag(decoded(data, 44_100).samples, samples) == 0
    with pytest.raises(ItemError, match="no_video_stream"):
        probe(data, "video")


def test_what_is_asked_for_and_not_there():
    with pytest.raises(ItemError, match="no_audio_stream"):
        probe(make_video(Recipe(num_frames=3)), "audio")
    with pytest.raises(ItemError, match="declared audio, the content is image"):
        probe(make_image("PNG"), "audio")


# Chunks


@pytest.mark.parametrize(
    "duration, seconds, overlap, expected",
    [
        (70.0, 30.0, 0.0, [(0, 30), (30, 60), (60, 70)]),
        (60.0, 30.0, 0.0, [(0, 30), (30, 60)]),
        (10.0, 30.0, 5.0, [(0, 10)]),
        (55.0, 30.0, 5.0, [(0, 30), (25, 55)]),
        (56.0, 30.0, 5.0, [(0, 30), (25, 55), (50, 56)]),
    ],
)
def test_chunks(duration, seconds, overlap, expected):
    assert chunks(duration, seconds=seconds, overlap_seconds=overlap) == expected


def test_chunks_that_would_never_end():
    with pytest.raises(ValueError, match=r"5\.0 s with 5\.0 s in common"):
        chunks(60.0, seconds=5.0, overlap_seconds=5.0)
