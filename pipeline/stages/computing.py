"""How stages with a model compute: on one thread of a CPU, and a batch in halves where a device has no room for it."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import pyarrow as pa
import torch

from pipeline.language.batching import RUN_TOKENS, length_runs
from pipeline.runs.metrics import DEVICE_MEMORY, QUEUE_SECONDS, STAGE_SECONDS, WAITED_SECONDS
from pipeline.schema import Receipt
from pipeline.stages.context import StageContext
from pipeline.stages.outcomes import write_outcome
from pipeline.stages.rows import receipt_table
from pipeline.stages.spending import CpuClock, batch_spent, on_accelerator

Item = TypeVar("Item")
Result = TypeVar("Result")


def compute_alone(device: str) -> None:
    """One thread a CPU worker: workers are sized to the cores, and bits must not move with their number."""
    if device == "cpu":
        torch.set_num_threads(1)


def tell_stages(context: StageContext, seconds: Mapping[str, float], modality: str) -> None:
    """How long a batch took in each stage."""
    for stage, each in seconds.items():
        context.meter.record(STAGE_SECONDS, each, stage=stage, modality=modality)


def tell_taken(context: StageContext, queue: str, ready_at: float) -> None:
    """A worker has taken a batch, which was ready at `ready_at` (seconds since the epoch)."""
    waited = max(0.0, time.time() - ready_at)  # clocks of nodes differ by milliseconds
    context.meter.record(QUEUE_SECONDS, waited, queue=queue)
    context.meter.record(WAITED_SECONDS, waited, queue=queue)


def tell_memory(context: StageContext, stage: str) -> None:
    """What PyTorch has of this worker's GPU, where it has one, and the most that it had since the last time."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    kinds = {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "peak": torch.cuda.max_memory_allocated(),
    }
    torch.cuda.reset_peak_memory_stats()
    for kind, num_bytes in kinds.items():
        context.meter.record(DEVICE_MEMORY, num_bytes, stage=stage, kind=kind)


def accelerator_names() -> list[str]:
    """Of this machine's GPUs."""
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def in_halves(
    work: Callable[[Sequence[Item]], Sequence[Result]], items: Sequence[Item], splits: dict[str, int] | None = None
) -> list[Result]:
    """`work` of all items, or of their halves when the device has no room for them together; counts `oom_splits`.

    Raises `torch.OutOfMemoryError` when there is no room for one.
    """
    try:
        return list(work(items))
    except torch.OutOfMemoryError:
        if len(items) == 1:
            raise
        if splits is not None:
            splits["oom_splits"] += 1
    torch.cuda.empty_cache()
    half = len(items) // 2
    return in_halves(work, items[:half], splits) + in_halves(work, items[half:], splits)


class Room:
    """How large a batch fits on the device, learnt from those that did not; sizes are in whatever unit the caller has.

    A batch not smaller than one that had no room is cut beforehand, into runs no larger than the largest that had. One
    between the two is tried.
    """

    def __init__(self) -> None:
        self._fitted = 0
        self._too_large = math.inf

    def runs(self, sizes: Sequence[int]) -> list[slice]:
        """Neighbours to be worked on together."""
        if sum(sizes) < self._too_large:
            return [slice(0, len(sizes))]
        runs: list[slice] = []
        start, held = 0, 0
        for index, size in enumerate(sizes):
            if index > start and held + size > self._fitted:
                runs.append(slice(start, index))
                start, held = index, 0
            held += size
        return [*runs, slice(start, len(sizes))]

    @contextmanager
    def trying(self, size: int) -> Iterator[None]:
        """Around the work on a batch of that size: remembers whether there was room for it."""
        try:
            yield
        except torch.OutOfMemoryError:
            self._too_large = min(self._too_large, size)
            if self._fitted >= size:
                self._fitted = size // 2
            raise
        if size < self._too_large:
            self._fitted = max(self._fitted, size)


def one_ahead(work: Callable[[Item], Result], inputs: Iterable[Item], executor: Executor | None) -> Iterator[Result]:
    """`work` of each input, in order; with an executor that of the next is done while the caller uses the last."""
    if executor is None:
        yield from map(work, inputs)
        return
    waiting: Future[Result] | None = None
    for each in inputs:
        following = executor.submit(work, each)
        if waiting is not None:
            yield waiting.result()
        waiting = following
    if waiting is not None:
        yield waiting.result()


class TextBatches(ABC):
    """What stages have in common that take batches of token ids: each worked on, put away, and receipted, in order."""

    counted: ClassVar[str]
    timed: ClassVar[str]
    outcome: ClassVar[pa.Schema]

    def __init__(self, context: StageContext, device: str) -> None:
        compute_alone(device)
        self.context = context
        self.device = device
        self.clock = CpuClock()
        self._least_tokens = RUN_TOKENS[device]

    def __call__(self, batches: pa.Table) -> Iterator[pa.Table]:
        """One table of one receipt for each row, in order."""
        for batch in batches.to_pylist():
            with self.context.logging(window=batch["window"], batch=batch["batch"]):
                receipt = self._done(batch)
            yield receipt_table(receipt)

    @abstractmethod
    def _work(self, items: Sequence[dict[str, Any]]) -> Sequence[Any]:
        """A result an item, in order."""

    @abstractmethod
    def _row(self, item: dict[str, Any], result: Any, share_ms: float) -> dict[str, Any]:
        """An item's row of the outcome; `share_ms` is its share of the batch's time."""

    def _done(self, batch: dict[str, Any]) -> Receipt:
        started_at, started = time.time(), time.perf_counter()
        self.clock.take()
        items = batch["items"]
        lengths = [len(item["input_ids"]) for item in items]
        splits = {"oom_splits": 0}
        results: list[Any] = []
        padded = 0
        for run in length_runs(lengths, least_tokens=self._least_tokens):
            results += in_halves(self._work, items[run], splits)
            padded += sum(max(lengths[run]) - length for length in lengths[run])
        seconds = time.perf_counter() - started
        cpu, used = self.clock.take(), on_accelerator(self.device, seconds)
        receipt = Receipt(
            stage="pool",
            window=batch["window"],
            batch=batch["batch"],
            digest=batch["digest"],
            counts={
                self.counted: len(items),
                "text_tokens": sum(lengths),
                "text_padded_tokens": padded,
                **splits,
            },
            seconds={self.timed: seconds},
            cpu_seconds={"pool": cpu},
            accelerator_seconds={"pool": used} if used else {},
        )
        tell_stages(self.context, receipt.seconds, "text")
        tell_memory(self.context, "pool")
        share_ms = 1e3 * seconds / len(items)
        spent = batch_spent(started_at, cpu, used, lengths)
        rows = [
            {**self._row(item, result, share_ms), **own}
            for item, result, own in zip(items, results, spent, strict=True)
        ]
        write_outcome(self.context.folder, receipt, rows, self.outcome)
        return receipt
