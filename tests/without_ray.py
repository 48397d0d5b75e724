"""The engine's operators as plain iterators in this process: whole runs without Ray, for what does not depend on it."""

from __future__ import annotations

import contextlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from pipeline import engine
from pipeline.planning.windows import Window
from pipeline.runs.receipts import receipt_from_json
from pipeline.schema import Receipt
from pipeline.stages.encode import EncodeBatches
from pipeline.stages.rows import receipts_apart

Tables = Iterable[pa.Table]
Stage = Callable[[pa.Table], Iterator[pa.Table]]


def run_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends, `flow.run` does everything in this process, one block after another, on two CPUs."""
    for replaced in (
        *(windows_dataset, map_windows, map_blocks, receipts, run_task, run_tasks, run_on_every_node),
        *(ray_session, describe_cluster, alive_nodes, num_nodes, accelerators, end_actors, Background),
    ):
        monkeypatch.setattr(engine, replaced.__name__, replaced)
    monkeypatch.setattr(engine, "map_actors", Actors().map)


def windows_dataset(windows: Iterable[Window]) -> Tables:
    return [pa.table({"index": [w.index], "start": [w.start], "stop": [w.stop]}) for w in windows]


def map_windows(dataset: Tables, stage: Stage, workers: engine.Workers) -> Tables:
    for planned in map_blocks(dataset, stage):
        for start in range(0, planned.num_rows, workers.batches_per_block):
            yield planned.slice(start, workers.batches_per_block)


def map_blocks(dataset: Tables, stage: Stage, workers: object = None) -> Tables:
    for block in dataset:
        yield from stage(block)


class Actors:
    """One of each kind, which lets go of the store at the end of each pass as the end of its process would."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def map(self, dataset: Tables, stage: str, arguments: dict[str, Any], workers: engine.Workers) -> Tables:
        actor = self._made.get(stage)
        if actor is None or actor.context != arguments["context"]:
            actor = self._made[stage] = pkgutil.resolve_name(stage)(**arguments, device=workers.device)
        try:
            for block in dataset:
                known, batches = receipts_apart(block)
                yield known
                if batches.num_rows:
                    yield from actor(batches)
        finally:
            if isinstance(actor, EncodeBatches):
                actor.writer.close()
                if actor.keeper is not None:
                    actor.keeper.writer.close()
            actor.context.store.close()


def receipts(dataset: Tables) -> Iterator[Receipt]:
    for block in dataset:
        for text in block["receipt"].to_pylist():
            yield receipt_from_json(text)


def run_task(function: str, *arguments: Any, num_gpus: float = 0) -> Any:
    return pkgutil.resolve_name(function)(*arguments)


def run_tasks(function: Callable[..., Any], arguments: Iterable[tuple[Any, ...]], *, memory_bytes: int) -> list[Any]:
    return [function(*each) for each in arguments]


def run_on_every_node(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    return [function(*arguments)]


def describe_cluster() -> engine.Cluster:
    return engine.Cluster(num_cpus=2, num_gpus=0)


def alive_nodes() -> set[str]:
    return {"this"}


def num_nodes() -> int:
    return 1


def accelerators() -> list[str]:
    return []


def end_actors() -> None:
    pass


@contextlib.contextmanager
def ray_session(options: object) -> Iterator[float]:
    yield 0.0


class Background:
    """Does everything at once."""

    def __init__(self, limit: int) -> None:
        self._results: list[Any] = []

    def submit(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._results.append(function(*arguments))

    def ended(self, *, wait: bool = False) -> Iterator[Any]:
        results, self._results = self._results, []
        yield from results
