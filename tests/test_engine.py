"""How a pass is sized for a cluster. The bars are arithmetic; no Ray is started."""

from __future__ import annotations

import pytest

from pipeline.engine import Cluster, Workers, fit
from pipeline.errors import UnschedulableError


def sizes(workers: Workers) -> tuple[str, int, float, float]:
    """(device, actors, CPUs an actor, GPUs an actor)."""
    return workers.device, workers.actors, workers.actor_cpus, workers.actor_gpus


@pytest.mark.parametrize(
    ("num_cpus", "actors"),
    [(1, 1), (2, 1), (3, 1), (4, 2), (16, 8), (64, 32)],
)
def test_without_gpus_one_actor_for_every_two_cpus(num_cpus: int, actors: int) -> None:
    reserved = 1 if num_cpus >= 4 else 0
    assert sizes(fit(Cluster(num_cpus=num_cpus, num_gpus=0), "auto", None)) == ("cpu", actors, reserved, 0)


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


@pytest.mark.parametrize(("memory_gb", "declared_mb"), [(0.5, 128), (2, 512), (64, 650)])
def test_tasks_declare_no_more_memory_than_a_quarter_of_the_cluster_s(memory_gb: float, declared_mb: int) -> None:
    fitted = fit(Cluster(num_cpus=2, num_gpus=0, memory_bytes=memory_gb * 2**30), "auto", None)
    assert fitted.task_memory_bytes == declared_mb * 2**20
