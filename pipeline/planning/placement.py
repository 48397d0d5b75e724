"""Which stages share machines, by what they take: decoders and the encoder, it and the language model. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.planning.calibration import ENCODE_PASS


def decode_cores_per_accelerator(seconds: Mapping[str, float]) -> float | None:
    """How many cores decode as fast as one accelerator encodes. None where nothing is encoded, or not measured."""
    decode, encode = seconds.get("media_decode"), seconds.get("vision_encode")
    return None if decode is None or encode is None else decode / encode


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where decoding belongs: beside the accelerators, or on machines of its own.

    Of each second of encoding: how long the encoder waits for the cores beside it (`queue_seconds`), and how long it
    would wait for frames that come from elsewhere (`transfer_seconds`), decoded by as many cores as that takes.
    """

    separate: bool
    queue_seconds: float
    transfer_seconds: float


def placement(seconds: Mapping[str, float], cores_per_accelerator: float) -> Placement | None:
    """By the measured times of decoding, transfer and encoding. None where one of them is not known."""
    decode, transfer = seconds.get("media_decode"), seconds.get("frame_transfer")
    encode = seconds.get("vision_encode")
    if decode is None or transfer is None or encode is None:
        return None
    queue = max(0.0, decode / cores_per_accelerator - encode) / encode
    carried = max(0.0, transfer - encode) / encode
    return Placement(separate=carried < queue, queue_seconds=queue, transfer_seconds=carried)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pools:
    """Whether accelerators encode and answer in turn, or some encode while the others answer.

    `encoders` is how many of `workers` would encode, where that is soonest. Seconds are of all the work, without
    starts: `queue_seconds` of them, in turn, all accelerators wait for cores that decode; `transfer_seconds`, apart,
    features go from those that encode to those that answer.
    """

    workers: int
    encoders: int
    separate: bool
    in_turn_seconds: float
    apart_seconds: float
    queue_seconds: float
    transfer_seconds: float


def pools(
    seconds: Mapping[str, float], feature_transfer_seconds: float | None, workers: int, decode_cores: float
) -> Pools | None:
    """Of what `work_seconds` gave, and what carrying all features from one process to another takes.

    In turn, `workers` accelerators share both passes evenly, which no split of them improves on (the mediant of two
    quotients lies between them) but where they wait for what does not get faster with their number: the cores that
    decode. Apart, answers begin with the first features: the longer pool's time is that of the run. None where the job
    does not do both, something was not measured, or there is one accelerator.
    """
    answers = sum(value for name, value in seconds.items() if name not in ENCODE_PASS)
    if workers < 2 or "vision_encode" not in seconds or not answers or feature_transfer_seconds is None:
        return None
    decode = seconds.get("media_decode", 0.0) / decode_cores
    encode = max(seconds[name] for name in ENCODE_PASS if name in seconds and name != "media_decode")

    def apart(encoders: int) -> float:
        return max(decode, encode / encoders, (feature_transfer_seconds + answers) / (workers - encoders))

    encoders = min(range(1, workers), key=apart)
    in_turn = max(decode, encode / workers) + answers / workers
    return Pools(
        workers=workers,
        encoders=encoders,
        separate=apart(encoders) < in_turn,
        in_turn_seconds=in_turn,
        apart_seconds=apart(encoders),
        queue_seconds=max(0.0, decode - encode / workers),
        transfer_seconds=feature_transfer_seconds,
    )
