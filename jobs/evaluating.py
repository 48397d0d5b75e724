"""`headrace evaluate`: what a configuration's answers lose against answers in full detail, on labelled items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from pipeline import engine, flow
from pipeline.config import Config, parse_config, with_settings
from pipeline.errors import ConfigError
from pipeline.runs.evaluation import ClassResult, Label, evaluate, read_answers
from pipeline.runs.frozen_rows import FROZEN_SCHEMA, frozen_row
from pipeline.runs.manifest import read_range
from pipeline.runs.run import TEXTS, output_folder, stage_listing
from pipeline.runs.tables import write_manifest
from pipeline.storage import Folder

JOBS = ("caption_videos", "score_texts", "score_media")
_FOLDER = "_evaluate"  # under the output: no run has such a name
_ROWS = 4096
_SHOWN = 3
# What full detail is, in the words of --set. Resolution is the model's own in both.
_FULL_DETAIL = ("decode.resize=reference", "encode.dtype=float32", "generate.dtype=float32", "text.dtype=float32")
_ALL_FRAMES = "sampling.policy=model"  # of models that say which frames they want, as classifiers do not


def run_evaluation(config: Config, labels: Sequence[Label], changes: Sequence[str]) -> dict[str, Any]:
    """Run `config`, and a baseline, on the labelled items; returns what was found (`results` are `ClassResult`).

    The baseline is `config` in full detail, with `changes` (`key=value`) last. Both are runs of their own under
    `output/_evaluate`, on `config`'s store, so that the next evaluation finds what it can use again. Nothing goes to
    sinks. Raises `ConfigError` for a job without answers to compare, and labels of items that the input does not have.
    """
    if config.job not in JOBS:
        raise ConfigError(f"job {config.job!r} has no answers to hold against labels; these have: {', '.join(JOBS)}")
    config = config.anchored()
    root = output_folder(config).sub(_FOLDER)
    shipped = _on_labelled(config, root, _labelled_rows(config, root, labels))
    detail = (*_FULL_DETAIL, *([_ALL_FRAMES] if config.job == "caption_videos" else []), *changes)
    baseline = parse_config(with_settings(_without_timestamps(shipped), detail), "the baseline")
    with engine.ray_session(config.ray):  # one for both runs
        runs = [root.sub(flow.run(each)["run_id"]) for each in (baseline, shipped)]
    results = evaluate(labels, *map(read_answers, runs))
    return {"baseline": runs[0].url, "run": runs[1].url, "baseline_settings": list(detail), "results": results}


def failed_classes(results: Sequence[ClassResult], max_regression: float) -> list[ClassResult]:
    """Those whose accuracy fell by more than `max_regression`."""
    return [each for each in results if each.regression > max_regression + 1e-9]


def _labelled_rows(config: Config, root: Folder, labels: Sequence[Label]) -> str:
    """The labelled part of the listing, as a manifest of its own; returns its URL."""
    wanted = {label.id for label in labels}
    with stage_listing(config.model_copy(update={"limit": None, "sample_fraction": None})) as staged:
        folder, rows = Folder(staged.directory), []
        for start in range(0, staged.num_items, _ROWS):
            for request in read_range(folder, start, min(start + _ROWS, staged.num_items)):
                if request.id in wanted:
                    rows.append(frozen_row(request))
                    wanted.remove(request.id)
    if wanted:
        some = ", ".join(sorted(wanted)[:_SHOWN])
        raise ConfigError(f"{config.input}: {len(wanted)} of the labelled ids are not there, such as {some}")
    table = pa.Table.from_pylist(rows, FROZEN_SCHEMA).drop_columns("item_index")
    return write_manifest([table], root, TEXTS.get(config.job, ()))


def _on_labelled(config: Config, root: Folder, manifest: str) -> Config:
    return config.model_copy(
        update={
            "input": manifest,
            "output": root.url,
            "run_id": None,
            "limit": None,
            "sample_fraction": None,
            "demo_media": None,
            "sinks": type(config.sinks)(),
            "max_quarantined_fraction": 1.0,  # an item that is out has a wrong answer
        }
    )


def _without_timestamps(config: Config) -> dict[str, Any]:
    """The mapping of `config`; timestamps are refused beside any other policy."""
    raw = config.model_dump()
    if config.job == "caption_videos":
        raw["sampling"]["timestamps"] = ()
    return raw
