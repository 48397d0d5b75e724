"""`--sample` and `--dry-run`: which items a sample has, what such a run is called, and what is not written."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from typer.testing import CliRunner

from jobs.cli import app
from pipeline.config import parse_config
from pipeline.errors import ConfigError, ManifestError
from pipeline.runs.base import LATEST_ENDED_NAME
from pipeline.runs.manifest import freeze_manifest, read_range
from pipeline.storage import Folder
from tests.without_ray import run_without_ray

IDS = [f"item-{number}" for number in range(2_000)]


def chosen(percent: int) -> set[str]:
    """By the hash's first 8 hex digits: the fraction is told exactly enough, unless one of 2,000 lies on the bound."""
    return {id_ for id_ in IDS if int(hashlib.sha256(id_.encode()).hexdigest()[:8], 16) < percent * 2**32 // 100}


def frozen(folder: Path, ids: list[str], **options: Any) -> list[str]:
    folder.mkdir()
    (folder / "rows.jsonl").write_text("".join(json.dumps({"id": id_, "text": id_}) + "\n" for id_ in ids))
    run = Folder(str(folder / "run"))
    count = freeze_manifest(str(folder / "rows.jsonl"), run, **{"limit": None, "texts": ("text",), **options}).num_items
    requests = read_range(run, 0, count)
    assert [request.item_index for request in requests] == list(range(count))
    return [request.id for request in requests]


def test_a_sample_has_the_same_items_in_whatever_order(tmp_path: Path) -> None:
    tenth = frozen(tmp_path / "a", IDS, sample_fraction=0.1)
    assert tenth == [id_ for id_ in IDS if id_ in chosen(10)] and 150 < len(tenth) < 250
    assert frozen(tmp_path / "b", IDS[::-1], sample_fraction=0.1) == tenth[::-1]
    assert set(frozen(tmp_path / "c", IDS, sample_fraction=0.01)) < set(tenth)
    assert frozen(tmp_path / "d", IDS, sample_fraction=0.1, limit=7) == tenth[:7]
    assert frozen(tmp_path / "e", IDS, sample_fraction=1.0) == IDS
    outside = [id_ for id_ in IDS if id_ not in chosen(10)][:5]
    with pytest.raises(ManifestError, match="none of its items is in a sample of 10"):
        frozen(tmp_path / "f", outside, sample_fraction=0.1)


def raw(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "job": "embed_backfill",
        "input": str(folder / "rows.jsonl"),
        "output": str(folder / "output"),
        "model": "demo:dual_encoder",
        "store": {"path": str(folder / "store")},
        **changes,
    }


def test_a_sample_is_a_run_of_its_own_and_nothing_goes_on_from_it() -> None:
    config = parse_config(raw(Path("x"), run_id="night"))
    sampled = config.sampled("0.5%")
    assert (sampled.run_id, sampled.sample_fraction) == ("night-sample-0.5pct", 0.005)
    assert sampled.digest() != config.digest() == config.model_copy(update={"run_id": None}).digest()
    assert "sample_fraction" not in config.identity()  # the digest of runs that were started before there were samples
    for share in ("1", "0%", "101%", "-1%", "1e1%", "a%"):
        with pytest.raises(ConfigError):
            config.sampled(share)
    going_on = parse_config(raw(Path("x"), run_id="n", incremental={"base": "latest", "delete_vanished": True}))
    with pytest.raises(ConfigError, match="would delete that from the sinks"):
        going_on.sampled("1%")


def test_a_dry_run_writes_nothing_and_a_sample_says_that_it_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_without_ray(monkeypatch)
    rows = [{"id": id_, "text": f"a red circle {id_}"} for id_ in IDS[:200]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(raw(tmp_path, run_id="night")))
    expected = [id_ for id_ in IDS[:200] if id_ in chosen(10)]
    before = sorted(tmp_path.rglob("*"))

    dry = CliRunner().invoke(app, ["run", str(config), "--dry-run", "--sample", "10%"])
    assert dry.exit_code == 0, dry.output
    plan = CliRunner().invoke(app, ["plan", str(config), "--set", "sample_fraction=0.1"])
    assert dry.stdout == plan.stdout and str(len(expected)) in dry.stdout
    assert sorted(tmp_path.rglob("*")) == before

    done = CliRunner().invoke(app, ["run", str(config), "--sample", "10%"])
    assert done.exit_code == 0 and "a sample: 10.0000% of the ids" in done.stdout, done.output
    run = tmp_path / "output" / "night-sample-10pct"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["items_in"], summary["sample_fraction"]) == (len(expected), 0.1)
    assert pq.read_table(run / "part-000000.parquet")["id"].to_pylist() == expected
    assert not (tmp_path / "output" / LATEST_ENDED_NAME).exists()  # no base for the next night

    whole = CliRunner().invoke(app, ["run", str(config)])
    assert whole.exit_code == 0 and "sample" not in whole.stdout
    summary = json.loads((tmp_path / "output" / "night" / "summary.json").read_text())
    assert (summary["items_in"], summary["sample_fraction"]) == (200, None)
    assert (tmp_path / "output" / LATEST_ENDED_NAME).exists()
