"""Hours and prices, from what is to be done and what was measured of a machine. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.planning.estimate import Work


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """What `headrace calibrate` measured on one machine. None: it was not measured, for the job has no such stage.

    Rates are of one worker: a core that decodes, an accelerator (or a core) that encodes, generates or embeds. Those of
    FLOPs are by the formulas of `estimate`. `decode_ratio`: core-seconds here by those of the reference core.
    `batch_steps`: of a batch of answers, behind the first tokens, which prefill gives; `answer_tokens`: of an answer.
    `start_seconds`: of a run on this machine, what is spent outside its passes, and in those that encode and answer
    before and after their work. `transfer`: frames through the object store, from one process to another.
    """

    device: str
    accelerator: str
    cpu: str
    cpu_count: int
    accelerators: int
    sampled_items: int
    decode_ratio: float | None = None
    encoder_flops_per_second: float | None = None
    prefill_flops_per_second: float | None = None
    step_seconds: float | None = None
    batch_steps: float | None = None
    answer_tokens: float | None = None
    text_flops_per_second: float | None = None
    store_write_bytes_per_second: float | None = None
    store_read_bytes_per_second: float | None = None
    transfer_bytes_per_second: float | None = None
    start_seconds: float = 0.0
    encode_start_seconds: float = 0.0
    answer_start_seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """As it is saved."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Calibration:
        """The inverse. Raises `TypeError` for fields that there are not."""
        return cls(**value)

    @property
    def cores_per_accelerator(self) -> float:
        """That the machine has; on one without accelerators, where cores are the workers, 1."""
        return self.cpu_count / self.accelerators if self.accelerators else 1.0


def work_seconds(work: Work, rates: Calibration) -> dict[str, float]:
    """Stage → seconds of one worker of it, of all the work. Stages without work, or not measured, are left out.

    Named as in `summary.json`, whose `seconds` they can be held against.
    """
    stages = {
        "media_decode": _times(work.decode_core_ms / 1e3, rates.decode_ratio),
        "frame_transfer": _over(work.frame_bytes, rates.transfer_bytes_per_second),
        "vision_encode": _over(work.encoder_flops, rates.encoder_flops_per_second),
        "commit": _over(work.store_bytes, rates.store_write_bytes_per_second),
        "feature_transfer": _over(work.feature_bytes_read, rates.store_read_bytes_per_second),
        "llm_prefill": _over(work.prefill_flops, rates.prefill_flops_per_second),
        "llm_decode": _times(work.prompt_batches * (rates.batch_steps or 0.0), rates.step_seconds),
        "text": _over(work.text_flops, rates.text_flops_per_second),
    }
    return {name: seconds for name, seconds in stages.items() if seconds is not None and seconds > 0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """Of an hour of an accelerator with its machine, of an hour of a further core, of a GB (10^9 bytes) for a month."""

    accelerator_hour: float | None = None
    core_hour: float | None = None
    gb_month: float | None = None

    def of_seconds(self, cpu_seconds: float, accelerator_seconds: float) -> float | None:
        """What both cost together; None where neither has a price."""
        if self.accelerator_hour is None and self.core_hour is None:
            return None
        cpu, accelerator = cpu_seconds * (self.core_hour or 0.0), accelerator_seconds * (self.accelerator_hour or 0.0)
        return (cpu + accelerator) / 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """How long a run takes with so many workers, without the start of its processes.

    `stage_seconds`: of each stage on its workers; `bottleneck` the longest. `cost` is None without prices.
    """

    workers: int
    decode_cores: int
    stage_seconds: dict[str, float]
    seconds: float
    bottleneck: str
    cost: float | None


# What goes on side by side in the encode pass: frames are decoded, carried, encoded and committed as they come.
ENCODE_PASS = ("media_decode", "frame_transfer", "vision_encode", "commit")


def schedule(seconds: Mapping[str, float], workers: int, decode_cores: int, prices: Prices) -> Schedule:
    """Of what `work_seconds` gave, on `workers` accelerators and `decode_cores` cores for decoding.

    The encode pass takes as long as its slowest stage; in the passes that answer, stages of a worker take turns.
    """
    shared = {name: value / (decode_cores if name == "media_decode" else workers) for name, value in seconds.items()}
    encode = max((shared.get(name, 0.0) for name in ENCODE_PASS), default=0.0)
    total = encode + sum(value for name, value in shared.items() if name not in ENCODE_PASS)
    cost = None
    if prices.accelerator_hour is not None:
        cost = total / 3600 * (workers * prices.accelerator_hour + decode_cores * (prices.core_hour or 0.0))
    return Schedule(
        workers=workers,
        decode_cores=decode_cores,
        stage_seconds=shared,
        seconds=total,
        bottleneck=max(shared, key=lambda name: shared[name], default=""),
        cost=cost,
    )


def pass_seconds(seconds: Mapping[str, float], rates: Calibration) -> tuple[float, float]:
    """(encode pass, passes that answer) on the machine that was measured, all of it at work, without their starts.

    Where cores do everything they share it evenly; accelerators encode beside the cores that decode.
    """
    encode = {name: seconds[name] for name in ENCODE_PASS if name in seconds}
    answers = sum(value for name, value in seconds.items() if name not in encode)
    if not rates.accelerators:
        return sum(encode.values()) / rates.cpu_count, answers / rates.cpu_count
    shared = [
        value / (rates.cpu_count if name == "media_decode" else rates.accelerators) for name, value in encode.items()
    ]
    return max(shared, default=0.0), answers / rates.accelerators


def run_seconds(seconds: Mapping[str, float], rates: Calibration) -> float:
    """How long a run takes on the machine that was measured, from its command to its end."""
    encode, answers = pass_seconds(seconds, rates)
    starts = rates.start_seconds + rates.answer_start_seconds + (rates.encode_start_seconds if encode else 0.0)
    return starts + encode + answers


def _over(amount: float, rate: float | None) -> float | None:
    return None if rate is None else amount / rate


def _times(amount: float, factor: float | None) -> float | None:
    return None if factor is None else amount * factor
