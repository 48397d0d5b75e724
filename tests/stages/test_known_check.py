"""What was found of a checkpoint is found again, as it was, until something changes that it hangs on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import Config, parse_config
from pipeline.schema import ImageRules
from pipeline.stages.checked_model import checked_model
from pipeline.stages.known_check import known_check
from tests.models.dual_folders import FAMILIES, save_dual
from tests.models.text_folders import save_sentence_folder


def configured(folder: Path, model: Path | str, job: str = "embed_backfill", **changes: Any) -> Config:
    raw = {"job": job, "input": "x", "model": str(model), "store": {"path": str(folder / "store")}}
    return parse_config({**raw, **changes})


@pytest.mark.parametrize("kind", ["clip", "siglip2", "text", "demo"])
def test_it_is_found_as_it_was(tmp_path: Path, kind: str) -> None:
    if kind == "demo":
        config = configured(tmp_path, "demo:captioner", "caption_videos")
    elif kind == "text":
        config = configured(tmp_path, save_sentence_folder(tmp_path / "model", "bert"))
    else:
        config = configured(tmp_path, save_dual(tmp_path / "model", *FAMILIES[kind]()))
    assert known_check(config, "cpu") is None
    checked = checked_model(config, "cpu")
    assert known_check(config, "cpu") == checked
    assert known_check(config, "cuda") is None


def test_changes_make_it_unknown(tmp_path: Path) -> None:
    model = save_dual(tmp_path / "model", *FAMILIES["clip"]())
    checked_model(configured(tmp_path, model), "cpu")
    assert known_check(configured(tmp_path, model, pooling={"output": {"dimensions": 8}}), "cpu") is None
    assert known_check(configured(tmp_path, model, encode={"dtype": "bfloat16"}), "cpu") is None
    assert known_check(configured(tmp_path, model, decode={"background": "#000000"}), "cpu") is None
    assert known_check(configured(tmp_path, model, decode={"truncated": "keep"}), "cpu") is None
    assert known_check(configured(tmp_path, model, sampling={"fps": 9}), "cpu") is not None
    os.utime(model / "model.safetensors", ns=(1, 1))
    assert known_check(configured(tmp_path, model), "cpu") is None


@pytest.mark.parametrize("kind", ["clip", "demo"])
def test_the_rules_of_images_are_those_of_the_configuration(tmp_path: Path, kind: str) -> None:
    model = "demo:captioner" if kind == "demo" else save_dual(tmp_path / "model", *FAMILIES[kind]())
    job = "caption_videos" if kind == "demo" else "embed_backfill"
    config = configured(tmp_path, model, job, decode={"background": "#0a0b0c", "truncated": "keep"})
    rules = checked_model(config, "cpu").identity.image
    assert rules == ImageRules(background="#0a0b0c", keep_truncated=True)
    assert rules.background_rgb == (10, 11, 12)


def test_what_another_version_kept_is_not_believed(tmp_path: Path) -> None:
    config = configured(tmp_path, save_sentence_folder(tmp_path / "model", "bert"))
    checked_model(config, "cpu")
    [kept] = (tmp_path / "store" / "models").glob("check-*.json")
    kept.write_text('{"kind": "text"}')
    assert known_check(config, "cpu") is None
