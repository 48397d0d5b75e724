"""Runs on machines that have nothing, over a remote store: each has a disk of its own, `store.local_path`."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline import engine, flow
from pipeline.config import Config
from pipeline.schema import Receipt
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


def test_a_disk_that_is_lost_under_a_run_costs_what_was_not_sealed(
    on_machine: Callable[..., dict[str, Any]],
    remote: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    undisturbed = on_machine("alone", path=f"{remote}-alone")
    nodes, passes = {"first", "second"}, list[list[tuple[int, int, tuple[str, ...]]]]()
    done = engine.receipts

    def lost_at_its_end(dataset: Any) -> Iterator[Receipt]:
        """The first pass is done as far as its receipts go; then the disk with the shard that was open is lost."""
        passes.append([])
        for receipt in done(dataset):
            passes[-1].append((receipt.window, receipt.batch, receipt.shards))
            yield receipt
        if len(passes) == 1:
            nodes.remove("second")
            for path in (tmp_path / "lost").glob("*/open/[!.]*"):
                shutil.rmtree(path)

    monkeypatch.setattr(engine, "receipts", lost_at_its_end)
    monkeypatch.setattr(engine, "alive_nodes", lambda: set(nodes))
    monkeypatch.setattr(engine, "num_nodes", lambda: len(nodes))
    summary = on_machine("lost", shard_windows=2, shard_bytes=2**30)
    first, second, _answering = passes
    shards = {shard for *_, written in first for shard in written}
    [open_shard] = shards - {shard.removesuffix(".lmdb") for shard in Folder(remote).list("shards", suffix=".lmdb")}
    lost = [(window, batch) for window, batch, written in first if open_shard in written]
    again = [(window, batch) for window, batch, written in second if written and not shards.intersection(written)]
    print(f"{len(again)} of {sum(batch >= 0 for _, batch, _ in first)} batches done again")
    assert len({window for window, _ in lost}) in (1, 2) and len(shards) >= 2
    assert sorted(again) == sorted(lost)
    windows = len({window for window, _ in lost})
    said = f"lost with a node: {len(lost)} batches of {windows} windows, which are done again"
    assert said in [record.message for record in caplog.records]
    assert {window for window, *_ in second} == {window for window, _ in lost}
    assert summary["parts"] == undisturbed["parts"]
    counted = ("encodes", "items_written", "images_decoded", "frames_decoded", "computed_tokens", "answers")
    assert [summary.get(name) for name in counted] == [undisturbed.get(name) for name in counted]


def test_a_pass_that_ends_early_without_a_lost_node_is_an_error(
    on_machine: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = engine.receipts
    monkeypatch.setattr(engine, "receipts", lambda dataset: itertools.islice(done(dataset), 3))
    with pytest.raises(RuntimeError, match="the encode pass ended without finishing windows"):
        on_machine("early")
