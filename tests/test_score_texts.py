"""Scoring jobs, whole and without Ray: every score beside transformers' own pipeline or logits, in its place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers as hf

from pipeline import flow
from pipeline.config import Config, parse_config
from tests.costs import assert_costs
from tests.foretold import run_as_foretold
from tests.models.text_folders import TEXTS, bert, byte_pairs, change_json, qwen2, save_plain
from tests.without_ray import run_without_ray

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "[{{ m['role'] }}] {{ m['content'] }}<|im_end|>{% endfor %}"
)


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    run_without_ray(monkeypatch)


def score(
    folder: Path, rows: list[dict[str, Any]], model: Path, run: Callable[[Config], Any] = flow.run, **changes: Any
) -> tuple[dict[str, Any], pa.Table]:
    manifest = folder / "manifest.jsonl"
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))
    raw: dict[str, Any] = {
        "job": "score_texts",
        "input": str(manifest),
        "output": str(folder / "output"),
        "model": str(model),
        "store": {"path": str(folder / "store")},
        "text": {"max_batch_items": 3, "max_batch_tokens": 100},
        "ray": {"first_window_items": 4, "window_items": 4},
    }
    summary = run(parse_config({**raw, **changes}))
    paths = sorted((folder / "output" / summary["run_id"]).glob("part-*.parquet"))
    return summary, pa.concat_tables(pq.read_table(path) for path in paths)


def texts(*more: dict[str, Any]) -> list[dict[str, Any]]:
    return [*({"id": f"t{n}", "text": text} for n, text in enumerate(TEXTS)), *more]


@pytest.mark.parametrize(
    ("num_labels", "options"),
    [(3, {}), (1, {}), (3, {"problem_type": "multi_label_classification"}), (1, {"problem_type": "regression"})],
)
def test_a_classifiers_scores_are_those_of_transformers_pipeline(
    num_labels: int, options: dict[str, Any], tmp_path: Path
) -> None:
    names = {n: f"kind {n}" for n in range(num_labels)}
    model = save_plain(
        tmp_path / "model", *bert(hf.BertForSequenceClassification, num_labels=num_labels, id2label=names, **options)
    )
    summary, table = score(tmp_path, texts(), model, run_as_foretold)
    theirs = hf.pipeline("text-classification", model=str(model), device="cpu", top_k=None, truncation=True)
    for row, found in zip(table.to_pylist(), theirs(list(TEXTS)), strict=True):
        expected = {each["label"]: each["score"] for each in found}
        np.testing.assert_allclose(row["scores"], [expected[name] for name in names.values()], atol=2e-5)
        assert row["label"] == (found[0]["label"] if num_labels > 1 else None)
        assert row["tokens"] is None and row["status"] == "ok"
    assert summary["texts_scored"] == summary["items_written"] == len(TEXTS)
    assert_costs(tmp_path / "output" / summary["run_id"])
    described = json.loads(table.schema.metadata[b"headrace.scores"])
    assert described["labels"] == list(names.values())
    assert described["contract"]["truncation"] == {"side": "right", "max_tokens": 64}


def test_every_token_has_the_scores_of_transformers_pipeline_and_its_place(tmp_path: Path) -> None:
    model = save_plain(tmp_path / "model", *bert(hf.BertForTokenClassification, num_labels=3))
    _, table = score(tmp_path, texts(), model, score={"per_token": True})
    theirs = hf.pipeline(
        "token-classification", model=str(model), device="cpu", aggregation_strategy="none", ignore_labels=[]
    )
    for row, text in zip(table.to_pylist(), TEXTS, strict=True):
        inside = [token for token in row["tokens"] if token["start_char"] is not None]
        assert len(row["tokens"]) == len(inside) + 2  # [CLS] and [SEP] are scored, and have no place in the text
        found = theirs(text)[: len(inside)]  # which is cut where the model ends
        assert [(t["start_char"], t["end_char"]) for t in inside] == [(f["start"], f["end"]) for f in found]
        np.testing.assert_allclose([max(t["scores"]) for t in inside], [f["score"] for f in found], atol=2e-5)
        assert row["scores"] is None and row["label"] is None


def test_a_reward_models_chats_are_scored_whole_or_not_at_all(tmp_path: Path) -> None:
    tokenizer = byte_pairs()
    tokenizer.chat_template = TEMPLATE
    network, _ = qwen2(hf.Qwen2ForSequenceClassification, num_labels=1)
    model = save_plain(tmp_path / "model", network, tokenizer)
    chats = [
        [{"role": "user", "content": text}, {"role": "assistant", "content": [{"type": "text", "text": "b c"}]}]
        for text in ("a", "the mill", "x y z")
    ]
    rows: list[dict[str, Any]] = [{"id": f"c{n}", "messages": chat} for n, chat in enumerate(chats)]
    rows += [
        {"id": "long", "messages": [{"role": "user", "content": "word " * 60}]},
        {"id": "tool", "messages": [{"role": "tool", "content": "b"}]},
        {"id": "picture", "messages": [{"role": "user", "content": [{"type": "image"}]}]},
        {"id": "both", "text": "a", "messages": chats[0]},
        {"id": "neither"},
        {"id": "blank", "text": " \n"},
    ]
    summary, table = score(tmp_path, rows, model, score={"activation": "none"})
    for chat, row in zip(chats, table.to_pylist(), strict=False):
        rendered = f"[user] {chat[0]['content']}<|im_end|>[assistant] b c<|im_end|>"
        ids = tokenizer(rendered, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            assert network(ids).logits.item() == pytest.approx(row["scores"][0], abs=2e-5)
    codes = {row["id"]: row["code"] for row in table.to_pylist() if row["code"]}
    assert codes == {
        "long": "chat_too_long",
        "tool": "chat_refused",
        "picture": "modality_not_supported",
        "both": "not_one_text",
        "neither": "not_one_text",
        "blank": "empty_text",
    }
    assert summary["items_written"] == 3 and summary["items_quarantined"] == 6


def test_a_process_reward_model_scores_every_token_of_a_chat(tmp_path: Path) -> None:
    tokenizer = byte_pairs()
    tokenizer.chat_template = TEMPLATE
    network, _ = qwen2(hf.Qwen2ForTokenClassification, num_labels=2)
    model = save_plain(tmp_path / "model", network, tokenizer)
    rows = [{"id": "c", "messages": [{"role": "user", "content": "a mill"}]}]
    _, table = score(tmp_path, rows, model, score={"per_token": True, "activation": "softmax"})
    ids = tokenizer("[user] a mill<|im_end|>", add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        expected = network(ids).logits[0].softmax(-1).numpy()
    tokens = table["tokens"][0].as_py()
    assert [token["token_id"] for token in tokens] == ids[0].tolist()
    assert {token["start_char"] for token in tokens} == {None}
    np.testing.assert_allclose([token["scores"] for token in tokens], expected, atol=2e-5)


def test_scores_that_are_not_numbers_are_named(tmp_path: Path) -> None:
    network, tokenizer = bert(hf.BertForSequenceClassification, num_labels=2)
    with torch.no_grad():
        network.bert.embeddings.word_embeddings.weight[tokenizer.vocab["query"]] = torch.nan
    model = save_plain(tmp_path / "model", network, tokenizer)
    change_json(model / "config.json", problem_type="regression")
    _, table = score(tmp_path, [{"id": "bad", "text": "query"}, {"id": "good", "text": "the"}], model)
    assert table["code"].to_pylist() == ["score_not_a_number", None]
    assert table["scores"][0].as_py() is None and len(table["scores"][1]) == 2
