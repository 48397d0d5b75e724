"""Frames that are kept spare another model all fetching and decoding, and change nothing of what it says."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.features.identity import FeatureKeyTerms
from pipeline.media import backend
from pipeline.models.location import resolve_model
from pipeline.planning.windows import Window
from pipeline.schema import Geometry, ImageRules, MediaItem, Probe, SamplePlan
from pipeline.stages import encode, identity
from pipeline.stages.encode import EncodeBatches
from pipeline.stages.encode_finish import read_encoded
from pipeline.stages.identity import EncoderIdentity
from pipeline.stages.rows import PlannedMedia
from pipeline.stages.window_plan import load_plan, plan_name
from tests.media.media_files import long_video
from tests.stages import line
from tests.stages.line import Line

KEPT = {"keep_frames": True}
NOTHING = ("fetches", "bytes_fetched", "images_decoded", "frames_decoded", "frames_missed", "frames_fallbacks")
BY_RANGE = {"max_whole_bytes": 300_000, "max_inline_bytes": 1_000}
SAMPLING = {"policy": "uniform", "num_frames": 4}


@pytest.fixture(scope="module")
def upgraded(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The demo's captioner after a little more training: its tower's weights have moved."""
    folder = tmp_path_factory.mktemp("models") / "upgraded"
    shutil.copytree(resolve_model("demo:captioner"), folder)
    weights = load_file(folder / "model.safetensors")
    torch.manual_seed(5)
    for name, weight in weights.items():
        if ".visual." in name:
            weights[name] = weight + 0.01 * weight.float().std().nan_to_num() * torch.randn(weight.shape).to(weight)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def features(line: Line) -> list[dict[str, Any]]:
    """Every item's record, in order: dtype, shape and bytes of its tensors, and all else that it says."""
    rows = read_encoded(line.context, Window(index=0, start=0, stop=len(line.rows))).to_pylist()
    records = line.context.store.fetch([(row["shard"], row["key"]) for row in rows])
    found = []
    for record in records:
        assert record is not None
        tensors = {n: (t.dtype, t.shape, bytes(t.data)) for n, t in (record.tensors | record.inputs).items()}
        found.append({"tensors": tensors, "terms": record.key_terms, "geometry": record.geometry})
    return found


def test_another_model_fetches_and_decodes_nothing(
    demo_media: Path, make_config: Callable[..., Config], tmp_path: Path, upgraded: str
) -> None:
    manifest = demo_media / "manifest.jsonl"
    first = Line(make_config(manifest, run_id="first", store=KEPT))
    assert (first.count("frames_missed"), first.count("frames_reused"), first.count("images_decoded")) == (20, 0, 12)
    written = first.count("frames_bytes_written")
    assert 0 < written < 3 * sum(np.prod(m.geometry.shown_size) * len(m.requested) for m in media(first))
    apart = {"path": str(tmp_path / "apart")}
    plain = Line(make_config(manifest, run_id="plain", store=apart))
    assert first.rows == plain.rows and features(first) == features(plain)
    assert not [name for name in ("frames_missed", "frames_bytes_written", "frames_reused") if plain.count(name)]
    assert not (tmp_path / "apart" / "frames").exists()

    second = Line(make_config(manifest, run_id="second", model=upgraded, store=KEPT))
    assert {name: second.count(name) for name in NOTHING} == dict.fromkeys(NOTHING, 0)
    assert (second.count("encodes"), second.count("features_reused"), second.count("frames_reused")) == (20, 0, 20)
    assert (second.count("frames_bytes_read"), second.count("frames_bytes_written")) == (written, 0)
    assert not any(name.startswith("sandbox:") for receipt in second.receipts for name in receipt.counts)
    scratch = Line(make_config(manifest, run_id="scratch", model=upgraded, store=apart))
    assert scratch.count("images_decoded") == 12
    assert second.rows == scratch.rows and features(second) == features(scratch)
    assert features(second) != features(first)


def media(line: Line) -> list[PlannedMedia]:
    """All media of the first window's plan."""
    plan = load_plan(line.context, Window(index=0, start=0, stop=len(line.rows)))
    assert plan is not None
    return plan.media


def some_media(folder: Path, write_manifest: Callable[..., Path], **row: Any) -> Path:
    """Two images and two clips of the demo's."""
    rows = [json.loads(line) for line in (folder / "manifest.jsonl").read_text().splitlines()]
    chosen = [*rows[:2], *rows[-2:]]
    entries = [{"id": each["id"], "uri": str(folder / each["media"][0]["uri"]), **row} for each in chosen]
    return write_manifest(entries)


def test_a_prompt_alone_needs_no_frames(
    demo_media: Path, make_config: Callable[..., Config], write_manifest: Callable[..., Path]
) -> None:
    manifest = some_media(demo_media, write_manifest)
    Line(make_config(manifest, store=KEPT))
    second = Line(make_config(manifest, prompt="Which shape is it?", store=KEPT))
    assert (second.count("features_reused"), second.count("frames_reused"), second.count("encodes")) == (4, 0, 0)


def test_other_times_or_sizes_are_decoded(
    demo_media: Path, make_config: Callable[..., Config], write_manifest: Callable[..., Path]
) -> None:
    manifest = some_media(demo_media, write_manifest)
    Line(make_config(manifest, run_id="first", store=KEPT))
    half = Line(make_config(manifest, run_id="half", store=KEPT, sampling={"fps": 1}, encode={"dtype": "bfloat16"}))
    assert (half.count("frames_reused"), half.count("frames_missed")) == (2, 2)  # the clips' times are others
    fast = {"decode": {"resize": "fast"}, "encode": {"dtype": "float16"}}
    other = Line(make_config(manifest, run_id="fast", store=KEPT, **fast))
    jpegs = sum(m.probe.container == "jpeg" for m in media(other))
    assert jpegs > 0
    assert (other.count("frames_missed"), other.count("frames_reused")) == (jpegs, 4 - jpegs)


def test_tenants_are_apart(
    demo_media: Path, make_config: Callable[..., Config], write_manifest: Callable[..., Path]
) -> None:
    bfloat16 = {"encode": {"dtype": "bfloat16"}}
    Line(make_config(some_media(demo_media, write_manifest, tenant="a"), run_id="a", store=KEPT))
    other = Line(make_config(some_media(demo_media, write_manifest, tenant="b"), run_id="b", store=KEPT))
    assert (other.count("frames_reused"), other.count("frames_missed")) == (0, 4)
    again = Line(make_config(some_media(demo_media, write_manifest, tenant="b"), run_id="c", store=KEPT, **bfloat16))
    assert (again.count("frames_reused"), again.count("frames_missed")) == (4, 0)


def test_media_at_another_place_are_fetched_and_not_decoded(
    demo_media: Path, make_config: Callable[..., Config], write_manifest: Callable[..., Path], tmp_path: Path
) -> None:
    """Too large to be read by the probe, so that what they are is only known when they have been fetched."""
    large = {"decode": {"max_inline_bytes": 1}, "encode": {"dtype": "bfloat16"}}
    first = Line(make_config(some_media(demo_media, write_manifest), run_id="first", store=KEPT))
    shutil.copytree(demo_media, tmp_path / "moved")
    moved = some_media(tmp_path / "moved", write_manifest)
    second = Line(make_config(moved, run_id="moved", store=KEPT, **large))
    assert second.count("fetches") > 0
    assert (second.count("frames_reused"), second.count("frames_missed"), second.count("images_decoded")) == (4, 0, 0)
    plain = Line(make_config(moved, run_id="plain", store={"path": str(tmp_path / "apart")}, **large))
    assert features(second) == features(plain)
    assert [row["status"] for row in first.rows] == ["ok"] * 4


def test_videos_that_are_read_by_range_are_not_read_again(
    make_config: Callable[..., Config], write_manifest: Callable[..., Path], tmp_path: Path
) -> None:
    path = tmp_path / "long.mp4"
    path.write_bytes(long_video(num_groups=40))
    manifest = write_manifest([{"id": "a", "video": str(path)}])
    ranged = {"sampling": SAMPLING, "decode": BY_RANGE}
    first = Line(make_config(manifest, run_id="first", store=KEPT, **ranged))
    assert first.count("frames_decoded") == 4
    second = Line(make_config(manifest, run_id="second", store=KEPT, encode={"dtype": "bfloat16"}, **ranged))
    assert {name: second.count(name) for name in NOTHING} == dict.fromkeys(NOTHING, 0)
    assert second.count("frames_reused") == 1


@pytest.mark.slow
def test_a_machine_that_has_none_brings_them(
    demo_media: Path, make_config: Callable[..., Config], write_manifest: Callable[..., Path], tmp_path: Path
) -> None:
    manifest, local = some_media(demo_media, write_manifest), tmp_path / "local"
    remote = {"path": f"memory://{uuid.uuid4().hex}", "local_path": str(local), **KEPT}
    Line(make_config(manifest, run_id="first", store=remote))
    shutil.rmtree(local)
    second = Line(make_config(manifest, run_id="second", store=remote, encode={"dtype": "bfloat16"}))
    assert {name: second.count(name) for name in NOTHING} == dict.fromkeys(NOTHING, 0)
    assert second.count("frames_reused") == 4
    [shard] = second.context.store.frames.folder.list("shards")
    assert [path.name for path in local.rglob(shard)] == [shard]


@pytest.mark.parametrize("damage", ["bytes", pytest.param("file", marks=pytest.mark.slow), "terms"])
def test_what_cannot_be_read_is_decoded_again_and_counted(
    demo_media: Path,
    make_config: Callable[..., Config],
    write_manifest: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: str,
) -> None:
    manifest, bfloat16 = some_media(demo_media, write_manifest), {"encode": {"dtype": "bfloat16"}}
    first = Line(make_config(manifest, run_id="first", store=KEPT))
    [shard] = (tmp_path / "store" / "frames" / "shards").glob("*.lmdb")
    if damage == "bytes":
        data = shard.read_bytes()
        for pixels in kept_pixels(first, shard.stem)[:3]:
            assert pixels in data
            data = data.replace(pixels, pixels[:40] + bytes([pixels[40] ^ 1]) + pixels[41:])
        (tmp_path / "damaged").write_bytes(data)
        os.replace(tmp_path / "damaged", shard)
    elif damage == "file":
        shard.unlink()
    else:  # a digest that two terms share
        monkeypatch.setattr(EncoderIdentity, "frame_key_terms", _colliding(EncoderIdentity.frame_key_terms))
    expected = 3 if damage == "bytes" else 4
    second = Line(make_config(manifest, run_id="second", store=KEPT, **bfloat16))
    assert (second.count("frames_fallbacks"), second.count("frames_missed")) == (expected, expected)
    assert (second.count("frames_reused"), second.count("fallbacks")) == (4 - expected, 0)
    if damage != "bytes":
        return
    plain = Line(make_config(manifest, run_id="plain", store={"path": str(tmp_path / "apart")}, **bfloat16))
    assert second.rows == plain.rows and features(second) == features(plain)
    third = Line(make_config(manifest, run_id="third", store=KEPT, encode={"dtype": "float16"}))
    assert (third.count("frames_reused"), third.count("frames_fallbacks")) == (4, 0)  # the newest shard answers


def kept_pixels(line: Line, shard: str) -> list[bytes]:
    """The compressed pixels of each of the first window's media, as they lie in the shard."""
    frames, identity = line.context.store.frames, line.context.identity
    places = [(shard, identity.frame_key_terms(m, m.content or "").digest()) for m in media(line)]
    found = [bytes(r.tensors["frames.left-difference.zstd"].data) for r in frames.fetch(places) if r is not None]
    frames.close()
    return found


def _colliding(original: Callable[..., Any]) -> Callable[..., Any]:
    """The terms of other pixels under the digest of these."""

    class Collision:
        def __init__(self, terms: Any) -> None:
            self.terms = dataclasses.replace(terms, decode_rules=99)
            self.resized_size, self.cropped_size = terms.resized_size, terms.cropped_size
            self.digest, self.as_dict = terms.digest, self.terms.as_dict

    return lambda self, planned, content: Collision(original(self, planned, content))


def test_a_resumed_run_follows_its_plan(
    demo_media: Path, make_config: Callable[..., Config], write_manifest: Callable[..., Path], tmp_path: Path
) -> None:
    manifest = some_media(demo_media, write_manifest)
    Line(make_config(manifest, run_id="first", store=KEPT))
    bfloat16 = {"encode": {"dtype": "bfloat16"}}
    second = Line(make_config(manifest, run_id="second", store=KEPT, **bfloat16))
    [shard] = (tmp_path / "store" / "frames" / "shards").glob("*.lmdb")
    assert [m.frames_shard for m in media(second)] == [shard.stem] * 4
    written = second.context.folder.read_bytes(plan_name(0))

    # Its batches are lost; frames are no longer looked for, and the plan says where they are.
    second.context.folder.remove("_work")
    resumed = Line(make_config(manifest, run_id="second", store={"reuse": False}, **bfloat16))
    assert resumed.context.folder.read_bytes(plan_name(0)) == written
    assert (resumed.count("frames_reused"), resumed.count("encodes")) == (4, 4)
    assert resumed.count("images_decoded") == resumed.count("frames_bytes_written") == 0
    assert resumed.rows == second.rows

    # A plan that was written before there were frames goes on without them.
    first = Line(make_config(manifest, run_id="before", store={"path": str(tmp_path / "empty")}, **bfloat16))
    first.context.folder.remove("_work")
    late = Line(make_config(manifest, run_id="before", store={**KEPT, "reuse": False}, **bfloat16))
    assert (late.count("frames_reused"), late.count("images_decoded")) == (0, 2)


class PowerCutError(Exception):
    """Nothing runs from here on."""


def test_frames_are_committed_before_the_receipt_and_may_be_written_twice(
    demo_media: Path,
    make_config: Callable[..., Config],
    write_manifest: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manifest = some_media(demo_media, write_manifest)
    config = make_config(manifest, run_id="cut", store=KEPT, encode={"max_batch_items": 1})

    made: list[EncodeBatches] = []

    class Noted(EncodeBatches):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    def cut(*arguments: Any) -> Any:
        raise PowerCutError

    with monkeypatch.context() as patched:
        patched.setattr(line, "EncodeBatches", Noted)
        patched.setattr(encode, "write_outcome", cut)
        with pytest.raises(PowerCutError):
            Line(config)
    [killed] = made
    assert killed.keeper is not None
    killed.writer.close()  # lets go of the locks, as the end of the process would, and does nothing else
    killed.keeper.writer.close()
    resumed = Line(config)
    assert (resumed.count("encodes"), resumed.count("frames_missed")) == (4, 4)
    frames = resumed.context.store.frames
    frames.reload()
    keys = [each.digest() for each in (resumed.context.identity.frame_key_terms(m, m.content) for m in media(resumed))]
    assert frames.find(keys).keys() == set(keys)
    shards = frames.folder.list("shards")
    assert len(shards) == 2  # what was committed before the cut was sealed, too
    second = Line(make_config(manifest, run_id="second", store=KEPT, encode={"dtype": "bfloat16"}))
    assert {name: second.count(name) for name in NOTHING} == dict.fromkeys(NOTHING, 0)


def test_frames_are_for_stores_that_are_kept(make_config: Callable[..., Config]) -> None:
    with pytest.raises(ConfigError, match=r"store: store\.keep_frames keeps frames for later runs"):
        make_config("m.jsonl", store={**KEPT, "retention": "segment"})


IDENTITY = EncoderIdentity(weights="w", processor="p", placeholder="l", precision="float32")


def planned(**changes: Any) -> PlannedMedia:
    probe = {"modality": "video", "container": "mov", "codec": "h264", "width": 96, "height": 64, "num_bytes": 9}
    geometry = {"grid": (1, 4, 6), "merge_size": 2, "feature_length": 6, "original_size": (64, 96)}
    values: dict[str, Any] = {
        "position": 0,
        "item_index": 0,
        "media_index": 0,
        "tenant": "a",
        "media": MediaItem(uri="/m/0"),
        "source_id": "file:/m/0",
        "content": "sha256:00",
        "requested": SamplePlan(pts_seconds=(0.0, 0.5)),
        **changes,
        "probe": Probe(**{**probe, **changes.get("probe", {})}),
        "geometry": Geometry(**{**geometry, "resized_size": (64, 96), **changes.get("geometry", {})}),
    }
    return PlannedMedia(**values)


IMAGE = {"modality": "image", "container": "png", "codec": "png"}
JPEG = {"modality": "image", "container": "jpeg", "codec": "mjpeg"}
PAGE = {"modality": "page", "container": "pdf", "codec": "pdf"}


def key(item: PlannedMedia, encoder: EncoderIdentity = IDENTITY) -> str:
    return encoder.frame_key_terms(item, item.content or "").digest()


@pytest.mark.parametrize(
    ("of", "item", "encoder"),
    [
        ({}, {"tenant": "b"}, {}),
        ({}, {"content": "sha256:01"}, {}),
        ({}, {"requested": SamplePlan(pts_seconds=(0.0, 0.6))}, {}),
        ({}, {"requested": SamplePlan(pts_seconds=(0.0,))}, {}),
        ({}, {"geometry": {"resized_size": (64, 64)}}, {}),
        ({}, {"geometry": {"cropped_size": (64, 64)}}, {}),
        ({}, {}, {"resample": "bilinear"}),
        ({}, {}, {"at_keyframes": True}),
        (JPEG, {}, {"dct_scaled": True}),
        (JPEG, {}, {"image": ImageRules(keep_truncated=True)}),
        (IMAGE, {}, {"image": ImageRules(background="#000000")}),
        (IMAGE, {"probe": {"container": "heif"}}, {}),
        (PAGE, {"probe": {"width": 48, "height": 32}}, {}),
    ],
    ids=str,
)
def test_what_changes_pixels_moves_the_key(of: dict[str, Any], item: dict[str, Any], encoder: dict[str, Any]) -> None:
    changed = planned(**{**item, "probe": {**of, **item.get("probe", {})}})
    assert key(changed, dataclasses.replace(IDENTITY, **encoder)) != key(planned(probe=of))


@pytest.mark.parametrize("name", ["DECODE_BACKEND", "DECODE_RULES", "IMAGE_BACKEND", "PAGE_BACKEND", "HEIF_BACKEND"])
def test_another_version_of_what_decodes_moves_the_key(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    kinds = {"IMAGE_BACKEND": IMAGE, "PAGE_BACKEND": PAGE, "HEIF_BACKEND": {**IMAGE, "container": "heif"}}
    item = planned(probe=kinds.get(name, {}))
    before = key(item)
    assert getattr(identity, name) == getattr(backend, name)
    monkeypatch.setattr(identity, name, 2 if name == "DECODE_RULES" else "another")
    assert key(item) != before


def test_another_version_of_what_resizes_moves_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key(planned())
    monkeypatch.setattr(identity, "resize_backend", lambda resample: f"torch-uint8-{resample}-antialias/9")
    assert key(planned()) != before


@pytest.mark.parametrize(
    ("of", "item", "encoder"),
    [
        ({}, {}, {"weights": "w1"}),
        ({}, {}, {"processor": "p1"}),
        ({}, {}, {"placeholder": "l1"}),
        ({}, {}, {"precision": "bfloat16"}),
        ({}, {}, {"dct_scaled": True}),  # of a video
        ({}, {}, {"image": ImageRules(background="#000000", keep_truncated=True)}),
        (IMAGE, {}, {"at_keyframes": True}),
        (IMAGE, {}, {"dct_scaled": True}),
        (JPEG, {}, {"image": ImageRules(background="#000000")}),  # nothing shows through
        ({}, {"position": 7, "item_index": 9, "media_index": 2}, {}),
        ({}, {"media": MediaItem(uri="s3://b/0.mp4", version="v")}, {}),
        ({}, {"source_id": "etag:x"}, {}),
        ({}, {"frames_shard": "s"}, {}),
        ({}, {"geometry": {"grid": (2, 2, 3), "merge_size": 1, "feature_length": 12, "timestamps": (0.0,)}}, {}),
        ({}, {"probe": {"rate_fps": 25.0, "duration_seconds": 4.0}}, {}),
    ],
    ids=str,
)
def test_what_changes_no_pixel_does_not(of: dict[str, Any], item: dict[str, Any], encoder: dict[str, Any]) -> None:
    changed = planned(**{**item, "probe": {**of, **item.get("probe", {})}})
    assert key(changed, dataclasses.replace(IDENTITY, **encoder)) == key(planned(probe=of))


def test_frames_have_every_term_of_features_that_is_not_the_models() -> None:
    of_features = {field.name for field in dataclasses.fields(FeatureKeyTerms)}
    of_frames = set(IDENTITY.frame_key_terms(planned(), "sha256:00").as_dict())
    assert of_features - of_frames == {"processor", "weights", "precision", "placeholder", "prompt"}
