"""What the Python API takes for a configuration, and the summary it finds by it; no Ray is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import pipeline
from pipeline.config import parse_config
from pipeline.errors import ConfigError


def finished_run(output: Path, run_id: str) -> None:
    """A run's summary, and the word that it was the last."""
    (output / run_id).mkdir(parents=True)
    (output / run_id / "summary.json").write_text(json.dumps({"run_id": run_id}))
    (output / "latest").write_text(f"{run_id}\n")


@pytest.mark.parametrize("form", ["mapping", "file", "config"])
def test_the_summary_of_the_named_run_or_of_the_last(tmp_path: Path, form: str) -> None:
    finished_run(tmp_path / "output", "tuesday")
    finished_run(tmp_path / "output", "wednesday")

    def summary(**more: str) -> dict[str, Any]:
        raw = {"job": "caption_videos", "model": "demo:captioner", "output": str(tmp_path / "output"), **more}
        file = tmp_path / "config.yaml"
        file.write_text(yaml.safe_dump(raw))
        return pipeline.summary({"mapping": raw, "file": file, "config": parse_config({**raw, "input": "x"})}[form])

    assert summary() == {"run_id": "wednesday"}
    assert summary(run_id="tuesday") == {"run_id": "tuesday"}
    with pytest.raises(ConfigError, match=r"has not ended, or there is none.*thursday/summary.json"):
        summary(run_id="thursday")
    with pytest.raises(ConfigError, match="prompts: unknown key; did you mean 'prompt'"):
        pipeline.summary({"job": "caption_videos", "model": "demo:captioner", "prompts": "Why?"})
