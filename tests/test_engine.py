"""How a pass is sized for a cluster. The bars are arithmetic; no Ray is started."""

from __future__ import annotations

import pytest

from pipeline.engine import Cluster, Memory, Workers, batches_per_block, fit
from pipeline.errors import UnschedulableError


def sizes(workers: Workers) -> tuple[str, int, float, float]:
    """(device, actors, CPUs an actor, GPUs an actor)."""
    return workers.device, workers.actors, workers.actor_cpus, workers.actor_gpus


@pytest.mark.parametrize(
    ("num_cpus", "actors"),
    [(1, 1), (1.5, 1), (2, 2), (3, 3), (4, 4), (16, 16)],
)
def test_without_gpus_one_actor_for_every_cpu(num_cpus: float, actors: int) -> None:
    assert sizes(fit(Cluster(num_cpus=num_cpus, num_gpus=0), "auto", None)) == ("cpu", actors, 0, 0)


@pytest.mark.parametrize(
    ("batches", "flops", "actors"),
    [(None, None, 16), (64, None, 16), (9, None, 3), (0, None, 1), (9, 1e13, 9), (9, 1e9, 2), (200, 1e9, 16)],
)
def test_no_more_actors_than_blocks(batches: int | None, flops: float | None, actors: int) -> None:
    cluster = Cluster(num_cpus=16, num_gpus=0)
    fitted = fit(cluster, "cpu", None, batches=batches, batch_flops=flops)
    assert sizes(fitted) == ("cpu", actors, float(actors <= 8), 0)
    assert fit(cluster, "cpu", 5, batches=batches, batch_flops=flops).actors == 5  # as asked
    assert fit(Cluster(num_cpus=16, num_gpus=4), "auto", None, batches=batches).actors <= 4


@pytest.mark.parametrize(
    ("device", "flops", "batches"),
    [("cpu", 1e9, 8), ("cpu", 1.7e10, 3), ("cpu", 5e10, 1), ("cpu", 1e13, 1), ("cuda", 1e12, 8), ("cuda", 2.5e13, 2)],
)
def test_a_block_is_about_a_second_of_work(device: str, flops: float, batches: int) -> None:
    assert batches_per_block(device, flops) == batches
    assert fit(Cluster(num_cpus=2, num_gpus=1), device, None, batch_flops=flops).batches_per_block == batches


@pytest.mark.parametrize("num_cpus", [1, 2, 4, 16, 64])
@pytest.mark.parametrize("num_gpus", [1, 8])
def test_with_gpus_one_actor_on_each(num_cpus: int, num_gpus: int) -> None:
    cluster = Cluster(num_cpus=num_cpus, num_gpus=num_gpus)
    assert sizes(fit(cluster, "auto", None)) == ("cuda", num_gpus, 0, 1)
    assert sizes(fit(cluster, "cuda", 1)) == ("cuda", 1, 0, 1)
    assert fit(cluster, "cpu", None).device == "cpu"


@pytest.mark.parametrize(
    ("num_cpus", "workers", "actor_cpus"),
    [(1, 1, 0), (2, 1, 0), (4, 1, 1), (4, 4, 0), (16, 8, 1), (16, 9, 0), (64, 4, 1), (64, 200, 0)],
)
def test_actors_reserve_cpus_only_where_half_are_left_over(num_cpus: int, workers: int, actor_cpus: float) -> None:
    assert sizes(fit(Cluster(num_cpus=num_cpus, num_gpus=0), "cpu", workers)) == ("cpu", workers, actor_cpus, 0)


@pytest.mark.parametrize("num_cpus", [1, 2, 3, 4, 6, 8, 16, 64, 256])
@pytest.mark.parametrize(
    ("num_gpus", "workers"), [(0, None), (0, 1), (0, 4), (0, 64), (1, None), (1, 1), (8, None), (8, 4)]
)
def test_tasks_always_find_a_whole_cpu(num_cpus: int, num_gpus: int, workers: int | None) -> None:
    fitted = fit(Cluster(num_cpus=num_cpus, num_gpus=num_gpus), "auto", workers)
    assert num_cpus - fitted.actors * fitted.actor_cpus >= 1
    assert fitted.actors * fitted.actor_gpus <= num_gpus


@pytest.mark.parametrize("decode_workers", [None, 3])
def test_decode_tasks_are_as_many_as_asked(decode_workers: int | None) -> None:
    cluster = Cluster(num_cpus=16, num_gpus=0)
    assert fit(cluster, "cpu", None, decode_workers=decode_workers).tasks == decode_workers


@pytest.mark.parametrize(
    ("num_cpus", "num_gpus", "device", "workers", "said"),
    [
        (0.5, 0, "auto", None, r"0\.5 CPUs, one whole CPU is needed; add a node"),
        (0, 8, "auto", None, r"0 CPUs, one whole CPU is needed"),
        (4, 0, "cuda", None, r"no node has a GPU; set device: cpu or add a GPU node"),
        (4, 0.5, "cuda", 1, r"no node has a GPU"),
        (64, 8, "auto", 9, r"9 workers with one GPU each.*the cluster has 8; lower the number"),
        (64, 1, "cuda", 2, r"2 workers with one GPU each.*the cluster has 1; lower the number"),
    ],
)
def test_what_can_never_fit_is_refused(
    num_cpus: float, num_gpus: float, device: str, workers: int | None, said: str
) -> None:
    with pytest.raises(UnschedulableError, match=said):
        fit(Cluster(num_cpus=num_cpus, num_gpus=num_gpus), device, workers)


MB = 2**20
NEEDS = Memory(window_task=700 * MB, block_task=500 * MB, actor=1_000 * MB)


def with_memory(total_mb: float, largest_mb: float | None = None, num_cpus: int = 4, num_gpus: int = 0) -> Cluster:
    """A cluster whose memory is of one node, unless its largest is named."""
    largest = total_mb if largest_mb is None else largest_mb
    return Cluster(num_cpus=num_cpus, num_gpus=num_gpus, memory_bytes=total_mb * MB, largest_node_bytes=largest * MB)


@pytest.mark.parametrize(
    ("total_mb", "actors"), [(1_700, 1), (2_699, 1), (2_700, 2), (3_800, 3), (4_700, 4), (60_000, 4)]
)
@pytest.mark.parametrize("num_gpus", [0, 4])
def test_actors_are_as_many_as_leave_memory_for_a_task(total_mb: float, actors: int, num_gpus: int) -> None:
    fitted = fit(with_memory(total_mb, num_gpus=num_gpus), "auto", None, memory=NEEDS)
    assert (fitted.actors, fitted.memory) == (actors, NEEDS)


@pytest.mark.parametrize(
    ("cluster", "workers", "said"),
    [
        (with_memory(1_699), None, r"1 workers of 1,049 MB and a task of 734 MB need 1,783 MB .* has 1,782 MB; add"),
        (with_memory(4_699), 4, r"4 workers .*; add memory, or lower ray.encode_workers, .*encode.max_batch_tokens"),
        (with_memory(90_000, largest_mb=999), None, r"a worker needs 1,049 MB .*, the largest node has 1,048 MB"),
    ],
)
def test_what_never_has_memory_is_refused(cluster: Cluster, workers: int | None, said: str) -> None:
    with pytest.raises(UnschedulableError, match=said):
        fit(cluster, "cpu", workers, memory=NEEDS)


def test_workers_asked_for_are_not_fewer() -> None:
    assert fit(with_memory(4_700), "cpu", 4, memory=NEEDS).actors == 4


@pytest.mark.parametrize(
    ("actor", "nodes", "expected"),
    [
        ({"actor_gpus": 1}, [{"CPU": 4, "GPU": 2, "memory": 64e9}], True),
        ({"actor_gpus": 1}, [{"CPU": 4, "GPU": 1, "memory": 64e9}], False),
        ({"actor_gpus": 1}, [{"CPU": 4, "memory": 64e9}, {"CPU": 4, "GPU": 2, "memory": 64e9}], True),
        ({"actor_cpus": 1}, [{"CPU": 3, "memory": 64e9}], True),
        ({"actor_cpus": 1}, [{"CPU": 2, "memory": 64e9}], False),  # a task would wait for ever
        ({}, [{"CPU": 1, "memory": 2.5e9}], True),
        ({}, [{"CPU": 1, "memory": 2.4e9}], False),  # as there
        ({}, [{"CPU": 1, "memory": 1.9e9}, {"CPU": 1, "memory": 0.9e9}], False),  # one here, and none there
    ],
)
def test_actors_have_room_on_the_nodes_that_are_left(
    actor: dict[str, int], nodes: list[dict[str, float]], expected: bool
) -> None:
    sizes = {"actors": 2, "actor_cpus": 0, "actor_gpus": 0, **actor}
    memory = Memory(window_task=int(0.5e9), actor=int(1e9))
    workers = Workers(device="cpu", tasks=None, planners=None, batches_per_block=1, memory=memory, **sizes)  # type: ignore[arg-type]
    assert workers.have_room(nodes) is expected
