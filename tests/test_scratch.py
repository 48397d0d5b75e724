"""A store that is scratch: its disk stays within its bound, and nothing of a run is left in it.

Whole runs in this process; `tests/ray/test_scratch.py` does the same on Ray, with processes that are killed.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from pipeline import flow, scratch
from pipeline.config import Config, parse_config
from pipeline.demo.media import make_demo_media
from pipeline.errors import ConfigError
from pipeline.features.shard import ShardReader
from pipeline.features.store import FeatureStore
from pipeline.stages import encode
from tests.disk_use import Watch, disk_use
from tests.without_ray import run_without_ray

NUM_ITEMS = 120
MAX_BYTES = 440_000
TOKEN_BYTES = 1024  # of the demo model: 128 float32 after the projector, and one deep-stack level of as many
PATCHES_A_TOKEN = 4
NOTE_BYTES = 8192  # what the store remembers of the model


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixteen drawn files over and over, each time of other bytes: none answers for another, and each is stored."""
    return write_corpus(tmp_path_factory.mktemp("corpus"), NUM_ITEMS)


def write_corpus(folder: Path, num_items: int) -> Path:
    """The manifest of so many items. Files that show the same differ at their ends, which decoders pass over."""
    make_demo_media(str(folder / "drawn.jsonl"), images=3, videos=13, seed=23)
    drawn = [json.loads(line) for line in (folder / "drawn.jsonl").read_text().splitlines()]
    rows = []
    for number in range(num_items):
        again, which = divmod(number, len(drawn))
        [media] = drawn[which]["media"]
        file = folder / media["uri"]
        copy = file.with_stem(f"{file.stem}-{again}")
        copy.write_bytes(file.read_bytes() + bytes(again))
        rows.append({**drawn[which], "id": f"item-{number}", "media": [{**media, "uri": str(copy)}]})
    path = folder / "manifest.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def configured(corpus: Path, folder: Path, **store: Any) -> Config:
    """Windows of two items; answers of a few tokens, of which each hangs on features and seed."""
    return parse_config(
        {
            "job": "caption_videos",
            "input": str(corpus),
            "output": str(folder / "output"),
            "model": "demo:captioner",
            "sampling": {"fps": 4},
            "encode": {"device": "cpu", "max_batch_items": 1, "dtype": "float32"},
            "generate": {"device": "cpu", "max_new_tokens": 6, "temperature": 3.0, "seed": 3},
            "store": {"path": str(folder / "store"), **store},
            "ray": {"first_window_items": 2, "window_items": 2, "encode_workers": 1},
        }
    )


def parts(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "output").glob("*/part-*.parquet")}


@pytest.fixture(scope="module")
def kept(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The parts of the same run on a store that is kept."""
    folder = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as monkeypatch:
        run_without_ray(monkeypatch)
        flow.run(configured(corpus, folder))
    return parts(folder)


@pytest.fixture
def segments(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Grows by the windows of each segment that is answered."""
    run_without_ray(monkeypatch)
    seen: list[list[int]] = []
    honest = flow.ANSWERS["caption_videos"]

    def noting(context: Any, windows: Any) -> Any:
        seen.append([window.index for window in windows])
        return honest.receipts(context, windows)

    monkeypatch.setitem(
        flow.ANSWERS, "caption_videos", flow.Pass(name="generate", receipts=noting, finish=honest.finish)
    )
    return seen


def test_twenty_times_the_bound_goes_through(
    segments: list[list[int]], corpus: Path, kept: dict[str, bytes], tmp_path: Path
) -> None:
    config = configured(corpus, tmp_path, retention="segment", max_bytes=MAX_BYTES)
    with Watch(tmp_path / "store", every_seconds=0.002) as watch:
        summary = flow.run(config)
    feature_bytes = summary["computed_tokens"] // PATCHES_A_TOKEN * TOKEN_BYTES
    print(
        f"{feature_bytes} bytes of features = {feature_bytes / MAX_BYTES:.1f} bounds in {len(segments)} segments; "
        f"peak {watch.peak} = {watch.peak / MAX_BYTES:.2f} bounds in {watch.looks} looks, "
        f"said {summary['store_peak_bytes']}"
    )
    assert feature_bytes >= 20 * MAX_BYTES
    assert summary["encodes"] == NUM_ITEMS
    assert watch.looks > 500
    # On a local disk nothing is there twice: not even one shard a writer comes on top.
    assert watch.peak <= MAX_BYTES
    assert max(len(windows) for windows in segments) >= 2 and watch.peak > 0.6 * MAX_BYTES  # the bound is used
    assert watch.peak * 0.8 <= summary["store_peak_bytes"] <= watch.peak + 8 * 4096  # with folders
    assert disk_use(tmp_path / "store") <= NOTE_BYTES
    assert parts(tmp_path) == kept


class Killed(BaseException):
    """Stands for the end of the process: nothing handles it."""


def test_killed_and_started_again_it_stays_within_the_bound_and_leaves_nothing(
    segments: list[list[int]],
    corpus: Path,
    kept: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each time with a batch in the store that no outcome speaks of: the run is not to know it by that."""
    num_items, kills = 24, [2, 3, 9, 16, 25]
    config = configured(corpus, tmp_path, retention="segment", max_bytes=MAX_BYTES).model_copy(
        update={"limit": num_items}
    )
    commits = 0
    honest = encode.write_outcome

    def killed_now_and_then(*arguments: Any) -> None:
        nonlocal commits
        commits += 1
        if commits in kills:
            raise Killed
        honest(*arguments)

    monkeypatch.setattr(encode, "write_outcome", killed_now_and_then)
    left: list[int] = []
    with Watch(tmp_path / "store", every_seconds=0.002) as watch:
        while len(left) < len(kills):
            with pytest.raises(Killed):
                flow.run(config)
            left.append(disk_use(tmp_path / "store"))
        summary = flow.run(config)
    print(f"killed with {left} bytes in the store; peak {watch.peak} = {watch.peak / MAX_BYTES:.2f} bounds")
    assert min(left) > NOTE_BYTES
    assert watch.peak <= MAX_BYTES
    assert summary["encodes"] == num_items
    assert commits == num_items + len(kills)  # finished batches were not encoded again
    assert disk_use(tmp_path / "store") <= NOTE_BYTES
    assert list((tmp_path / "output").glob("*/_run/shards/*")) == []
    assert parts(tmp_path) == {name: kept[name] for name in sorted(kept)[: num_items // 2]}


def test_killed_while_answering_it_keeps_what_is_not_answered(
    segments: list[list[int]], corpus: Path, kept: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_items = 12
    config = configured(corpus, tmp_path, retention="segment", max_bytes=4 * MAX_BYTES).model_copy(
        update={"limit": num_items}
    )
    honest = flow.ANSWERS["caption_videos"]
    commits: list[object] = []
    commit = encode.write_outcome
    monkeypatch.setattr(encode, "write_outcome", lambda *arguments: commits.append(commit(*arguments)))

    def killed_after_three_windows(context: Any, windows: Any) -> Any:
        yield from honest.receipts(context, windows[:3])
        raise Killed

    with monkeypatch.context() as killing:
        killing.setitem(
            flow.ANSWERS,
            "caption_videos",
            flow.Pass(name="generate", receipts=killed_after_three_windows, finish=honest.finish),
        )
        with pytest.raises(Killed):
            flow.run(config)
    before = disk_use(tmp_path / "store")
    summary = flow.run(config)
    assert segments[-1] == [3, 4, 5]
    assert before > 10 * NOTE_BYTES
    assert summary["encodes"] == num_items == len(commits)
    assert disk_use(tmp_path / "store") <= NOTE_BYTES
    assert parts(tmp_path) == {name: kept[name] for name in sorted(kept)[: num_items // 2]}


def test_killed_before_its_last_release_the_next_start_leaves_nothing(
    segments: list[list[int]], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(corpus, tmp_path, retention="segment").model_copy(update={"limit": 4})

    def killed(context: Any, windows: Any, answering: Any) -> None:
        if list((tmp_path / "output").glob("*/part-*")):
            raise Killed

    with monkeypatch.context() as killing:
        killing.setattr(flow, "release", killed)
        with pytest.raises(Killed):
            flow.run(config)
    assert disk_use(tmp_path / "store") > NOTE_BYTES
    assert flow.run(config)["items_written"] == 4
    assert segments == [[0, 1]]
    assert disk_use(tmp_path / "store") <= NOTE_BYTES


def test_a_window_that_the_store_cannot_hold_is_refused_and_a_larger_bound_goes_on(
    segments: list[list[int]], corpus: Path, kept: dict[str, bytes], tmp_path: Path
) -> None:
    num_items = 12

    def bounded(max_bytes: int) -> Config:
        return configured(corpus, tmp_path, retention="segment", max_bytes=max_bytes).model_copy(
            update={"limit": num_items}
        )

    starts = 0
    max_bytes = 230_000
    while True:
        starts += 1
        try:
            flow.run(bounded(max_bytes))
            break
        except ConfigError as error:
            said = str(error)
        print(said)
        found = re.search(
            r"items (\d+) to (\d+) are one window, whose features take up to (\d+) bytes, and of store.max_bytes "
            rf"\({max_bytes}\) (\d+) are free for them; set store.max_bytes to (\d+) or more, with which the run goes",
            said,
        )
        assert found is not None, said
        first, last, needed, free, more = (int(number) for number in found.groups())
        assert (first % 2, last) == (0, first + 1)
        assert 2 * 12 * TOKEN_BYTES < needed < 2 * 140 * TOKEN_BYTES  # the drawn items have 12 to 128 tokens
        assert more == max_bytes + needed - free
        assert ("or ray.window_items to 1 at most, which starts another run" in said) == (needed <= 2 * free)
        max_bytes = more
    assert starts > 1 and max_bytes < 1.5 * MAX_BYTES
    assert parts(tmp_path) == {name: kept[name] for name in sorted(kept)[: num_items // 2]}
    assert len(list((tmp_path / "output").glob("*/summary.json"))) == 1  # one run all along


@pytest.mark.parametrize("rest", [100_000, -100_000])
def test_what_others_keep_in_the_store_counts(
    rest: int, segments: list[list[int]], corpus: Path, tmp_path: Path
) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "others").write_bytes(bytes(MAX_BYTES - rest))
    config = configured(corpus, tmp_path, retention="segment", max_bytes=MAX_BYTES)
    with pytest.raises(ConfigError, match=rf"of store.max_bytes \({MAX_BYTES}\) (\d+) are free") as refused:
        flow.run(config)
    free = int(re.findall(r"(\d+) are free", str(refused.value))[0])
    assert 0 <= free <= max(0, rest - scratch.SHARD_OVERHEAD_BYTES)
    assert segments == []


def test_on_object_storage_one_shard_a_writer_comes_on_top(
    segments: list[list[int]], corpus: Path, kept: dict[str, bytes], tmp_path: Path
) -> None:
    """Shards are sealed there, for other machines to read, and sealing makes a copy."""
    num_items, max_bytes = 24, 3 * MAX_BYTES
    store = {"path": f"memory://{tmp_path.name}/store", "local_path": str(tmp_path / "local")}
    config = configured(corpus, tmp_path, **store, retention="segment", max_bytes=max_bytes).model_copy(
        update={"limit": num_items}
    )
    with Watch(tmp_path / "local", every_seconds=0.002) as watch:
        summary = flow.run(config)
    print(f"peak {watch.peak} = {watch.peak / max_bytes:.2f} bounds; {summary['store_peak_bytes']} remote")
    assert len(segments) > 1
    assert max_bytes // 4 < watch.peak <= max_bytes + max_bytes // 4
    assert NOTE_BYTES < summary["store_peak_bytes"] <= max_bytes
    left = FeatureStore(config.store.path, config.store.local_path)
    assert left.num_bytes() <= NOTE_BYTES
    assert disk_use(tmp_path / "local") == 0
    assert parts(tmp_path) == {name: kept[name] for name in sorted(kept)[: num_items // 2]}
    left.folder.remove("")


def test_a_store_is_not_left_to_the_next_segment_while_it_is_read(
    segments: list[list[int]], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deleted shard that is still mapped keeps its disk space, which no listing of the folder shows."""
    config = configured(corpus, tmp_path, retention="segment", max_bytes=MAX_BYTES).model_copy(update={"limit": 8})
    held: list[ShardReader] = []
    honest = flow.ANSWERS["caption_videos"]

    def reading(context: Any, windows: Any) -> Any:
        [shard] = (tmp_path / "store" / "open").glob("2*")
        held.append(ShardReader(str(shard)))
        return honest.receipts(context, windows)

    monkeypatch.setitem(
        flow.ANSWERS, "caption_videos", flow.Pass(name="generate", receipts=reading, finish=honest.finish)
    )
    monkeypatch.setattr(scratch, "ACTORS_END_SECONDS", 0.5)
    with pytest.raises(RuntimeError, match=r"shards are still written or read 0\.5 s after their pass"):
        flow.run(config)
    assert len(segments) == 1
    monkeypatch.setitem(flow.ANSWERS, "caption_videos", honest)
    monkeypatch.setattr(scratch, "ACTORS_END_SECONDS", 30)
    Timer(0.5, held.clear).start()
    started = time.monotonic()
    flow.run(config)
    assert time.monotonic() - started > 0.5 and held == []
    assert disk_use(tmp_path / "store") <= NOTE_BYTES


def test_a_kept_store_is_within_its_bounds_when_a_run_has_ended(
    demo_media: Path, make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_without_ray(monkeypatch)
    whole = make_config(demo_media / "manifest.jsonl", generate={"max_new_tokens": 1})
    first = flow.run(whole)
    store = FeatureStore(whole.store.path)
    bound = store.num_bytes() * 2 // 3
    bounded = whole.model_copy(update={"prompt": "Why?", "store": whole.store.model_copy(update={"max_bytes": bound})})
    second = flow.run(bounded)
    assert (second["encodes"], first["evictions"]) == (0, 0)
    assert 0 < second["evictions"] < first["encodes"] and second["evicted_bytes"] > 0
    assert store.num_bytes() <= bound
    third = flow.run(bounded.model_copy(update={"prompt": "How?"}))
    assert third["encodes"] == second["evictions"]  # what had gone
    assert third["evictions"] > 0 and store.num_bytes() <= bound

    old = whole.store.model_copy(update={"ttl": 1e-3})
    fourth = flow.run(whole.model_copy(update={"prompt": "Who?", "store": old}))
    assert fourth["encodes"] == first["encodes"]  # nothing is young enough to be asked, and nothing is left
    assert fourth["evictions"] == 2 * first["encodes"] - third["evictions"]

    weighed = {"retention": "auto", "ttl": 86400.0, "worker_hour": 1.0}
    for gb_month, gone in ((0.0, 0), (1e12, first["encodes"])):  # for nothing all is worth holding, so dear nothing is
        store_section = whole.store.model_copy(update={**weighed, "gb_month": gb_month})
        auto = flow.run(whole.model_copy(update={"prompt": f"At {gb_month}?", "store": store_section}))
        assert auto["evictions"] == gone
