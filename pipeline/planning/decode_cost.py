"""What decoding will cost, from header facts and a sample plan alone. Pure.

In core-seconds of a reference core: one of the machine that `scripts/bench/decode_cost` was run on. Other machines
are faster or slower by a factor, which a calibration measures.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.schema import Probe, SamplePlan

# Where the header names no keyframes (transport streams): assumed, not measured. Encoders left alone put a
# keyframe every 128 (libvpx) to 250 frames (libx264, libx265), and streaming services one every 2 to 10 seconds.
_ASSUMED_GROUP_FRAMES = 128.0
_ASSUMED_KEYFRAME_RATIO = 8.0  # bytes of a keyframe beside those of another, also of what only has cues
_TELLS_ORDER = frozenset({"mov"})  # in the header, in which order pictures are shown
_WITHOUT_PTS = frozenset({"avi", "mpeg"})  # decoded in sequence, for no packet's time is known


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeWork:
    """What is done to show a plan's frames, each of `megapixels`.

    The container's index goes over `packets`; `fed` of them, `keyframes` among these, of `num_bytes`, go to the
    decoder, which makes `frames` of those it does not skip; `shown` are converted and resized.
    """

    packets: int
    fed: float
    keyframes: float
    num_bytes: float
    frames: float
    shown: int
    megapixels: float

    def terms(self) -> tuple[float, ...]:
        """What each of `Rates` is multiplied by, in its order."""
        pixels = self.megapixels
        return 1.0, self.frames, self.frames * pixels, self.num_bytes / 1e3, self.shown * pixels


@dataclass(frozen=True, slots=True)
class Rates:
    """CPU milliseconds an item, a frame decoded, a megapixel decoded, a kilobyte decoded, a megapixel shown.

    Of images and pages all that is decoded is shown, and that takes `item` and `shown_megapixel`.
    """

    item: float
    frame: float
    decoded_megapixel: float
    kilobyte: float
    shown_megapixel: float

    def milliseconds(self, work: DecodeWork) -> float:
        """Of one item."""
        rates = (self.item, self.frame, self.decoded_megapixel, self.kilobyte, self.shown_megapixel)
        return PACKET_MS * work.packets + sum(rate * term for rate, term in zip(rates, work.terms(), strict=True))


def decode_seconds(probe: Probe, plan: SamplePlan, *, at_keyframes: bool = False) -> float:
    """Core-seconds to decode and resize the frames of `plan`, whose times are from the start of the file.

    Of a sound all of it, whatever the plan. `at_keyframes`: shown are the keyframes before the planned times.
    """
    if probe.modality == "audio":
        return SOUND_SECONDS_PER_SAMPLE * probe.num_samples
    if probe.modality == "video":
        rates = VIDEO_RATES.get(probe.codec, VIDEO_RATES["h264"])
        opening = 0.0 if probe.container in _TELLS_ORDER else OPENING_MS.get(probe.codec, 0.0)
    else:
        rates, opening = IMAGE_RATES.get(probe.codec, IMAGE_RATES["png"]), 0.0
    return (opening + rates.milliseconds(decode_work(probe, plan, at_keyframes=at_keyframes))) / 1e3


def decode_work(probe: Probe, plan: SamplePlan, *, at_keyframes: bool = False) -> DecodeWork:
    """What is decoded of an image, a page or a video.

    Exact, but for what the decoder may skip, where a video's keyframes come at equal distances; elsewhere what is
    expected of keyframes that lie anywhere.
    """
    megapixels = probe.width * probe.height / 1e6
    if probe.modality != "video":
        return DecodeWork(
            packets=0, fed=1, keyframes=1, num_bytes=probe.num_bytes, frames=1, shown=1, megapixels=megapixels
        )
    wanted = [math.floor((t + 1e-6) * probe.rate_fps) for t in plan.pts_seconds]
    keyframes, others = _fed(probe, wanted, at_keyframes)
    skipped = 0.0
    if probe.reorder_depth and probe.container not in _WITHOUT_PTS:
        # As if none of those shown were ever to be skipped: on average a part of them is.
        skipped = SKIPPED.get(probe.codec, 0.0) * max(0.0, others - len(set(wanted)))
    keyframe_bytes, other_bytes = _mean_bytes(probe)
    return DecodeWork(
        packets=max(probe.coded_frames, probe.num_frames),
        fed=keyframes + others,
        keyframes=keyframes,
        num_bytes=keyframes * keyframe_bytes + others * other_bytes,
        frames=keyframes + others - skipped,
        shown=len(plan),
        megapixels=megapixels,
    )


def _fed(probe: Probe, wanted: Sequence[int], at_keyframes: bool) -> tuple[float, float]:
    """(keyframes, other packets) up to the frames `wanted`, ascending; the first frame is looked at besides."""
    if probe.container in _WITHOUT_PTS:
        return 1.0, float(wanted[-1])
    if probe.keyframe_spacing:
        groups = {n // probe.keyframe_spacing: n % probe.keyframe_spacing for n in (0, *wanted)}  # the last of each
        return float(len(groups)), 0.0 if at_keyframes else float(sum(groups.values()))
    group = max(1.0, probe.group_frames or _ASSUMED_GROUP_FRAMES)
    keyframes, others = 1.0, 0.0
    for before, n in itertools.pairwise((0, *wanted)):
        gap = n - before
        # Groups of one length that begin anywhere: a gap has a keyframe in it with the probability `begins`, anywhere.
        begins = min(1.0, gap / group)
        keyframes += begins
        if not at_keyframes:
            others += begins * max(0.0, min(gap, group) - 1) / 2 + (1 - begins) * gap
    return keyframes, others


def _mean_bytes(probe: Probe) -> tuple[float, float]:
    """Of a keyframe, and of another packet."""
    if probe.keyframes:
        rest = probe.coded_frames - probe.keyframes
        return probe.keyframe_bytes / probe.keyframes, (probe.coded_bytes - probe.keyframe_bytes) / max(1, rest)
    frames = max(1, probe.num_frames)
    keyframes = frames / (probe.group_frames or _ASSUMED_GROUP_FRAMES)
    other = probe.num_bytes / (frames + keyframes * (_ASSUMED_KEYFRAME_RATIO - 1))
    return other * _ASSUMED_KEYFRAME_RATIO, other


# Fitted to what `scripts/bench/decode_cost --fit` measured on two shared cores of an Intel Xeon server, with a relative
# error of 5 to 20 % a codec of videos and 5 to 35 % a format of images. Streams without CABAC (H.264 baseline) were
# estimated too high, by up to 3 times.
PACKET_MS = 0.007  # in memory 600 packets took 4 ms
# Of the frames that are neither keyframes nor shown, where pictures are reordered at all: 0.47 to 0.52 for libx264, 0.2
# to 0.76 for libx265. What AV1's decoder is not given saves little: it has few bytes.
SKIPPED = {"h264": 0.5, "hevc": 0.6}
VIDEO_RATES = {
    "h264": Rates(0.5, 0.0, 0.48, 0.090, 3.3),
    "hevc": Rates(0.0, 0.0, 1.03, 0.319, 2.4),
    "vp9": Rates(1.3, 0.12, 1.26, 0.114, 0.0),
    "av1": Rates(0.0, 0.015, 0.39, 0.145, 2.5),
    # Clips of one bit rate each: what a frame takes and what a kilobyte takes cannot be told apart.
    "mpeg4": Rates(3.0, 0.0, 0.34, 0.0145, 2.2),
}
# Where the header does not tell the order of pictures some are decoded to find it out, when the file is opened.
OPENING_MS = {"h264": 5.5}
IMAGE_RATES = {
    "jpeg": Rates(0.5, 0.0, 0.0, 0.0136, 1.5),
    "png": Rates(0.14, 0.0, 0.0, 0.0072, 5.1),
    "webp": Rates(0.63, 0.0, 0.0, 0.077, 2.3),
    "gif": Rates(0.4, 0.0, 0.0, 0.0057, 4.6),
    "bmp": Rates(0.43, 0.0, 0.0, 0.001, 0.0),
    "tiff": Rates(0.49, 0.0, 0.0, 0.0058, 4.8),
    "avif": Rates(0.0, 0.0, 0.0, 0.108, 8.0),
    "pdf": Rates(1.6, 0.0, 0.0, 0.0, 1.1),  # the bytes are those of the whole document
}
SOUND_SECONDS_PER_SAMPLE = 2.2e-8  # 1.9 to 2.5: WAV, FLAC, MP3, AAC
