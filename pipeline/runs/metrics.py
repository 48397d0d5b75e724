"""What a run tells a monitoring system: every metric by name, and what a receipt adds to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from pipeline.schema import Receipt

# Codes of quarantine are a few dozen. But those of a decoder are what a hostile file may have had it say, so that a
# run's are told apart up to this number: each is a time series for as long as the monitoring system keeps it.
MAX_CODES = 64
OTHER_CODES = "other"


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric, which is exported as `ray_<name>` with the label `run_id` and those here.

    Counters end in `_total` and, like the others, have their unit in the name. `boundaries` are a histogram's, in
    that unit.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    boundaries: tuple[float, ...] = ()


class Meter(Protocol):
    """Where measurements go; what a stage is handed of it by whoever runs it."""

    def record(self, metric: Metric, value: float, **labels: str) -> None:
        """Add to a counter, set a gauge, or observe a value; `labels` are exactly those of the metric."""


class NoMeter:
    """Of stages that run by themselves: nobody looks."""

    def record(self, metric: Metric, value: float, **labels: str) -> None:
        """Nothing."""


NO_METER = NoMeter()


def _counter(name: str, help: str, *labels: str) -> Metric:
    return Metric(name, "counter", help, labels)


# Ray's agent keeps of a histogram what bucket a value is in (2.60: its sum is that of the buckets' middles), so that
# sums of seconds are counters of their own.
STAGE_SECONDS = Metric(
    "headrace_stage_seconds",
    "histogram",
    "Time in a stage: of a media item in media_fetch and media_decode, of a batch or of a window's plan in others",
    ("stage", "modality"),
    (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0),
)
QUEUE_SECONDS = Metric(
    "headrace_queue_seconds",
    "histogram",
    "How long a batch was ready when a worker took it",
    ("queue",),
    (0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0),
)
BUSY_SECONDS = _counter("headrace_busy_seconds_total", "Time that workers spent in a stage", "stage")
WAITED_SECONDS = _counter(
    "headrace_waited_seconds_total", "Time that batches waited; its rate is how many wait at a time", "queue"
)
DEVICE_MEMORY = Metric(
    "headrace_device_memory_bytes", "gauge", "Memory of the worker's GPU after its last batch", ("stage", "kind")
)
BATCHES_PLANNED = _counter("headrace_planned_batches_total", "Batches that written plans have", "pass")
BATCHES_DONE = _counter("headrace_done_batches_total", "Batches that are put away", "pass")
ITEMS_IN = Metric("headrace_listed_items", "gauge", "Items of the run's listing")
ITEMS = _counter("headrace_items_total", "Items whose rows are published", "status")
QUARANTINED = _counter("headrace_quarantined_items_total", "Items in quarantine", "code")

CPU_SECONDS = _counter("headrace_cpu_seconds_total", "Processor time of workers and their decoders", "stage")
ACCELERATOR_SECONDS = _counter("headrace_accelerator_seconds_total", "Time that batches had an accelerator", "stage")
_HITS = _counter("headrace_cache_hits_total", "What a cache had", "tier")
_MISSES = _counter("headrace_cache_misses_total", "What a cache did not have, and was made", "tier")
_FALLBACKS = _counter("headrace_cache_fallbacks_total", "What a cache listed and could not give", "tier")
_READ = _counter("headrace_cache_read_bytes_total", "Read from a cache", "tier")
_WRITTEN = _counter("headrace_cache_written_bytes_total", "Written to a cache", "tier")
_FRAMES, _FEATURES, _VECTORS = ({"tier": tier} for tier in ("frames", "features", "vectors"))

# Name of a receipt's count → what it is exported as. Where it is in the summary, too, the two agree.
COUNTED: dict[str, tuple[tuple[Metric, Mapping[str, str]], ...]] = {
    "media_in": ((_counter("headrace_media_total", "Media items of planned windows"), {}),),
    "fetches": ((_counter("headrace_fetches_total", "Reads of media from their source"), {}),),
    "bytes_fetched": ((_counter("headrace_fetched_bytes_total", "Bytes of media read from their source"), {}),),
    "fetch_retries": ((_counter("headrace_fetch_retries_total", "Attempts at a source that were repeated"), {}),),
    "images_decoded": ((_counter("headrace_decoded_images_total", "Images decoded"), {}),),
    "frames_decoded": ((_counter("headrace_decoded_frames_total", "Frames of videos decoded"), {}),),
    "pages_decoded": ((_counter("headrace_decoded_pages_total", "Pages drawn"), {}),),
    "computed_tokens": ((_counter("headrace_encoder_tokens_total", "Patches computed, padding included"), {}),),
    "padded_tokens": ((_counter("headrace_encoder_padded_tokens_total", "Of those, padding"), {}),),
    "prompt_tokens": ((_counter("headrace_prompt_tokens_total", "Tokens of prompts, without padding"), {}),),
    "prompt_padded_tokens": ((_counter("headrace_prompt_padded_tokens_total", "Padding beside them"), {}),),
    "generated_tokens": ((_counter("headrace_generated_tokens_total", "Tokens of answers"), {}),),
    "decode_slots": ((_counter("headrace_decode_slots_total", "Tokens computed one after another"), {}),),
    "idle_decode_slots": ((_counter("headrace_idle_decode_slots_total", "Of those, after an answer's end"), {}),),
    "text_tokens": ((_counter("headrace_text_tokens_total", "Tokens of texts, without padding"), {}),),
    "text_padded_tokens": ((_counter("headrace_text_padded_tokens_total", "Padding beside them"), {}),),
    "texts_embedded": ((_counter("headrace_embedded_texts_total", "Texts embedded"), {}), (_MISSES, _VECTORS)),
    "prompts_embedded": ((_counter("headrace_embedded_prompts_total", "Prompts embedded"), {}), (_MISSES, _VECTORS)),
    "pairs_scored": ((_counter("headrace_scored_pairs_total", "Pairs of query and document scored"), {}),),
    "texts_scored": ((_counter("headrace_scored_texts_total", "Texts scored"), {}),),
    "oom_splits": ((_counter("headrace_oom_splits_total", "Batches halved for want of memory"), {}),),
    "frames_reused": ((_HITS, _FRAMES),),
    "frames_missed": ((_MISSES, _FRAMES),),
    "frames_fallbacks": ((_FALLBACKS, _FRAMES),),
    "frames_bytes_read": ((_READ, _FRAMES),),
    "frames_bytes_written": ((_WRITTEN, _FRAMES),),
    "encodes": ((_counter("headrace_encodes_total", "Media computed by the encoder"), {}), (_MISSES, _FEATURES)),
    "features_reused": ((_HITS, _FEATURES),),
    "fallbacks": ((_FALLBACKS, _FEATURES),),
    "store_bytes": ((_WRITTEN, _FEATURES),),
    "items_carried": ((_HITS, _VECTORS),),
}
_STATUS = {"items_written": "written", "items_quarantined": "quarantined", "items_skipped": "skipped"}

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        *(STAGE_SECONDS, QUEUE_SECONDS, BUSY_SECONDS, WAITED_SECONDS, DEVICE_MEMORY, CPU_SECONDS, ACCELERATOR_SECONDS),
        *(BATCHES_PLANNED, BATCHES_DONE, ITEMS_IN, ITEMS, QUARANTINED),
        *(metric for exported in COUNTED.values() for metric, _ in exported),
    )
}


class RunMetrics:
    """The counters of a run: what this start of it adds to them, each receipt and each published window once."""

    def __init__(self, meter: Meter, num_items: int) -> None:
        self._meter = meter
        self._codes: set[str] = set()
        meter.record(ITEMS_IN, num_items)

    def add_receipt(self, receipt: Receipt, pass_name: str) -> None:
        """What a batch or, by its planning receipt, a window's plan came to."""
        if receipt.batch == -1:
            self._meter.record(BATCHES_PLANNED, receipt.counts["batches"], **{"pass": pass_name})
            for stage, seconds in receipt.seconds.items():
                self._meter.record(STAGE_SECONDS, seconds, stage=stage, modality="window")
        else:
            self._meter.record(BATCHES_DONE, 1, **{"pass": pass_name})
        for stage, seconds in receipt.seconds.items():
            self._meter.record(BUSY_SECONDS, seconds, stage=stage)
        for stage, seconds in receipt.cpu_seconds.items():
            self._meter.record(CPU_SECONDS, seconds, stage=stage)
        for stage, seconds in receipt.accelerator_seconds.items():
            self._meter.record(ACCELERATOR_SECONDS, seconds, stage=stage)
        for name, count in receipt.counts.items():
            for metric, labels in COUNTED.get(name, ()) if count else ():
                self._meter.record(metric, count, **labels)

    def add_published(self, counts: Mapping[str, int], quarantine: Mapping[str, int]) -> None:
        """The items of a window whose rows are published."""
        for name, status in _STATUS.items():
            if counts.get(name):
                self._meter.record(ITEMS, counts[name], status=status)
        for code, count in quarantine.items():
            self._meter.record(QUARANTINED, count, code=self._bounded(code))

    def _bounded(self, code: str) -> str:
        if code not in self._codes and len(self._codes) >= MAX_CODES:
            return OTHER_CODES
        self._codes.add(code)
        return code
