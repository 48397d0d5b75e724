"""Files of some megabytes that hardly end: sounds and videos of tiny packets, and headers that promise more of them."""

import io
import struct
import zlib
from collections.abc import Callable
from fractions import Fraction

import av
import numpy as np

from tests.media.media_files import Recipe, make_image, make_video
from tests.media.sound_files import make_sound

SILENCE = np.zeros(48_000, np.float32)


def repeated(data: bytes, num_bytes: int) -> bytes:
    return data * (num_bytes // len(data))


def flac_without_a_length() -> bytes:
    """Frames of 4,608 samples of silence in a dozen bytes each, and a header that does not say how many there are."""
    data = make_sound("flac", "flac", SILENCE, 48_000)
    body = data.index(b"\xff\xf8")
    # STREAMINFO (RFC 9639, 8.2): 36 bits of samples in all, the last of its first 18 bytes behind the block's header.
    header = bytearray(data[:body])
    header[8 + 13] &= 0xF0
    header[8 + 14 : 8 + 18] = bytes(4)
    return bytes(header) + repeated(data[body:], 8 * 2**20)


def flac_of_a_second() -> bytes:
    """The same frames, behind a header of one second."""
    data = make_sound("flac", "flac", SILENCE, 48_000)
    return data + repeated(data[data.index(b"\xff\xf8") :], 8 * 2**20)


def adts() -> bytes:
    """AAC frames of silence, each with its own header; nothing says how many."""
    return repeated(make_sound("adts", "aac", SILENCE, 48_000), 8 * 2**20)


def mp3() -> bytes:
    """MPEG-2.5 at 8 kbit/s: 16 MB are four and a half hours."""
    data = make_sound("mp3", "libmp3lame", SILENCE[:8000], 8000, options={"b": "8k", "write_xing": "0"})
    return repeated(data[data.index(b"\xff\xe3") :], 17 * 2**20)


def opus() -> bytes:
    """Packets of 60 ms of silence in three bytes, a quarter of a million of them."""
    return _muxed_again("ogg", make_sound("ogg", "libopus", SILENCE, 48_000, options={"frame_duration": "60"}), 250_000)


def wav_of_any_length() -> bytes:
    """RIFF and data of 4 GB, as recorders write that cannot go back; 2 MB are there."""
    return (
        b"RIFF\xff\xff\xff\xffWAVEfmt "
        + struct.pack("<IHHIIHH", 16, 1, 1, 8000, 8000, 1, 8)
        + (b"data\xff\xff\xff\xff" + bytes(2 * 2**20))
    )


def still_mp4() -> bytes:
    """Two hundred thousand pictures that repeat the one before in a dozen bytes: two hours."""
    return _muxed_again("mp4", make_video(Recipe(size=(64, 64), num_frames=2, options={"bf": "0"})), 200_000)


def crowded_mp4() -> bytes:
    """As many within two seconds."""
    return _muxed_again("mp4", make_video(Recipe(size=(64, 64), num_frames=2, options={"bf": "0"})), 200_000, 9)


def looping_ts() -> bytes:
    """The same second of a transport stream, whose clock starts anew each time."""
    return repeated(make_video(Recipe(container="mpegts", num_frames=30, options={"bf": "0"})), 8 * 2**20)


def looping_webm() -> bytes:
    """A live recording: clusters of unknown size, the same again and again."""
    data = make_video(
        Recipe(
            container="webm",
            library="libvpx",
            num_frames=30,
            options={"deadline": "realtime", "cpu-used": "8"},
            container_options={"live": "1"},
        )
    )
    return data + repeated(data[data.index(b"\x1f\x43\xb6\x75") :], 8 * 2**20)


def promised_packets() -> bytes:
    """MP4 whose table of sizes (ISO/IEC 14496-12, 8.7.3.2) has one size for two billion samples."""
    data = bytearray(make_video(Recipe(num_frames=30, options={"bf": "0"})))
    at = data.index(b"stsz") + 8
    data[at : at + 8] = (1).to_bytes(4, "big") + (2**31 - 1).to_bytes(4, "big")
    at = data.index(b"stts") + 8
    data[at + 4 : at + 8] = (2**31 - 1).to_bytes(4, "big")
    at = data.index(b"stsc") + 8
    data[at + 8 : at + 12] = (2**31 - 1).to_bytes(4, "big")
    return bytes(data)


def gif() -> bytes:
    """A third of a million pictures of one pixel."""
    data = make_image("GIF")
    table = 13 + 3 * 2 ** ((data[10] & 7) + 1) if data[10] & 128 else 13
    frame = b"\x21\xf9\x04\x00\x01\x00\x00\x00" + b"\x2c" + bytes(4) + b"\x01\x00\x01\x00\x00" + b"\x02\x02\x4c\x01\x00"
    return data[:table] + frame * 330_000 + b";"


def png_of_remarks() -> bytes:
    """A quarter of a million texts between header and picture."""
    data = make_image("PNG")
    body = b"tEXta\0b"
    remark = (len(body) - 4).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")
    return data[:33] + remark * 250_000 + data[33:]


def _muxed_again(container: str, data: bytes, count: int, ticks: int | None = None) -> bytes:
    """The last packet of a file `count` times, each lasting so many microseconds, or as it did."""
    output = io.BytesIO()
    with av.open(io.BytesIO(data)) as source, av.open(output, "w", format=container) as target:
        stream = source.streams[0]
        packets = [packet for packet in source.demux(stream) if packet.size]
        written = target.add_stream_from_template(stream)
        last, step = bytes(packets[-1]), packets[-1].duration
        if ticks is not None:
            written.time_base, step = Fraction(1, 1_000_000), ticks
        for number in range(count):
            copy = av.Packet(bytes(packets[0]) if number == 0 else last)
            copy.stream, copy.is_keyframe = written, number == 0 or stream.type == "audio"
            copy.time_base = stream.time_base if ticks is None else Fraction(1, 1_000_000)
            copy.pts = copy.dts = number * step
            copy.duration = step
            target.mux(copy)
    return output.getvalue()


FILES: dict[str, Callable[[], bytes]] = {
    make.__name__: make
    for make in (
        flac_without_a_length,
        flac_of_a_second,
        adts,
        mp3,
        opus,
        wav_of_any_length,
        still_mp4,
        crowded_mp4,
        looping_ts,
        looping_webm,
        promised_packets,
        gif,
        png_of_remarks,
    )
}
