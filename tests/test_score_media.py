"""Scoring of media, whole and without Ray: every score beside transformers' own pipeline, a video's by arithmetic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import transformers as hf
from PIL import Image

from pipeline import flow
from pipeline.config import Config, parse_config
from pipeline.errors import ConfigError
from pipeline.media.decode import decode_media
from pipeline.media.probe import probe_media
from pipeline.media.sampling import sample_plan
from tests.costs import assert_costs
from tests.foretold import run_as_foretold
from tests.media.pdf_files import Page, make_pdf
from tests.models.classifier_folders import CLASSIFIERS, save_classifier, vit
from tests.without_ray import run_without_ray


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    run_without_ray(monkeypatch)


def configured(folder: Path, rows: list[dict[str, Any]], model: Path, **changes: Any) -> Config:
    manifest = folder / "manifest.jsonl"
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))
    raw: dict[str, Any] = {
        "job": "score_media",
        "input": str(manifest),
        "output": str(folder / "output"),
        "model": str(model),
        "sampling": {"fps": 2, "max_frames": 8},
        "encode": {"max_batch_items": 5},
        "store": {"path": str(folder / "store")},
        "ray": {"first_window_items": 8, "window_items": 8},
    }
    return parse_config({**raw, **changes})


def parts(config: Config, summary: dict[str, Any]) -> pa.Table:
    folder = Path(config.output) / summary["run_id"]
    return pa.concat_tables(pq.read_table(path) for path in sorted(folder.glob("part-*.parquet")))


def run(folder: Path, rows: list[dict[str, Any]], model: Path, **changes: Any) -> tuple[dict[str, Any], pa.Table]:
    config = configured(folder, rows, model, **changes)
    summary = flow.run(config)
    return summary, parts(config, summary)


def drawn(demo_media: Path) -> list[dict[str, Any]]:
    """The demo's images and clips."""
    media = [json.loads(line) for line in (demo_media / "manifest.jsonl").read_text().splitlines()]
    return [{"id": row["id"], "media": [str(demo_media / row["media"][0]["uri"])]} for row in media]


def images_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if Path(row["media"][0]).suffix in (".jpg", ".png", ".webp")]


class Theirs:
    """transformers' pipeline."""

    def __init__(self, model: Path) -> None:
        self.classify = hf.pipeline("image-classification", model=str(model), device="cpu")
        self.labels = list(self.classify.model.config.id2label.values())

    def scores(self, picture: Any, applied: str | None = None) -> np.ndarray:
        found = self.classify(picture, top_k=len(self.labels), function_to_apply=applied)
        by_label = {each["label"]: each["score"] for each in found}
        return np.array([by_label[label] for label in self.labels], np.float32)

    def frames(self, path: Path, config: Config) -> tuple[list[float], np.ndarray]:
        """The times of a clip's frames, and the logits of each."""
        with path.open("rb") as file:
            probe = probe_media(file, num_bytes=path.stat().st_size, declared="video", name=path.name)
            frames = decode_media(file, probe, sample_plan(probe, config.sampling), None)
        return list(frames.pts_seconds), np.stack([self.scores(frame, "none") for frame in frames.pixels])


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("vit", {}),
        ("vit", {"num_labels": 4, "problem_type": "multi_label_classification"}),
        ("vit", {"num_labels": 1, "problem_type": "regression"}),
        ("convnext", {}),
        ("clip", {}),
        ("siglip2", {}),
    ],
)
def test_scores_of_images_are_those_of_transformers_pipeline(
    family: str, options: dict[str, Any], tmp_path: Path, demo_media: Path
) -> None:
    model = save_classifier(tmp_path / "model", *CLASSIFIERS[family](**options))
    rows, theirs = images_of(drawn(demo_media)), Theirs(model)
    config = configured(tmp_path, rows, model)
    summary = run_as_foretold(config)
    table = parts(config, summary)
    assert table["id"].to_pylist() == [row["id"] for row in rows]
    for row, found in zip(rows, table.to_pylist(), strict=True):
        expected = theirs.scores(row["media"][0])
        np.testing.assert_allclose(found["scores"], expected, atol=2e-6)
        assert found["status"] == "ok" and found["frames"] is None
        assert found["label"] == (theirs.labels[int(expected.argmax())] if len(expected) > 1 else None)
    assert np.std(table["scores"].to_pylist(), axis=0).max() > 1e-3
    described = json.loads(table.schema.metadata[b"headrace.scores"])
    assert (described["model"], described["labels"]) == (str(model), theirs.labels)
    assert described["contract"]["output"] == {"shape": "scores", "dimensions": None}
    assert summary["items_written"] == summary["encodes"] == summary["images_decoded"] == len(rows)
    assert_costs(Path(config.output) / summary["run_id"])


@pytest.mark.parametrize("rule", ["mean", "max"])
def test_a_clips_scores_are_of_its_frames(rule: str, tmp_path: Path, demo_media: Path) -> None:
    model = save_classifier(tmp_path / "model", *vit())
    rows, theirs = drawn(demo_media), Theirs(model)
    clips = [row for row in rows if row not in images_of(rows)]
    config = configured(tmp_path, clips, model, score={"video": rule, "per_frame": True})
    summary = flow.run(config)
    for row, found in zip(clips, parts(config, summary).to_pylist(), strict=True):
        times, logits = theirs.frames(Path(row["media"][0]), config)
        powers = np.exp(logits.astype(float))
        each = powers / powers.sum(axis=1, keepdims=True)
        of_mean = np.exp(logits.astype(float).mean(axis=0))
        expected = of_mean / of_mean.sum() if rule == "mean" else each.max(axis=0)
        np.testing.assert_allclose(found["scores"], expected, atol=2e-6)
        assert found["label"] == theirs.labels[int(expected.argmax())]
        assert len(times) > 1 and [frame["pts_seconds"] for frame in found["frames"]] == times
        np.testing.assert_allclose([frame["scores"] for frame in found["frames"]], each, atol=2e-6)
    assert summary["frames_decoded"] > summary["encodes"] == len(clips)


def test_bad_items_are_named_and_all_others_scored(tmp_path: Path, demo_media: Path) -> None:
    model = save_classifier(tmp_path / "model", *vit())
    good = drawn(demo_media)[:3]
    (tmp_path / "bad.png").write_bytes(b"\x89PNG\r\n\x1a\n nothing")
    Image.new("RGB", (40, 30)).save(tmp_path / "whole.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole.png").read_bytes()[:-30])
    (tmp_path / "pages.pdf").write_bytes(make_pdf([Page(content="0 0 1 rg 0 0 300 792 re f")]))
    page = {"uri": str(tmp_path / "pages.pdf"), "modality": "page", "page": 0}
    rows = [
        good[0],
        {"id": "bad", "media": [str(tmp_path / "bad.png")]},
        {"id": "cut", "media": [str(tmp_path / "cut.png")]},
        {"id": "missing", "media": [str(tmp_path / "nowhere.jpg")]},
        {"id": "none"},
        {"id": "two", "media": [*good[0]["media"], *good[1]["media"]]},
        {"id": "page", "media": [page]},
        *good[1:],
    ]
    summary, table = run(tmp_path, rows, model)
    codes = {row["id"]: row["code"] for row in table.to_pylist()}
    assert codes == {
        **dict.fromkeys([row["id"] for row in good] + ["page"]),
        "bad": "corrupt_header",
        "cut": "truncated",
        "missing": "not_found",
        "none": "not_one_media",
        "two": "not_one_media",
    }
    for row in table.to_pylist():
        assert row["status"] == ("quarantined" if row["code"] else "ok")
        assert (row["scores"] is None) == (row["code"] is not None) and bool(row["message"]) == bool(row["code"])
    assert (summary["items_written"], summary["items_quarantined"], summary["pages_decoded"]) == (4, 5, 1)
    folder = tmp_path / "output" / summary["run_id"]
    letters = pa.concat_tables(pq.read_table(path) for path in folder.glob("quarantine/part-*.parquet")).to_pylist()
    assert {letter["id"]: letter["stage"] for letter in letters} == {
        "bad": "probe",
        "cut": "decode",
        "missing": "fetch",
        "none": "score",
        "two": "score",
    }
    timings = pa.concat_tables(pq.read_table(path) for path in folder.glob("timings/part-*.parquet"))
    assert sum(ms is not None for ms in timings["vision_encode_ms"].to_pylist()) >= 4


def test_another_activation_or_rule_encodes_nothing(tmp_path: Path, demo_media: Path) -> None:
    model = save_classifier(tmp_path / "model", *vit())
    rows = drawn(demo_media)
    runs = [
        run(tmp_path, rows, model, score=score)
        for score in ({"activation": "none"}, {"activation": "sigmoid", "video": "max"}, {"activation": "none"})
    ]
    assert len({summary["run_id"] for summary, _ in runs}) == 2  # the third is the first, which has ended
    assert [summary["encodes"] for summary, _ in runs] == [len(rows), 0, len(rows)]
    again = runs[1][0]
    assert again["fetches"] == again["images_decoded"] == again["frames_decoded"] == again["fallbacks"] == 0
    assert again["items_reused"] == again["items_written"] == len(rows)
    digests = [json.loads(table.schema.metadata[b"headrace.scores"])["digest"] for _, table in runs]
    assert digests[0] == digests[2] != digests[1]
    for row, (plain, applied) in zip(
        rows, zip(*(t["scores"].to_pylist() for _, t in runs[:2]), strict=True), strict=True
    ):
        if row in images_of(rows):
            np.testing.assert_allclose(applied, 1 / (1 + np.exp(-np.array(plain))), atol=1e-6)


def test_scores_are_the_same_in_any_batches(tmp_path: Path, demo_media: Path) -> None:
    model, rows = save_classifier(tmp_path / "model", *CLASSIFIERS["siglip2"]()), drawn(demo_media)
    alone, together = (
        run(tmp_path, rows, model, encode={"max_batch_items": size}, store={"path": str(tmp_path / f"store{size}")})[1]
        for size in (1, 16)
    )
    a, b = (np.array(table["scores"].to_pylist()) for table in (alone, together))
    np.testing.assert_allclose(a, b, atol=2e-6)
    assert alone["label"].equals(together["label"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"score": {"per_token": True}}, "score.per_token is for texts, of the job score_texts, not for score_media"),
        ({"job": "score_texts", "score": {"per_frame": True}}, "score.per_frame is for videos, of the job score_media"),
        ({"pooling": {"method": "mean"}}, "there is no pooling that can be given"),
    ],
)
def test_settings_that_mean_nothing_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = save_classifier(tmp_path / "model", *vit())
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, [{"id": "a", "media": ["/nowhere.png"]}], model, **changes)


def test_a_store_that_is_scratch_is_left_empty(tmp_path: Path, demo_media: Path) -> None:
    model, rows = save_classifier(tmp_path / "model", *vit()), drawn(demo_media)
    store = {"path": str(tmp_path / "scratch"), "retention": "segment", "max_bytes": 400_000}
    summary, table = run(tmp_path, rows, model, store=store, run_id="scratch")
    assert summary["encodes"] == len(rows) and summary["store_peak_bytes"] <= 400_000
    assert not list((tmp_path / "scratch").rglob("*.mdb"))
    assert table.equals(run(tmp_path, rows, model, run_id="kept")[1])
