"""Runs on machines that have nothing, over a remote store: each has a disk of its own, `store.local_path`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline import flow
from pipeline.config import Config
from pipeline.storage import Folder
from tests.disk_use import Watch
from tests.slow_files import register_slow_files
from tests.without_ray import run_without_ray

NUMBERS = itertools.count()
SHARD_BYTES = 30_000

register_slow_files()


@pytest.fixture(params=["memory"])
def remote(request: pytest.FixtureRequest) -> Iterator[str]:
    url = f"{request.param}://machines-{next(NUMBERS)}"
    yield url
    Folder(url).remove("")


@pytest.fixture
def on_machine(
    remote: str, demo_media: Path, make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., dict[str, Any]]:
    """Runs the same questions there, windows of five items; returns the summary."""
    run_without_ray(monkeypatch)

    def run(name: str, **store: Any) -> dict[str, Any]:
        section = {"path": remote, "local_path": str(tmp_path / name), "shard_bytes": SHARD_BYTES, **store}
        config = make_config(
            demo_media / "manifest.jsonl",
            run_id=name,
            store=section,
            encode={"max_batch_items": 2},
            ray={"first_window_items": 5, "window_items": 5},
        )
        summary = flow.run(config.model_copy(update={"generate": config.generate.model_copy(update={"seed": 1})}))
        summary["parts"] = [p.read_bytes() for p in sorted((tmp_path / "output" / name).glob("part-*.parquet"))]
        return summary

    return run


def test_another_machine_reads_all_of_a_store_through_a_small_cache(
    on_machine: Callable[..., dict[str, Any]], remote: str, tmp_path: Path
) -> None:
    first = on_machine("a")
    shards = Folder(remote).list("shards", suffix=".lmdb")
    sizes = [Folder(remote).num_bytes(f"shards/{name}") for name in shards]
    bound = max(2 * SHARD_BYTES, max(sizes) + 1)
    with Watch(tmp_path / "b", every_seconds=0.002) as watch:
        second = on_machine("b", cache_bytes=bound)
    print(f"{len(shards)} shards, {sum(sizes)} bytes, in a cache of {bound}: peak {watch.peak} in {watch.looks} looks")
    assert sum(sizes) > 3 * bound
    assert (second["encodes"], second["fallbacks"], second["fallback_shards"]) == (0, 0, {})
    assert second["features_reused"] == first["encodes"] > 0
    assert second["parts"] == first["parts"]
    assert 0 < watch.peak <= bound + 8192  # files take whole blocks


@pytest.mark.parametrize("remote", ["slow"], indirect=True)
def test_shards_that_are_late_are_encoded_again_and_named(on_machine: Callable[..., dict[str, Any]]) -> None:
    first = on_machine("a")
    second = on_machine("b", fetch_seconds=0.005)
    assert second["encodes"] == second["fallbacks"] == first["encodes"]
    assert sum(second["fallback_shards"].values()) == second["fallbacks"]
    assert all(name.endswith(" (later than 0.005 s)") for name in second["fallback_shards"])
    assert second["parts"] == first["parts"]
