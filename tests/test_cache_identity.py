"""What moves the keys of features and what does not, through a whole dry run over a store that has them."""

from __future__ import annotations

import base64
import json
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from pipeline import flow
from pipeline.config import Config, load_config, parse_config
from pipeline.features import identity as features_identity
from pipeline.media import backend
from pipeline.models.location import resolve_model
from pipeline.stages import identity
from pipeline.stages.dry_run import dry_run
from tests.without_ray import run_without_ray

CONFIGS = Path(__file__).parent.parent / "configs"
BASE: dict[str, Any] = {
    "job": "caption_videos",
    "model": "demo:captioner",
    "prompt": "Describe what you see.",
    "sampling": {"policy": "fps", "fps": 2, "max_frames": 8},
    "generate": {"max_new_tokens": 2},
}
Change = Callable[[Path, dict[str, Any], pytest.MonkeyPatch], None]


@pytest.fixture(scope="module")
def kept(demo_media: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a JPEG, a PNG with transparency, a video, and a store that has the features of all three."""
    folder = tmp_path_factory.mktemp("kept")
    rows = [json.loads(line) for line in (demo_media / "manifest.jsonl").read_text().splitlines()]
    video = next(row["media"][0]["uri"] for row in rows if row["media"][0]["uri"].endswith(".mp4"))
    shutil.copy(demo_media / video, folder / "clip.mp4")
    picture = Image.effect_mandelbrot((900, 600), (-2, -1, 1, 1), 40).convert("RGB")
    picture.save(folder / "photo.jpg")
    picture.putalpha(Image.linear_gradient("L").resize(picture.size))
    picture.save(folder / "glass.png")
    with pytest.MonkeyPatch.context() as monkeypatch:
        run_without_ray(monkeypatch)
        assert flow.run(config(folder, folder, {}))["encodes"] == 3
    return folder


def config(kept: Path, folder: Path, changes: dict[str, Any]) -> Config:
    rows = changes.pop("rows", None) or [{"id": name, "media": [name]} for name in files(kept)]
    manifest = folder / "manifest.jsonl"
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))
    raw = {**BASE, "input": str(manifest), "output": str(folder / "output"), "store": {"path": str(kept / "store")}}
    for name, value in changes.items():
        raw[name] = {**raw.get(name, {}), **value} if isinstance(value, dict) else value
    return parse_config(raw)


def files(kept: Path) -> list[str]:
    return [str(kept / name) for name in ("photo.jpg", "glass.png", "clip.mp4")]


def encoded(kept: Path, folder: Path, change: Change) -> int:
    """How many of the three a run would encode after the change."""
    changes: dict[str, Any] = {"kept": kept}
    with pytest.MonkeyPatch.context() as monkeypatch:
        change(folder, changes, monkeypatch)
        del changes["kept"]
        forecast = dry_run(config(kept, folder, changes), "cpu", told=lambda _: None)
    assert not forecast.failures and forecast.planned_items == 3
    assert forecast.work.encodes + forecast.hits == 3
    return forecast.work.encodes


def settings(**changes: Any) -> Change:
    return lambda folder, found, monkeypatch: found.update(changes)


def rows(make: Callable[[Path, int, str], dict[str, Any]]) -> Change:
    """A manifest of the three, a row as `make` gives it of (folder, number, path)."""

    def change(folder: Path, found: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        found["rows"] = [make(folder, n, path) for n, path in enumerate(files(found["kept"]))]

    return change


def copied(folder: Path) -> Path:
    return Path(shutil.copytree(resolve_model("demo:captioner"), folder / "model"))


def model(edit: Callable[[Path], None]) -> Change:
    """A copy of the model, edited."""

    def change(folder: Path, found: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        path = copied(folder)
        edit(path)
        found["model"] = str(path)

    return change


def weights(wanted: Callable[[str], bool]) -> Callable[[Path], None]:
    """One weight of the first tensor whose name is wanted is another."""

    def edit(path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        name = next(name for name in sorted(tensors) if wanted(name) and tensors[name].ndim)
        tensors[name].view(-1)[0] += torch.tensor(0.5, dtype=tensors[name].dtype)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})

    return edit


def edited(name: str, **changes: Any) -> Callable[[Path], None]:
    """Entries of a JSON file of the model's, wherever they stand in it."""

    def put(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: changes.get(key, put(each)) for key, each in value.items()}
        return [put(each) for each in value] if isinstance(value, list) else value

    def edit(path: Path) -> None:
        before = json.loads((path / name).read_text())
        after = put(before)
        assert after != before
        (path / name).write_text(json.dumps(after))

    return edit


def patched(name: str, value: Any) -> Change:
    def change(folder: Path, found: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(identity, name, value)

    return change


def other_bytes(folder: Path, number: int, path: str) -> dict[str, Any]:
    """The same pictures and frames in files of one byte more, which decoders pass over."""
    copy = folder / f"{number}{Path(path).suffix}"
    copy.write_bytes(Path(path).read_bytes() + b"\0")
    return {"id": str(number), "media": [str(copy)]}


MOVES: dict[str, tuple[int, Change]] = {
    "tenant": (3, rows(lambda folder, n, path: {"id": str(n), "media": [path], "tenant": "acme"})),
    "content": (3, rows(other_bytes)),
    "sampling": (1, settings(sampling={"fps": 1})),
    "sampling, approximate": (1, settings(sampling={"policy": "keyframes", "num_frames": 4})),
    "decode_backend of images": (2, patched("IMAGE_BACKEND", "pillow-99")),
    "decode_backend of videos": (1, patched("DECODE_BACKEND", "pyav-99")),
    "decode_backend, background": (1, settings(decode={"background": "#000000"})),
    "decode_backend, truncated files": (2, settings(decode={"truncated": "keep"})),
    "decode_rules": (3, patched("DECODE_RULES", backend.DECODE_RULES + 1)),
    "resize_backend": (1, settings(decode={"resize": "fast"})),  # of the JPEG alone
    "processor": (3, model(edited("processor_config.json", image_mean=[0.4, 0.5, 0.5]))),
    "weights of the tower": (3, model(weights(lambda name: "visual" in name and "merger" not in name))),
    "weights of the projector": (3, model(weights(lambda name: "visual" in name and "merger" in name))),
    "precision": (3, settings(encode={"dtype": "bfloat16"})),
}


@pytest.mark.parametrize("name", MOVES)
def test_a_term_that_changes_moves_the_key(kept: Path, tmp_path: Path, name: str) -> None:
    expected, change = MOVES[name]
    assert encoded(kept, tmp_path, change) == expected


def moved(folder: Path, number: int, path: str) -> dict[str, Any]:
    copy = folder / f"renamed-{number}{Path(path).suffix}"
    shutil.copy(path, copy)
    return {"id": f"other {number}", "media": [str(copy)]}


def inline(folder: Path, number: int, path: str) -> dict[str, Any]:
    data = base64.b64encode(Path(path).read_bytes()).decode()
    return {"id": str(number), "media": [f"data:application/octet-stream;base64,{data}"]}


def member(folder: Path, number: int, path: str) -> dict[str, Any]:
    with tarfile.open(folder / f"{number}.tar", "w") as archive:
        archive.add(path, Path(path).name)
    return {"id": str(number), "media": [f"{folder}/{number}.tar#{Path(path).name}"]}


def touched(path: Path) -> None:
    for file in path.iterdir():
        os.utime(file, (1, 1))


def turned(folder: Path, found: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    found["rows"] = [{"id": path, "media": [path]} for path in reversed(files(found["kept"]))]


def rewritten(folder: Path, number: int, path: str) -> dict[str, Any]:
    os.utime(path, (number + 1, number + 1))
    return {"id": path, "media": [path]}


def versioned(folder: Path, number: int, path: str) -> dict[str, Any]:
    return {"id": str(number), "video" if path.endswith("mp4") else "image": path, "version": "2"}


STAYS: dict[str, Change] = {
    "nothing": settings(),
    "where a file lies, and its item's id": rows(moved),
    "inline bytes for a file": rows(inline),
    "a member of an archive for a file": rows(member),
    "when a file was written": rows(rewritten),
    "the order of the manifest": turned,
    "a version that the manifest says": rows(versioned),
    "the prompt": settings(prompt="What colour is it?"),
    "a prompt of its own": rows(lambda folder, n, path: {"id": str(n), "media": [path], "prompt": f"Number {n}?"}),
    "the system's words": settings(generate={"system": "Be short."}),
    "answers": settings(generate={"max_new_tokens": 9, "temperature": 0.7, "seed": 4}),
    "batches": settings(encode={"max_batch_items": 1, "max_batch_tokens": 64}, generate={"max_batch_items": 1}),
    "windows": settings(ray={"first_window_items": 1, "window_items": 1}),
    "the run's name": settings(run_id="another"),
    "the sandbox": settings(decode={"sandbox": "off"}),
    "limits": settings(budget="trusted_batch_job", max_quarantined_fraction=0.5),
    "kept frames": settings(store={"keep_frames": True}),
    "threads that read": settings(decode={"io_threads": 1}),
    "where the model lies": model(lambda path: None),
    "when the model was written": model(touched),
    "weights of the language model": model(weights(lambda name: "visual" not in name)),
    "the chat template": model(
        lambda path: (path / "chat_template.jinja").write_text("{# #}" + (path / "chat_template.jinja").read_text())
    ),
    "how answers are drawn": model(edited("generation_config.json", transformers_version="0")),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_changes_no_number_moves_no_key(kept: Path, tmp_path: Path, name: str) -> None:
    assert encoded(kept, tmp_path, STAYS[name]) == 0


def answers(found: Config, summary: dict[str, Any]) -> list[dict[str, Any]]:
    folder = Path(found.output) / summary["run_id"]
    tables = [pq.read_table(path) for path in sorted(folder.glob("part-*.parquet"))]
    return pa.concat_tables(tables).to_pylist()


def test_a_digest_that_collides_does_not_answer(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All keys are one: within a run, and of what an earlier one left in the store."""
    run_without_ray(monkeypatch)
    told_apart = config(kept, tmp_path, {"generate": {"max_new_tokens": 12}})
    truth = answers(told_apart, flow.run(told_apart))
    assert len({row["text"] for row in truth}) > 1
    monkeypatch.setattr(features_identity, "key_of", lambda terms: "0" * 40)
    found = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        changes = {"generate": {"max_new_tokens": 12}, "store": {"path": str(tmp_path / "one")}}
        collided = config(kept, tmp_path / name, changes)
        summary = flow.run(collided)
        assert answers(collided, summary) == truth
        found.append([summary[name] for name in ("encodes", "features_reused", "fallbacks")])
    assert found == [[3, 0, 0], [2, 1, 2]]  # of three records with one key, the catalogue has one


@pytest.mark.slow
@pytest.mark.parametrize("name", ["caption", "embed"])
def test_with_the_store_as_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """520 items: of answers each word, of vectors each bit."""
    run_without_ray(monkeypatch)
    drawn = ["demo_media.images=320", "demo_media.videos=200", f"input={tmp_path}/in/manifest.jsonl", "sinks={}"]

    def run(folder: str, *settings: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        store, output = f"store.path={tmp_path}/{folder}", f"output={tmp_path}/output-{folder}"
        configured = load_config(str(CONFIGS / f"demo_{name}.yaml"), [*drawn, store, output, *settings])
        summary = flow.run(configured)
        return summary, answers(configured, summary)

    again = ["prompt=What moves?"] if name == "caption" else ["run_id=again"]
    run("kept")
    with_store, reused = run("kept", *again)
    without, made = run("made", "store.reuse=false", *again)
    assert with_store["encodes"] == 0 and without["encodes"] >= 500
    assert len(reused) >= 520 and reused == made


@pytest.mark.parametrize("condition", ["missing", "damaged", "sound"])
def test_shards_that_fail_are_named_and_what_they_had_is_encoded_again(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, condition: str
) -> None:
    run_without_ray(monkeypatch)
    own = {"path": str(tmp_path / "own")}
    truth = config(kept, tmp_path, {"store": own})
    rows = answers(truth, flow.run(truth))
    [shard] = (tmp_path / "own" / "shards").iterdir()
    data = bytearray(shard.read_bytes())
    shard.unlink()  # what is mapped keeps its bytes
    if condition == "damaged":
        shard.write_bytes(data[: len(data) // 2])
    if condition == "sound":  # but for the last byte of each record's numbers
        for at in (at for at in range(len(data)) if data.startswith(b'{"__metadata__"', at)):
            data[at + 2000] ^= 1
        shard.write_bytes(data)
    again = config(kept, tmp_path, {"store": own, "run_id": "again"})
    summary = flow.run(again)
    assert summary["fallback_shards"] == {f"{shard.stem} ({condition})": 3}
    assert (summary["fallbacks"], summary["encodes"]) == (3, 3)
    assert answers(again, summary) == rows
