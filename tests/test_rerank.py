"""Reranking jobs, whole and without Ray: every score beside the cross-encoder's own, in its place."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import transformers as hf
from sentence_transformers import CrossEncoder

from pipeline.config import parse_config
from pipeline.errors import ConfigError
from tests.costs import assert_costs
from tests.foretold import run_as_foretold
from tests.models.text_folders import bert, save_plain
from tests.without_ray import run_without_ray


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(["the", "quick", "word", "query", "a", "b", "mill", "wheel"]) for _ in range(count))


def rank(folder: Path, rows: list[dict[str, Any]], model: Path, **changes: Any) -> tuple[dict[str, Any], pa.Table]:
    manifest = folder / "manifest.jsonl"
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))
    raw: dict[str, Any] = {
        "job": "rerank",
        "input": str(manifest),
        "output": str(folder / "output"),
        "model": str(model),
        "store": {"path": str(folder / "store")},
        "text": {"max_batch_items": 7, "max_batch_tokens": 300},
        "ray": {"first_window_items": 4, "window_items": 4},
    }
    summary = run_as_foretold(parse_config({**raw, **changes}))
    paths = sorted((folder / "output" / summary["run_id"]).glob("part-*.parquet"))
    return summary, pa.concat_tables(pq.read_table(path) for path in paths)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    run_without_ray(monkeypatch)
    return save_plain(tmp_path / "model", *bert(hf.BertForSequenceClassification, num_labels=1))


def test_every_score_is_the_cross_encoders_own_and_in_its_place(tmp_path: Path, model: Path) -> None:
    rng = random.Random(3)
    rows: list[dict[str, Any]] = [
        {"id": f"q{n}", "query": words(rng, 4), "documents": [words(rng, rng.randint(1, 40)) for _ in range(count)]}
        for n, count in enumerate([3, 40, 0, 1, 7, 2, 12])
    ]
    rows.insert(4, {"id": "no documents", "query": "the"})
    rows.insert(6, {"id": "too wide", "query": "the", "documents": ["a"] * 41})
    summary, table = rank(tmp_path, rows, model, rank={"max_documents": 40})
    theirs = CrossEncoder(str(model), device="cpu")
    for row, given in zip(table.to_pylist(), rows, strict=True):
        if given["id"] in ("no documents", "too wide"):
            continue
        pairs = [(given["query"], document) for document in given["documents"]]
        expected = np.asarray(theirs.predict(pairs)) if pairs else np.zeros(0, np.float32)
        np.testing.assert_allclose(row["scores"], expected, atol=2e-6)
        assert row["ranking"] == sorted(range(len(pairs)), key=lambda d: (-row["scores"][d], d))
    codes = {row["id"]: row["code"] for row in table.to_pylist() if row["code"]}
    assert codes == {"no documents": "not_a_request", "too wide": "too_many_documents"}
    assert summary["items_written"] == 7 and summary["items_quarantined"] == 2
    # An item with documents was answered after it was planned; one without has been planned alone. Each of a batch's
    # pairs has its share: 40 documents cost more than one.
    costs = dict(zip((row["id"] for row in rows), assert_costs(tmp_path / "output" / summary["run_id"]), strict=True))
    assert {id_ for id_, cost in costs.items() if cost["answer_seconds"] is None} == {"q2", "no documents", "too wide"}
    assert costs["q1"]["cpu_seconds"] > costs["q3"]["cpu_seconds"]


def test_a_request_above_the_limit_can_be_cut_to_it(tmp_path: Path, model: Path) -> None:
    rows = [{"id": "wide", "query": "the", "documents": ["a", "b", "the mill", "word"]}]
    _, table = rank(tmp_path, rows, model, rank={"max_documents": 2, "above": "truncate"})
    assert len(table["scores"][0]) == 2


def test_a_model_of_several_labels_is_refused(tmp_path: Path, model: Path) -> None:
    three = save_plain(tmp_path / "three", *bert(hf.BertForSequenceClassification, num_labels=3))
    with pytest.raises(ConfigError, match="ranked by one score"):
        rank(tmp_path, [{"id": "q", "query": "a", "documents": ["b"]}], three)
