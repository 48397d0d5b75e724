"""Runs that go on from an earlier one: only the difference is worked on, and the result is that of a full run."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config import parse_config
from pipeline.errors import ConfigError
from pipeline.sinks.contract import Collection, Filter
from pipeline.sinks.registry import open_sink
from tests.foretold import run_as_foretold
from tests.models.dual_folders import FAMILIES, WORDS, save_dual
from tests.models.text_folders import save_sentence_folder
from tests.without_ray import run_without_ray


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    run_without_ray(monkeypatch)


def run(folder: Path, rows: list[dict[str, Any]], model: Path, run_id: str | None, **changes: Any) -> dict[str, Any]:
    manifest = folder / "manifest.jsonl"
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))
    raw: dict[str, Any] = {
        "job": "embed_backfill",
        "input": str(manifest),
        "output": str(folder / "output"),
        "run_id": run_id,
        "model": str(model),
        "store": {"path": str(folder / "store")},
        "ray": {"first_window_items": 16, "window_items": 16},
    }
    return run_as_foretold(parse_config({**raw, **changes}))


def assert_same_parts(folder: Path, one: str, other: str) -> None:
    """Equal, but for the last bits of vectors, which move with what else is in a batch."""
    tables = []
    for run_id in (one, other):
        paths = sorted((folder / "output" / run_id).glob("part-*.parquet"))
        tables.append(pa.concat_tables(pq.read_table(path) for path in paths).combine_chunks())
    assert tables[0].drop_columns("vector").equals(tables[1].drop_columns("vector"))
    vectors = [np.stack(table["vector"].to_numpy()) for table in tables]
    assert (vectors[0] * vectors[1]).sum(axis=1).min() > 0.99999 * (vectors[0] ** 2).sum(axis=1).min()
    np.testing.assert_allclose(vectors[0], vectors[1], atol=2e-6, rtol=1e-5)


@pytest.fixture
def media(tmp_path: Path, demo_media: Path) -> list[dict[str, Any]]:
    """Files of this test's own, that it may change."""
    shutil.copytree(demo_media / "media", tmp_path / "media")
    rows = [json.loads(line) for line in (demo_media / "manifest.jsonl").read_text().splitlines()]
    return [{"id": row["id"], "uri": str(tmp_path / row["media"][0]["uri"])} for row in rows]


def test_only_the_difference_is_worked_on_and_the_result_is_a_full_runs(
    tmp_path: Path, media: list[dict[str, Any]]
) -> None:
    model = save_dual(tmp_path / "model", *FAMILIES["clip"]())
    rng = random.Random(2)
    texts = [{"id": f"t{n}", "text": " ".join(rng.choices(WORDS, k=6)), "tenant": "ab"[n % 2]} for n in range(40)]
    lance = {"lancedb": {"uri": str(tmp_path / "lance"), "collection": "things"}}
    first = run(tmp_path, [*media, *texts], model, "first", sinks=lance)
    assert first["items_written"] == 60

    # One picture changes in place, one text changes, two items vanish, one is new, and the order is another.
    images = [row for row in media if row["id"].startswith("image")]
    shutil.copyfile(images[3]["uri"], images[0]["uri"])
    changed = [{**row, "text": "the wheel"} if row["id"] == "t7" else row for row in texts]
    rows = [
        row for row in [*changed, {"id": "new", "text": "water"}, *media] if row["id"] not in ("t4", images[1]["id"])
    ]
    second = {"base": "latest", "delete_vanished": True}
    summary = run(tmp_path, rows, model, "second", incremental=second, sinks=lance)
    assert (summary["items_carried"], summary["items_vanished"]) == (56, 2)
    assert (summary["encodes"], summary["texts_embedded"], summary["fetches"]) == (0, 2, 1)  # a copy: a known content
    assert summary["items_written"] == len(rows) == 59

    full = {"path": str(tmp_path / "other_store")}
    assert run(tmp_path, rows, model, "full", store=full)["texts_embedded"] == 40
    assert_same_parts(tmp_path, "second", "full")

    # The vector store has what the parts have, and what vanished is gone.
    [(physical, count)] = summary["points"].items()
    assert count == 59
    table = pa.concat_tables(pq.read_table(p) for p in (tmp_path / "output" / "second").glob("part-*.parquet"))
    sink = open_sink(parse_config({**_minimal(), "sinks": lance}).sinks.lancedb)  # type: ignore[arg-type]
    vectors = {row["id"]: row for row in table.to_pylist()}
    for name in ("t7", "new", images[0]["id"], "t8"):
        only = Filter(item_ids=(name,))  # for one picture is a copy of another
        [hit] = sink.search("things", vectors[name]["vector"], 1, tenant=vectors[name]["tenant"], where=only)
        assert hit.score > 0.9999 and hit.source_id == vectors[name]["source_id"]
    assert physical == Collection(name="things", dimensions=24, metric="cosine", version=physical[-8:]).physical


def test_rows_of_a_vision_language_model_are_compared_whole(tmp_path: Path, media: list[dict[str, Any]]) -> None:
    images = [row["uri"] for row in media if row["id"].startswith("image")][:6]
    rows: list[dict[str, Any]] = [
        *({"id": f"i{n}", "uri": uri} for n, uri in enumerate(images)),
        {"id": "said", "uri": images[0], "text": "What is red?"},
        {"id": "two", "images": images[:2]},
        {"id": "turned", "images": images[2:4]},
        {"id": "prompted", "uri": images[0], "prompt": "Is it large?"},
        {"id": "words", "text": "a red circle"},
        {"id": "same", "text": "a blue cross"},
    ]
    lance = {"lancedb": {"uri": str(tmp_path / "lance"), "collection": "things"}}
    settings: dict[str, Any] = {"sinks": lance, "ray": {"first_window_items": 4, "window_items": 8}}
    model = Path("demo:captioner")
    assert run(tmp_path, rows, model, "first", **settings)["items_written"] == 12
    # A question, the order of two pictures, a prompt and a text change, a picture vanishes, one is new.
    changes: dict[str, dict[str, Any]] = {
        "said": {"text": "What is blue?"},
        "turned": {"images": images[3:1:-1]},
        "prompted": {"prompt": "Is it small?"},
        "words": {"text": "a green circle"},
    }
    again = [{**row, **changes.get(row["id"], {})} for row in rows if row["id"] != "i5"]
    again.insert(3, {"id": "new", "uri": images[5]})
    incremental = {"base": "latest", "delete_vanished": True}
    summary = run(tmp_path, again, model, "second", incremental=incremental, **settings)
    assert (summary["items_carried"], summary["items_vanished"], summary["encodes"]) == (7, 1, 0)
    assert summary["items_written"] == 12 and list(summary["points"].values()) == [12]
    full = {**settings, "store": {"path": str(tmp_path / "other")}, "sinks": {}}
    assert run(tmp_path, again, model, "full", **full)["items_carried"] == 0
    assert_same_parts(tmp_path, "second", "full")


def test_another_model_takes_nothing_over_and_fills_another_table(tmp_path: Path) -> None:
    texts = [{"id": f"t{n}", "text": f"word {n}"} for n in range(20)]
    lance = {"lancedb": {"uri": str(tmp_path / "lance"), "collection": "things"}}
    models = [save_sentence_folder(tmp_path / name, name) for name in ("bert", "qwen2")]
    [(old, _)] = run(tmp_path, texts, models[0], "first", sinks=lance)["points"].items()
    summary = run(tmp_path, texts, models[1], "second", incremental={"base": "first"}, sinks=lance)
    [(new, count)] = summary["points"].items()
    assert (summary["items_carried"], summary["texts_embedded"], count) == (0, 20, 20) and new != old


def test_quarantined_items_are_tried_again(tmp_path: Path, media: list[dict[str, Any]]) -> None:
    model = save_dual(tmp_path / "model", *FAMILIES["clip"]())
    image = Path(next(row["uri"] for row in media if row["id"].startswith("image")))
    saved = image.read_bytes()
    image.write_bytes(saved[:40])
    assert run(tmp_path, media, model, "first")["items_quarantined"] == 1
    image.write_bytes(saved)
    summary = run(tmp_path, media, model, "second", incremental={"base": "first"})
    assert (summary["items_carried"], summary["encodes"], summary["items_quarantined"]) == (19, 1, 0)


def test_a_base_that_is_not_there_is_refused_and_the_first_night_has_none(tmp_path: Path) -> None:
    model = save_sentence_folder(tmp_path / "model", "bert")
    with pytest.raises(ConfigError, match="not a run that has ended"):
        run(tmp_path, [{"id": "a", "text": "b"}], model, "one", incremental={"base": "nightly-0"})
    with pytest.raises(ConfigError, match="needs a run_id"):
        run(tmp_path, [{"id": "a", "text": "b"}], model, None, incremental={"base": "latest"})
    assert run(tmp_path, [{"id": "a", "text": "b"}], model, "two", incremental={"base": "latest"})["items_written"] == 1


@pytest.mark.slow
def test_of_ten_thousand_items_one_in_a_hundred_changes(tmp_path: Path) -> None:
    model = save_sentence_folder(tmp_path / "model", "bert")
    rng = random.Random(5)
    rows = [{"id": f"t{n}", "text": f"{n} " + " ".join(rng.choices(WORDS, k=4))} for n in range(10_000)]
    windows = {"first_window_items": 512, "window_items": 4096}
    assert run(tmp_path, rows, model, "first", ray=windows)["texts_embedded"] == 10_000
    for row in rng.sample(rows, 100):
        row["text"] += " water"
    summary = run(tmp_path, rows, model, "second", incremental={"base": "first"}, ray=windows)
    assert (summary["texts_embedded"], summary["items_carried"], summary["items_written"]) == (100, 9_900, 10_000)
    run(tmp_path, rows, model, "full", ray=windows)
    assert_same_parts(tmp_path, "second", "full")


def _minimal() -> dict[str, Any]:
    return {"job": "embed_backfill", "input": "x", "model": "y"}
