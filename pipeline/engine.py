"""The one module that builds Ray Data operators: resources, preflight, and the driver's receipt loop."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib
import logging
import math
import os
import pkgutil
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.config import RayOptions
from pipeline.errors import HeadraceError, UnschedulableError
from pipeline.planning.windows import Window
from pipeline.runs.receipts import receipt_from_json
from pipeline.schema import Receipt
from pipeline.stages.rows import receipts_apart
from pipeline.storage import Folder

# A block carries several batches, for each costs the driver 10-15 ms an operator (FACTS: 33 one-row blocks/s, 150
# eight-row blocks/s). Four keep a 64 MB-a-row block at 256 MB.
FRAME_BATCHES_PER_BLOCK = 4
# Prompts and texts weigh little, and between blocks an actor waits: four batches of a tiny model a block cost the
# generate pass 1.18 times a bare loop, eight 1.13. But what is one actor's no other shares: where batches take long, a
# block of eight has one actor work on while others have nothing left. So about a second's work, and at most eight.
_MOST_BATCHES_PER_BLOCK = 8
_BLOCK_SECONDS = 1.0
_FLOPS_PER_SECOND = {"cpu": 5e10, "cuda": 5e13}  # of one core, of one accelerator; the order of magnitude counts
# What a task makes goes into blocks of this size, or of one row: of Ray's own 128 MB a task would hold two rows more.
_BLOCK_BYTES = 32 * 2**20
# Windows of prompts or texts are planned in a quarter (prompts, the demo's tiny model) to a fortieth (texts, MiniLM) of
# the time that a CPU takes to compute them, by processes that load transformers first: with as many as there are CPUs,
# here two, actors had their models after 13 s instead of 9.
_ACTORS_PER_PLANNER = 4
# Ray gives a worker that has done one stage's task another stage's, but not one with an environment of its own: so a
# worker that decodes has not planned 4,096 items before (180 MB of its own, measured, against 240).
_BLOCKS_ENVIRONMENT = {"env_vars": {"HEADRACE_STAGE": "blocks"}}
# Beyond one a CPU, Ray ends workers that were idle for a second: those that plan and publish a window now and then,
# each of which then starts anew, with 1.5 to 2 CPU-seconds of imports. Of 3,000 small images on two CPUs it was four
# such, and 4.5 of 77 CPU-seconds.
_IDLE_WORKER_MS = 60_000
_MEMORY_KEYS = "ray.encode_workers, ray.generate_workers, ray.window_items or encode.max_batch_tokens"
_POLL_SECONDS = 1.0
Result = TypeVar("Result")
Stage = Callable[[pa.Table], Iterator[pa.Table]]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """What can be reserved, in Ray's units."""

    num_cpus: float
    num_gpus: float
    memory_bytes: float = math.inf
    largest_node_bytes: float = math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes that each worker of a pass declares: a task of `map_windows`, one of `map_blocks`, an actor. 0: none."""

    window_task: int = 0
    block_task: int = 0
    actor: int = 0


_UNDECLARED = Memory()


@dataclass(frozen=True, kw_only=True, slots=True)
class Workers:
    """Sizes of a pass: concurrent tasks, actors and what each reserves. `device` is what actors compute on.

    `tasks` (of `map_blocks`) and `planners` (tasks of `map_windows`): None leaves their number to Ray.
    `batches_per_block` is for `map_windows`. When a node is lost and actors have no room on the others, the pass waits
    `wait_seconds` for another node.
    """

    device: str
    actors: int
    actor_cpus: float
    actor_gpus: float
    tasks: int | None
    batches_per_block: int
    planners: int | None
    memory: Memory
    wait_seconds: float = math.inf

    def have_room(self, nodes: Sequence[Mapping[str, float]]) -> bool:
        """True when `nodes`, by what each has in all, have a place for each actor and leave room for a task."""
        cpus, memory_bytes = (sum(node.get(name, 0) for node in nodes) for name in ("CPU", "memory"))
        task_bytes = max(self.memory.window_task, self.memory.block_task)
        if cpus < self.actors * self.actor_cpus + 1 or memory_bytes < self.actors * self.memory.actor + task_bytes:
            return False
        reserved = {"CPU": self.actor_cpus, "GPU": self.actor_gpus, "memory": self.memory.actor}
        places = sum(
            min((node.get(name, 0) // amount for name, amount in reserved.items() if amount), default=self.actors)
            for node in nodes
        )
        return places >= self.actors


@contextlib.contextmanager
def ray_session(options: RayOptions) -> Iterator[float]:
    """Yields the seconds it took to have Ray. A Ray that was there before is used and left running."""
    if ray.is_initialized():
        yield 0.0
        return
    seconds = start_ray(options)
    try:
        yield seconds
    finally:
        ray.shutdown()


def start_ray(options: RayOptions) -> float:
    """Start or join Ray, unless this process has it already; returns the seconds that took."""
    if ray.is_initialized():
        return 0.0
    started = time.perf_counter()
    address = options.address or os.environ.get("RAY_ADDRESS")
    local: dict[str, Any] = {}
    if address is None:
        local = {
            "num_cpus": options.num_cpus or os.cpu_count(),
            "object_store_memory": options.object_store_bytes,
            "include_dashboard": False,
            "_metrics_export_port": options.metrics_port,
            "_system_config": {"idle_worker_killing_time_threshold_ms": _IDLE_WORKER_MS},
        }
    with _own_termination():
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING, **local)
    return time.perf_counter() - started


@contextlib.contextmanager
def _own_termination() -> Iterator[None]:
    """Keep the process's own handler of SIGTERM: `ray.init` puts one there that exits with 15 and cleans up nothing."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    if callable(handler) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def describe_cluster() -> Cluster:
    """The resources of the nodes that are alive."""
    total = ray.cluster_resources()  # type: ignore[no-untyped-call]
    nodes = _node_resources()
    return Cluster(
        num_cpus=total.get("CPU", 0.0),
        num_gpus=total.get("GPU", 0.0),
        memory_bytes=total.get("memory", math.inf),
        largest_node_bytes=max((node.get("memory", math.inf) for node in nodes), default=math.inf),
    )


def _node_resources() -> list[dict[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def alive_nodes() -> set[str]:
    """The ids of the nodes that are alive, as far as Ray knows: of a lost one it knows after some seconds."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]


def num_nodes() -> int:
    """Nodes that are alive."""
    return len(alive_nodes())


def accelerators() -> list[str]:
    """The kinds of accelerator in the cluster, as Ray names them."""
    prefix = "accelerator_type:"
    names = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix))


def batches_per_block(device: str, batch_flops: float) -> int:
    """Of prompts or texts, for batches that take about `batch_flops` floating point operations each."""
    batches = _BLOCK_SECONDS * _FLOPS_PER_SECOND[device] / max(1.0, batch_flops)
    return max(1, min(_MOST_BATCHES_PER_BLOCK, round(batches)))


def preflight(
    device: str,
    workers: int | None,
    options: RayOptions,
    *,
    decode_workers: int | None = None,
    batches: int | None = None,
    batch_flops: float | None = None,
    memory: Memory = _UNDECLARED,
) -> Workers:
    """Fit a pass to the cluster as `fit` does, waiting `options.wait_seconds` for nodes that it asks for and may come.

    Raises `UnschedulableError` for what can never fit: a plan that cannot be scheduled would hang without a word.
    """
    deadline = time.monotonic() + options.wait_seconds
    while True:
        try:
            fitted = fit(
                describe_cluster(),
                device,
                workers,
                decode_workers=decode_workers,
                batches=batches,
                batch_flops=batch_flops,
                memory=memory,
            )
            return dataclasses.replace(fitted, wait_seconds=options.wait_seconds)
        except UnschedulableError:
            if time.monotonic() >= deadline or not _can_scale():
                raise
            time.sleep(_POLL_SECONDS)


def fit(
    cluster: Cluster,
    device: str,
    workers: int | None,
    *,
    decode_workers: int | None = None,
    batches: int | None = None,
    batch_flops: float | None = None,
    memory: Memory = _UNDECLARED,
) -> Workers:
    """Sizes for a cluster. Tasks take one CPU each; so that they always find one, actors reserve CPUs only where
    half are left (FACTS: actors that leave less than one whole CPU make Ray Data hang in silence).

    Where `workers` says nothing there is an actor for each GPU or CPU, and no more than blocks: of `batches` at the
    least, of about `batch_flops` floating point operations each, None for batches of frames. Actors and the tasks
    before them then share the CPUs, so that whichever is slower has more of them.
    """
    if cluster.num_cpus < 1:
        raise UnschedulableError(
            f"the cluster has {cluster.num_cpus:g} CPUs, one whole CPU is needed; add a node or give nodes more CPUs"
        )
    on_gpu = device == "cuda" or (device == "auto" and cluster.num_gpus >= 1)
    if on_gpu and cluster.num_gpus < 1:
        raise UnschedulableError("device: cuda was asked for and no node has a GPU; set device: cpu or add a GPU node")
    if on_gpu and (workers or 0) > cluster.num_gpus:
        raise UnschedulableError(
            f"{workers} workers with one GPU each were asked for, the cluster has {cluster.num_gpus:g}; "
            "lower the number of workers or add GPU nodes"
        )
    wanted = int(cluster.num_gpus) if on_gpu else max(1, math.floor(cluster.num_cpus))
    device = "cuda" if on_gpu else "cpu"
    per_block = FRAME_BATCHES_PER_BLOCK if batch_flops is None else batches_per_block(device, batch_flops)
    if batches is not None:
        wanted = max(1, min(wanted, math.ceil(batches / per_block)))
    actors = _actors_in_memory(cluster, memory, workers or wanted, least=workers or 1)
    reserve = 1.0 if not on_gpu and cluster.num_cpus >= 4 and actors <= cluster.num_cpus / 2 else 0.0
    return Workers(
        device=device,
        actors=actors,
        actor_cpus=reserve,
        actor_gpus=1 if on_gpu else 0,
        tasks=decode_workers,
        batches_per_block=per_block,
        planners=None if on_gpu or batch_flops is None else math.ceil(actors / _ACTORS_PER_PLANNER),
        memory=memory,
    )


def _actors_in_memory(cluster: Cluster, memory: Memory, wanted: int, *, least: int) -> int:
    """How many of the wanted actors leave memory for a task: what is declared beyond what there is waits for ever.

    Raises `UnschedulableError` when they are fewer than `least`.
    """
    task = max(memory.window_task, memory.block_task)
    largest = max(task, memory.actor)
    if largest > cluster.largest_node_bytes:
        raise UnschedulableError(
            f"a worker needs {_megabytes(largest)} of memory, the largest node has "
            f"{_megabytes(cluster.largest_node_bytes)}; use nodes with more memory, or lower {_MEMORY_KEYS}"
        )
    actors = wanted
    while actors >= least and actors * memory.actor + task > cluster.memory_bytes:
        actors -= 1
    if actors < least:
        raise UnschedulableError(
            f"{least} workers of {_megabytes(memory.actor)} and a task of {_megabytes(task)} need "
            f"{_megabytes(least * memory.actor + task)} of memory, the cluster has {_megabytes(cluster.memory_bytes)}; "
            f"add memory, or lower {_MEMORY_KEYS}"
        )
    return actors


def _megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.0f} MB"


def _can_scale() -> bool:
    return os.environ.get("RAY_CLUSTER_AUTOSCALING", "0") == "1"


@contextlib.contextmanager
def quiet_ray_data() -> Iterator[None]:
    """Hold back Ray Data's own log lines, which would interleave with ours, while the block runs."""
    importlib.import_module("ray.data")  # now, for it sets the level when it is imported
    log = logging.getLogger("ray.data")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def windows_dataset(windows: Sequence[Window]) -> ray.data.Dataset:
    """One block a window, to run a pass over.

    What is set here is set for this dataset and those made of it; the program around a run keeps its own settings.
    Blocks may overtake one another, for order is restored by index.
    """
    dataset = ray.data.from_arrow([_window_row(window) for window in windows])
    dataset.context.enable_progress_bars = False
    dataset.context.execution_options.preserve_order = False
    dataset.context.target_max_block_size = _BLOCK_BYTES
    return dataset


def rows_dataset(windows: Sequence[Window], stage: Callable[[pa.Table], Iterator[pa.Table]]) -> ray.data.Dataset:
    """For callers: what `stage` says of finished windows, in their order; read when the dataset is."""
    dataset = ray.data.from_arrow([_window_row(window) for window in windows])
    dataset.context.execution_options.preserve_order = True
    return dataset.map_batches(stage, batch_size=None, batch_format="pyarrow")


def parts_dataset(folder: Folder) -> ray.data.Dataset:
    """For callers: the rows of a finished run's parts, in their order."""
    paths = [folder.locate(name) for name in folder.list(suffix=".parquet")]
    # Without partitioning: a folder above that is called day=1 would add a column.
    dataset = ray.data.read_parquet(paths, filesystem=folder.fs, partitioning=None)
    dataset.context.execution_options.preserve_order = True
    return dataset


def tables(dataset: ray.data.Dataset) -> Generator[pa.Table]:
    """A caller's dataset block by block, in order: started again, the same rows have the same places."""
    options = dataset.context.execution_options
    before = options.preserve_order
    options.preserve_order = True
    try:
        yield from dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0)
    finally:
        options.preserve_order = before


def _window_row(window: Window) -> pa.Table:
    return pa.table({"index": [window.index], "start": [window.start], "stop": [window.stop]})


def map_windows(
    dataset: ray.data.Dataset,
    stage: Stage,
    workers: Workers,
) -> ray.data.Dataset:
    """Plan each window in a task of its own, and cut what it plans into blocks of a few batches."""
    declared: dict[str, Any] = {"num_cpus": 1, "memory": workers.memory.window_task}
    planners = ray.data.TaskPoolStrategy(workers.planners)
    planned = dataset.map_batches(
        _settling(stage), batch_size=None, batch_format="pyarrow", compute=planners, **declared
    )
    blocks = planned.repartition(target_num_rows_per_block=workers.batches_per_block)
    repartition: Any = blocks._logical_plan.dag
    # Ray makes one task of the two only when both declare the same, and `repartition` takes no such arguments (2.60).
    # As a task of its own it would copy each window through the object store, and want a second CPU.
    repartition.ray_remote_args.update(declared)
    object.__setattr__(repartition, "compute", planners)
    return blocks


def map_blocks(dataset: ray.data.Dataset, stage: Stage, workers: Workers) -> ray.data.Dataset:
    """Run a stateless stage over blocks in tasks, which their environment keeps apart from planning and from actors."""
    return dataset.map_batches(
        _settling(stage),
        batch_size=None,
        batch_format="pyarrow",
        num_cpus=1,
        memory=workers.memory.block_task,
        compute=ray.data.TaskPoolStrategy(workers.tasks),
        runtime_env=_BLOCKS_ENVIRONMENT,
    )


def map_actors(dataset: ray.data.Dataset, stage: str, arguments: dict[str, Any], workers: Workers) -> ray.data.Dataset:
    """Run a stage that holds a model over blocks, in a fixed pool of actors.

    `stage` is "module:Class", imported by the actors alone: the driver does without torch and transformers, which take
    seconds to import and 700 MB (FACTS).
    """
    # Not at the top: it sets the level of Ray Data's log, which `quiet_ray_data` holds back.
    from pipeline.pool_watch import PoolWatch

    name = stage.rpartition(":")[2]
    mapped = dataset.map_batches(
        type(name, (_ImportedStage,), {}),  # a class of its own gives the operator its name
        fn_constructor_kwargs={"stage": stage, **arguments, "device": workers.device},
        batch_size=None,
        batch_format="pyarrow",
        num_cpus=workers.actor_cpus,
        num_gpus=workers.actor_gpus or None,
        memory=workers.memory.actor,
        compute=ray.data.ActorPoolStrategy(size=workers.actors),
    )
    has_room = functools.partial(_have_room, workers, alive_nodes())
    watch: Any = functools.partial(PoolWatch, has_room, workers.wait_seconds)
    mapped.context.custom_execution_callback_classes.append(watch)
    return mapped


def _have_room(workers: Workers, nodes: set[str]) -> bool:
    return nodes <= alive_nodes() or workers.have_room(_node_resources())


class _SettlingStage:
    """Runs a stage; behind its first block in a process, garbage is no longer looked for in what it has imported."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def __call__(self, blocks: pa.Table) -> Iterator[pa.Table]:
        yield from self._stage(blocks)
        _settle(type(self).__name__)


def _settling(stage: Stage) -> _SettlingStage:
    name = getattr(stage, "__name__", type(stage).__name__)  # a function's, or a class's
    settling: type[_SettlingStage] = type(name, (_SettlingStage,), {})  # it names the operator
    return settling(stage)


@functools.cache
def _settle(stage: str) -> None:
    """Once for each stage of a process. Of tiny images, a fifth of the processor time of all stages went into
    collections that went through a million objects of libraries, each time."""
    gc.collect()
    gc.freeze()


class _ImportedStage:
    """Loads the stage in the background, and waits for it with the first batch: blocks of receipts need no model."""

    def __init__(self, stage: str, **arguments: Any) -> None:
        def load() -> Any:
            loaded = pkgutil.resolve_name(stage)(**arguments)
            _settle(stage)
            return loaded

        self._loaded = ThreadPoolExecutor(1, thread_name_prefix="load").submit(load)

    def __call__(self, blocks: pa.Table) -> Iterator[pa.Table]:
        receipts, batches = receipts_apart(blocks)
        yield receipts
        if batches.num_rows:
            yield from self._loaded.result()(batches)


def receipts(dataset: ray.data.Dataset) -> Iterator[Receipt]:
    """Run the pass and yield its receipts as they come. headrace's own errors come out as they were raised.

    Where a node is lost and Ray gives up, they end before all are there: what is missing is another pass's.
    """
    from pipeline.pool_watch import NoRoomError

    nodes = alive_nodes()
    try:
        with _own_errors():
            batch: Any
            for batch in dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
                for text in batch["receipt"].to_pylist():
                    yield receipt_from_json(text)
    except Exception as error:
        lost = nodes - alive_nodes()
        if not (lost and isinstance(error, (ray.exceptions.RayError, NoRoomError))):
            raise
        _log.warning("the pass ended early, for %d of its %d nodes were lost: %s", len(lost), len(nodes), error)


def end_actors() -> None:
    """Have the actors of finished passes end soon: Ray ends them when their handles are collected, which took up to
    28 s by itself."""
    gc.collect()


class Background:
    """Small tasks beside a pass (publishing windows), at most `limit` at a time, collected as they end."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: deque[tuple[Any, tuple[Any, ...]]] = deque()
        self._pending: list[Any] = []

    def submit(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Run `function(*arguments)` in a task of the cluster."""
        self._waiting.append((ray.remote(num_cpus=0)(function), arguments))
        self._start()

    def _start(self) -> None:
        while self._waiting and len(self._pending) < self._limit:
            function, arguments = self._waiting.popleft()
            self._pending.append(function.remote(*arguments))

    def ended(self, *, wait: bool = False) -> Iterator[Any]:
        """Results of those that have ended; of all of them with `wait`. Raises what a task raised."""
        while self._pending:
            done, self._pending = ray.wait(self._pending, num_returns=1, timeout=None if wait else 0)
            if not done:
                return
            self._start()
            with _own_errors():
                yield ray.get(done[0])


def run_task(function: str, *arguments: Any, num_gpus: float = 0) -> Any:
    """Run one function, "module:name", in a worker that ends with it, and wait for it.

    Ray would give the worker to other tasks, with all that the function imported.
    """
    with _own_errors():
        return ray.get(ray.remote(num_cpus=1, num_gpus=num_gpus, max_calls=1)(_call).remote(function, *arguments))


def run_tasks(
    function: Callable[..., Result], arguments: Iterable[tuple[Any, ...]], *, memory_bytes: int
) -> list[Result]:
    """Run a function on each tuple of arguments, as many at a time as there are CPUs and as much memory as each
    declares; the results in their order."""
    remote = ray.remote(num_cpus=1, memory=memory_bytes)(function)
    with _own_errors():
        return ray.get([remote.remote(*each) for each in arguments])


def _call(function: str, *arguments: Any) -> Any:
    return pkgutil.resolve_name(function)(*arguments)


def transfer_rate(num_bytes: int) -> float:
    """Bytes a second from a task that makes them to another that copies them out of the object store.

    Measured with nothing else on the cluster, the best of three, without what two tasks take that hand over nothing;
    where there are several nodes, the tasks are apart.
    """
    apart = ray.remote(num_cpus=1, scheduling_strategy="SPREAD")
    make, take = apart(_made), apart(_copied)

    def seconds(size: int) -> float:
        started = time.perf_counter()
        ray.get(take.remote(make.remote(size)))
        return time.perf_counter() - started

    seconds(1)  # starts their processes
    return num_bytes / max(1e-9, min(seconds(num_bytes) for _ in range(3)) - min(seconds(1) for _ in range(3)))


def _made(num_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.zeros(num_bytes, np.uint8)


def _copied(frames: np.ndarray[Any, np.dtype[np.uint8]]) -> int:
    return len(frames.copy())


def run_on_every_node(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run a function once on every node that is alive, for what concerns a node's own disk; a node that is lost
    meanwhile has no result."""
    remote = ray.remote(num_cpus=0)(function)
    asked = {
        node: remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(*arguments)
        for node in sorted(alive_nodes())
    }
    results = []
    for node, result in asked.items():
        try:
            with _own_errors():
                results.append(ray.get(result))
        except ray.exceptions.RayError:
            if node in alive_nodes():
                raise
    return results


@contextlib.contextmanager
def _own_errors() -> Iterator[None]:
    """Raise headrace's errors as themselves: Ray wraps what a task raised."""
    try:
        yield
    except ray.exceptions.RayError as error:
        own = _own_cause(error)
        if own is None:
            raise
        raise own from error


def _own_cause(error: BaseException | None) -> HeadraceError | None:
    while error is not None:
        if isinstance(error, HeadraceError):
            # The class Ray makes of it is both a RayTaskError and the error; the plain one is what callers compare.
            return getattr(error, "cause", None) or error
        cause = getattr(error, "cause", None)
        if isinstance(cause, HeadraceError):
            return cause
        error = error.__cause__
    return None
