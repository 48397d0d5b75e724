"""`headrace status` and `headrace compare`, on runs that were cut off, that ended, and that were configured apart."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from jobs.cli import app
from pipeline import flow
from pipeline.config import parse_config
from pipeline.errors import ConfigError, InterruptedRunError
from pipeline.runs.compare import compare_runs
from pipeline.runs.ledger import Ledger
from pipeline.runs.lock import current_holder, run_lock
from pipeline.runs.run_folder import find_run
from pipeline.runs.status import PassStatus, run_status, status_text
from pipeline.storage import Folder
from tests.costs import assert_sums, assert_times, read_costs
from tests.without_ray import run_without_ray

WORDS = ("wheel", "water", "mill", "stone", "river")


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    run_without_ray(monkeypatch)


def start(folder: Path, rows: list[dict[str, Any]], run_id: str, **changes: Any) -> dict[str, Any]:
    manifest = folder / f"{run_id}.jsonl"
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))
    raw: dict[str, Any] = {
        "job": "embed_backfill",
        "input": str(manifest),
        "output": str(folder / "output"),
        "run_id": run_id,
        "model": "demo:dual_encoder",
        "store": {"path": str(folder / "store")},
        "ray": {"first_window_items": 4, "window_items": 8},
        "max_quarantined_fraction": 1.0,
    }
    return flow.run(parse_config({**raw, **changes}))


def texts(count: int) -> list[dict[str, Any]]:
    return [
        {"id": f"t{n}", "text": f"{WORDS[n % 5]} {WORDS[n // 5 % 5]} {n}", "tenant": "ab"[n % 2]} for n in range(count)
    ]


def test_a_run_that_was_cut_off_says_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [*texts(19), {"id": "gone", "uri": "absent.png"}]
    real, calls = Ledger.record, []

    def cut_off(self: Ledger, pass_name: str, window: int, entry: dict[str, Any]) -> None:
        calls.append((pass_name, window))
        if len([call for call in calls if call[0] == "pool"]) == 3:
            raise InterruptedRunError("cut off")
        real(self, pass_name, window, entry)

    monkeypatch.setattr(Ledger, "record", cut_off)
    with pytest.raises(InterruptedRunError):
        start(tmp_path, rows, "night")
    run = find_run(str(tmp_path / "output"))
    assert run.url == find_run(str(tmp_path / "output" / "night")).url
    status = run_status(run)
    assert (status.run_id, status.state, status.holder) == ("night", "interrupted", None)
    assert (status.items_in, status.windows) == (20, 3)  # 4, 8 and 8 items
    assert status.passes == {"encode": PassStatus(windows=3, items=20), "pool": PassStatus(windows=2, items=12)}
    assert status.counts == {"items_written": 12, "items_quarantined": 0, "items_skipped": 0}
    assert "to resume    start the same command again" in status_text(status)

    told = CliRunner().invoke(app, ["report", str(tmp_path / "output")])
    page = Path(run.locate("report.html"))
    assert (told.exit_code, told.stdout) == (0, f"report  {page}\n"), told.output
    written = page.read_text()
    assert "night: interrupted" in written and "<td>finished</td><td>12</td>" in written
    assert "<td>items in</td><td>20</td>" in written and "<b>t11</b>" in written

    monkeypatch.setattr(Ledger, "record", real)
    summary = start(tmp_path, rows, "night")
    ended = page.read_text()
    page.unlink()
    assert CliRunner().invoke(app, ["report", run.url]).exit_code == 0
    assert page.read_text() == ended and "<td>sum</td><td>20</td>" in ended
    assert summary["items_quarantined"] == 1
    status = run_status(run)
    assert (status.state, status.passes["pool"]) == ("done", PassStatus(windows=3, items=20))
    assert status.counts == {"items_written": 19, "items_quarantined": 1, "items_skipped": 0}
    assert status.quarantine == summary["quarantine"] and sum(status.quarantine.values()) == 1

    told = CliRunner().invoke(app, ["status", str(tmp_path / "output"), "--json"])
    assert told.exit_code == 0 and json.loads(told.stdout)["passes"]["pool"] == {"windows": 3, "items": 20}

    # What it cost, in both starts; at a price of 1 a CPU second the page has the same number under `price`.
    summary, costs = read_costs(Path(run.path))
    assert_times(costs)
    assert_sums(costs, summary)
    assert json.loads(told.stdout)["cpu_seconds"] == pytest.approx(summary["cpu_seconds"])
    assert set(summary["cpu_seconds"]) == {"plan", "tokenize", "pool"} and summary["accelerator_seconds"] == {}
    assert CliRunner().invoke(app, ["report", run.url, "--core-hour", "3600"]).exit_code == 0
    most = max(costs, key=lambda row: row["cpu_seconds"])
    written = page.read_text()
    assert f"<td>{sum(row['cpu_seconds'] for row in costs):,.4g}</td></tr>\n</table>" in written
    [dearest, *_] = written[written.index("The dearest items") :].split("<tr><td>")[1:]
    assert dearest.startswith(f"{rows[most['item_index']]['id']}</td><td>text</td><td></td>")
    assert f"<td>{most['cpu_seconds']:,.4g}</td></tr>" in dearest
    refused = CliRunner().invoke(app, ["status", str(tmp_path)])
    assert refused.exit_code == ConfigError.exit_code and "neither a run nor" in refused.stderr


def test_who_holds_a_run_is_told_without_touching_the_lock(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    assert current_holder(folder) is None
    with run_lock(folder):
        held = current_holder(folder)
        assert held is not None and (held["host"], held["pid"]) == (socket.gethostname(), os.getpid())
    assert current_holder(folder) is None
    dead = {"host": socket.gethostname(), "pid": 2**22 + 1, "started": "2026-01-01T00:00:00+00:00"}  # above pid_max
    (tmp_path / "_run" / "lock").write_text(json.dumps(dead))
    assert current_holder(folder) is None
    (tmp_path / "_run" / "lock").write_text(json.dumps({**dead, "host": "another"}))
    assert current_holder(folder) == {**dead, "host": "another"}


def test_runs_of_other_items_and_settings_are_compared_item_by_item(tmp_path: Path) -> None:
    rows = texts(20)
    start(tmp_path, rows, "one")
    start(tmp_path, [rows[0], *reversed(rows[1:])], "again", ray={"first_window_items": 3, "window_items": 3})
    folders = [Folder(str(tmp_path / "output" / name)) for name in ("one", "again")]
    again = compare_runs(*folders)
    assert again.statuses == {("ok", "ok"): 20} and (again.only_left, again.only_right) == (0, 0)
    assert again.different["text"] == again.different["modality"] == 0 and again.equal["text"] == 20
    assert again.settings["config.ray.window_items"] == (8, 3)
    assert again.cosines["vector"][0] is None or again.cosines["vector"][0] > 0.99999

    # A text changes, one is another's, one cannot be read, two are new, one is gone.
    changed = [{**row, "text": "another"} if row["id"] == "t3" else row for row in rows if row["id"] != "t9"]
    changed = [{**row, "tenant": "c"} if row["id"] == "t5" else row for row in changed]
    changed[0] = {"id": "t0", "uri": "absent.png", "tenant": "a"}
    start(tmp_path, [*changed, {"id": "n1", "text": "new"}, {"id": "n2", "text": "new"}], "other")
    other = compare_runs(folders[0], Folder(str(tmp_path / "output" / "other")))
    assert (other.only_left, other.only_right) == (2, 3)  # t9 and a's t5; c's t5 and the new ones
    assert other.statuses == {("ok", "ok"): 17, ("ok", "quarantined"): 1}
    assert [(each.id, each.column, each.right) for each in other.examples if each.column == "text"] == [
        ("t3", "text", "another")
    ]
    # The cosine of what changed, from the parts themselves.
    vectors = []
    for name in ("one", "other"):
        parts = sorted((tmp_path / "output" / name).glob("part-*.parquet"))
        rows_there = pa.concat_tables(pq.read_table(part) for part in parts).to_pylist()
        vectors.append(np.array(next(row["vector"] for row in rows_there if row["id"] == "t3"), np.float64))
    expected = vectors[0] @ vectors[1] / np.sqrt((vectors[0] ** 2).sum() * (vectors[1] ** 2).sum())
    assert other.cosines["vector"][0] == pytest.approx(expected, abs=1e-9)
    assert not other.same_results and other.counts["items_quarantined"] == (0, 1)

    told = CliRunner().invoke(app, ["compare", folders[0].url, folders[0].url])
    assert told.exit_code == 0 and told.stdout.endswith("the same results\n")
    told = CliRunner().invoke(app, ["compare", folders[0].url, str(tmp_path / "output" / "other"), "--json"])
    assert told.exit_code == 1 and json.loads(told.stdout)["statuses"]["ok -> quarantined"] == 1
