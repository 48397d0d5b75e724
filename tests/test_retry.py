"""`headrace retry`: quarantined items alone are worked on, and the run becomes one that had them from the start."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.retry import run_retry
from pipeline import flow
from pipeline.config import parse_config
from pipeline.errors import ConfigError, InterruptedRunError, QuarantineLimitError
from pipeline.runs import retried
from pipeline.sinks.registry import open_sink
from pipeline.storage import Folder
from tests.costs import assert_costs, assert_sums, assert_times, cpu_seconds_of_this_tree, read_costs
from tests.without_ray import run_without_ray


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    run_without_ray(monkeypatch)


@pytest.fixture
def rows(tmp_path: Path, demo_media: Path) -> list[dict[str, Any]]:
    """Media of this test's own, two of them spoiled, and one that is absent."""
    shutil.copytree(demo_media / "media", tmp_path / "media")
    listed = [json.loads(line) for line in (demo_media / "manifest.jsonl").read_text().splitlines()]
    rows = [{"id": row["id"], "uri": str(tmp_path / row["media"][0]["uri"])} for row in listed]
    for number in (1, 9):
        data = Path(rows[number]["uri"]).read_bytes()
        Path(rows[number]["uri"]).write_bytes(data[: len(data) // 3])
    Path(rows[5]["uri"]).unlink()
    return rows


def mend(rows: list[dict[str, Any]], demo_media: Path, *numbers: int) -> None:
    for number in numbers:
        shutil.copyfile(demo_media / "media" / Path(rows[number]["uri"]).name, rows[number]["uri"])


def config(folder: Path, rows: list[dict[str, Any]], name: str, **changes: Any) -> Any:
    manifest = folder / "manifest.jsonl"
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))
    raw = {
        "job": "caption_videos",
        "input": str(manifest),
        "output": str(folder / name),
        "model": "demo:captioner",
        "prompt": "Describe what you see.",
        "store": {"path": str(folder / f"{name}-store")},
        "ray": {"first_window_items": 4, "window_items": 8},
    }
    return parse_config({**raw, **changes})


def table(folder: Folder, name: str = "") -> pa.Table:
    paths = sorted(Path(folder.path, name).glob("part-*.parquet"))
    return pa.concat_tables(pq.read_table(path) for path in paths)


def test_a_retried_run_is_one_that_had_all_from_the_start(
    tmp_path: Path, rows: list[dict[str, Any]], demo_media: Path
) -> None:
    first = flow.run(config(tmp_path, rows, "output"))
    assert first["items_quarantined"] == 3
    run = Folder(f"{tmp_path}/output/{first['run_id']}")
    costs = assert_costs(Path(run.path))
    for row in costs:
        if row["decode_seconds"] is not None and row["media_decode_ms"]:
            # By other clocks: an item's own decoding lies within its batch's, the tower's time within encoding.
            assert row["media_fetch_ms"] + row["media_decode_ms"] < 1e3 * row["decode_seconds"] + 1
            assert (row["vision_encode_ms"] or 0.0) < 1e3 * row["encode_seconds"] + 1
    kept = {path.name: path.stat().st_mtime_ns for path in Path(run.path).glob("part-*.parquet")}

    # Its page shows what came out, and what did not: small pictures inside, the reasons beside them.
    page = Path(run.path, "report.html").read_text()
    written = [row for row in table(run).to_pylist() if row["status"] == "ok"]
    for row in written:
        picture, _, said = page[: page.index(f"<b>{row['id']}</b>{row['text']}</li>")].rpartition("<li>")
        assert picture and said.startswith('<img alt="" src="data:image/jpeg;base64,/9j/')
    for row in table(run, "quarantine").to_pylist():
        assert f"<b>{row['id']}</b>{row['code']}: " in page
    assert "vision_encode</td><td>video</td>" in page and "encode: 20 items in" in page

    # One of three is mended; of the others one was chosen by its code and fails again.
    mend(rows, demo_media, 5)
    missing = table(run)["code"].to_pylist()[5]
    second = run_retry(run, {missing})
    assert second is not None
    assert (second["items_written"], second["items_quarantined"]) == (first["items_written"] + 1, 2)
    assert second["encodes"] == first["encodes"] + 1 and second["fetches"] == first["fetches"] + 1
    letters = table(run, "quarantine").to_pylist()
    assert [(letter["item_index"], letter["attempts"]) for letter in letters] == [(1, 1), (9, 1)]
    third = run_retry(run, ())
    assert third is not None and third["items_quarantined"] == 2
    letters = table(run, "quarantine").to_pylist()
    assert [(letter["item_index"], letter["attempts"]) for letter in letters] == [(1, 2), (9, 2)]
    untouched = {name: Path(run.path, name).stat().st_mtime_ns for name in kept if name > "part-000001.parquet"}
    assert untouched == {name: kept[name] for name in untouched} and untouched

    mend(rows, demo_media, 1, 9)
    last = run_retry(run, ())
    assert last is not None and (last["items_written"], last["quarantine"]) == (20, {})
    assert not list(Path(run.path, "quarantine").glob("*.parquet"))
    started = cpu_seconds_of_this_tree()
    flow.run(config(tmp_path, rows[:1], "one"))
    begun = cpu_seconds_of_this_tree()
    fresh = flow.run(config(tmp_path, rows, "fresh"))
    used, used_by_one = cpu_seconds_of_this_tree() - begun, begun - started
    other = Folder(f"{tmp_path}/fresh/{fresh['run_id']}")
    # Most of what a run of 20 takes beyond a run of one is theirs; what both take is loading models and other starts.
    items = sum(row["cpu_seconds"] for row in assert_costs(Path(other.path)))
    print(f"{items:.2f} CPU seconds of items; of the processes {used:.2f}, with one item {used_by_one:.2f}")
    assert 0.5 * (used - used_by_one) < items < used
    assert table(run).equals(table(other))
    # What each attempt took stays counted, by item as by run.
    summary, retried_costs = read_costs(Path(run.path))
    assert_times(retried_costs)
    assert_sums(retried_costs, summary)
    for number, (row, once) in enumerate(zip(retried_costs, costs, strict=True)):
        assert row["cpu_seconds"] > once["cpu_seconds"] if number in (1, 5, 9) else row == once
    assert run_retry(run, ()) is None


def test_a_run_from_before_a_column_of_timings_is_retried(
    tmp_path: Path, rows: list[dict[str, Any]], demo_media: Path
) -> None:
    first = flow.run(config(tmp_path, rows, "output", max_quarantined_fraction=0.5))
    run = Folder(f"{tmp_path}/output/{first['run_id']}")
    part = Path(run.path, "timings", "part-000000.parquet")
    pq.write_table(pq.read_table(part).drop_columns("encoder_tokens"), part)
    mend(rows, demo_media, 1)
    summary = run_retry(run, ())
    assert summary is not None and summary["items_written"] == first["items_written"] + 1
    took = pq.read_table(part).to_pylist()
    assert [row["item_index"] for row in took if row["encoder_tokens"]] == [1]
    assert len(took) > 1 and all(row["modality"] for row in took)


def test_a_retry_that_is_cut_off_goes_on(
    tmp_path: Path, rows: list[dict[str, Any]], demo_media: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = flow.run(config(tmp_path, rows, "output", max_quarantined_fraction=0.5))
    run = Folder(f"{tmp_path}/output/{first['run_id']}")
    mend(rows, demo_media, 1, 5, 9)
    real = retried._account
    calls: list[int] = []

    def cut_off(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise InterruptedRunError("cut off")
        real(*arguments)

    monkeypatch.setattr(retried, "_account", cut_off)
    with pytest.raises(InterruptedRunError):
        run_retry(run, ())
    assert len(calls) == 2  # of the windows of items 1, 5 and 9 the first is done, the second not counted yet
    monkeypatch.setattr(retried, "_account", real)
    summary = run_retry(run, {"no such code"})
    assert summary is not None and summary["items_written"] == 20
    assert summary["encodes"] == first["encodes"] + 3  # counted once
    assert_sums(read_costs(Path(run.path))[1], summary)  # of the second window, too, whose timings were there


def test_what_is_still_out_ends_as_a_run_does(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    with pytest.raises(QuarantineLimitError):
        flow.run(config(tmp_path, rows, "output", run_id="night", max_quarantined_fraction=0.05))
    with pytest.raises(QuarantineLimitError, match="3 of 20"):
        run_retry(Folder(f"{tmp_path}/output/night"), ())
    with pytest.raises(ConfigError, match="not ended"):
        (tmp_path / "output" / "night" / "summary.json").unlink()
        run_retry(Folder(f"{tmp_path}/output/night"), ())


def test_vectors_of_retried_items_reach_the_sinks(tmp_path: Path, rows: list[dict[str, Any]], demo_media: Path) -> None:
    lance = {"lancedb": {"uri": str(tmp_path / "lance"), "collection": "things"}}
    embeds = {"job": "embed_backfill", "model": "demo:dual_encoder", "prompt": None, "sinks": lance}
    raw = config(tmp_path, rows, "output").model_dump(mode="json", exclude={"prompt"})
    made = parse_config({**raw, **{name: value for name, value in embeds.items() if value is not None}})
    first = flow.run(made)
    assert list(first["points"].values()) == [17]
    mend(rows, demo_media, 1, 5, 9)
    run = Folder(f"{tmp_path}/output/{first['run_id']}")
    summary = run_retry(run, ())
    assert summary is not None and list(summary["points"].values()) == [20]
    [row] = [row for row in table(run).to_pylist() if row["item_index"] == 5]
    assert made.sinks.lancedb is not None
    [hit] = open_sink(made.sinks.lancedb).search("things", row["vector"], 1, tenant="")
    assert hit.score > 0.9999
