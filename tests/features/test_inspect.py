"""Looking into a store: `stat`, `ls`, `get`, `export` by other readers, `invalidate` of exactly what is built on it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch
from safetensors.numpy import load_file
from sample_records import features, keyed_record, terms
from typer.testing import CliRunner, Result

from jobs.cli import app
from pipeline.features.catalogue import TERM_COLUMNS
from pipeline.features.codec import FeatureRecord, TensorView
from pipeline.features.frames import frame_record
from pipeline.features.identity import FrameKeyTerms
from pipeline.features.store import FeatureStore
from pipeline.features.verify import verify
from pipeline.schema import Frames

WORDS = np.array([0x3F80, 0xC2F7, 0x0001, 0x7F7F], np.uint16)  # bfloat16: 1, -123.5, the least, the greatest

NUMBERS = torch.from_numpy(WORDS.view(np.int16)).view(torch.bfloat16).to(torch.float64).numpy()


def command(*words: object) -> Result:
    return CliRunner().invoke(app, ["store", *map(str, words)])


def variant(number: int, **changes: object) -> tuple[str, FeatureRecord]:
    changed = dataclasses.replace(terms(number), **changes)  # type: ignore[arg-type]
    _, record = keyed_record(number)
    return changed.digest(), dataclasses.replace(record, key_terms=changed.as_dict())


def frame_terms(number: int) -> FrameKeyTerms:
    names = ("tenant", "content", "sampling", "decode_backend", "decode_rules", "resize_backend", "resized_size")
    known = {name: getattr(terms(number), name) for name in names}
    return FrameKeyTerms(**known, cropped_size=None)


@pytest.fixture
def store(tmp_path: Path) -> FeatureStore:
    """Six records of one model and four of another, one of another tenant, one in bfloat16; frames of three."""
    made = FeatureStore(str(tmp_path / "store"))
    for shard in ([keyed_record(n) for n in range(6)], [variant(n, weights="w1") for n in range(4)]):
        writer = made.writer()
        writer.put(shard)
        writer.seal()
    writer = made.writer()
    key, record = variant(7, tenant="other", precision="bfloat16", decode_backend="av 17.0.1")
    halves = dataclasses.replace(record, tensors={"pooler_output": TensorView.of(WORDS.reshape(2, 2), "bfloat16")})
    writer.put([(key, halves), variant(8, processor="p1")])
    writer.seal()
    writer = made.frames.writer()
    for number in range(3):
        pixels = np.full((1, 32, 64, 3), number, np.uint8)
        frames = Frames(pixels=pixels, pts_seconds=(0.0,))
        writer.put([(frame_terms(number).digest(), frame_record(frames, frame_terms(number), "image", (480, 640)))])
    writer.seal()
    return made


def test_a_store_in_numbers(store: FeatureStore, tmp_path: Path) -> None:
    told = json.loads(command("stat", store.folder.path, "--json").stdout)
    tier = told["tiers"]["features"]
    assert (tier["records"], tier["shards"]) == (12, 3) and told["tiers"]["frames"]["records"] == 3
    assert tier["by"]["weights"] == {"w0": 8, "w1": 4} and tier["by"]["tenant"] == {"acme": 11, "other": 1}
    assert tier["by"]["precision"] == {"float32": 11, "bfloat16": 1}
    assert tier["least"] < tier["median"] <= tier["most"] < 2 * 8 * 64 * 4 and tier["bytes"] < tier["file_bytes"]
    said = command("stat", store.folder.path).stdout
    assert "features: 12 records of" in said and "frames: 3 records of" in said and "weights w1: 4" in said
    writer = store.writer()
    writer.put([keyed_record(90)])
    assert ", being written" in command("stat", store.folder.path).stdout
    writer.close()
    assert "its writer is gone" in command("stat", store.folder.path).stdout
    (tmp_path / "elsewhere").mkdir()
    refused = command("stat", tmp_path / "elsewhere")
    assert refused.exit_code == 2 and "not a feature store" in refused.stderr


def test_records_are_listed_by_terms_also_of_older_catalogues(store: FeatureStore) -> None:
    def keys(*options: str) -> list[str]:
        lines = command("ls", store.folder.path, "--json", *options).stdout.splitlines()
        return [json.loads(line)["key"] for line in lines]

    ones = [variant(n, weights="w1")[0] for n in range(4)]
    assert len(keys()) == 12 and sorted(keys("--weights", "w1")) == sorted(ones)
    assert keys("--tenant", "other") == [
        variant(7, tenant="other", precision="bfloat16", decode_backend="av 17.0.1")[0]
    ]
    assert sorted(keys("--content", f"*{3:064x}")) == sorted([ones[3], keyed_record(3)[0]])
    assert len(keys("--frames")) == 3 and len(keys("--limit", "5")) == 5
    shard = store.sealed_shards()[1].shard_id
    assert sorted(keys("--shard", shard)) == sorted(ones)
    assert command("ls", store.folder.path, "--weights", "w1").stdout.count(shard) == 4

    # A catalogue file as it was before it had terms: they are read from the records.
    path = Path(store.folder.path) / "catalogue" / f"{shard}.parquet"
    table = pq.read_table(path)
    pq.write_table(table.drop_columns(list(TERM_COLUMNS)), path)
    assert sorted(keys("--weights", "w1")) == sorted(ones)


def test_one_record_in_detail(store: FeatureStore, tmp_path: Path) -> None:
    key = keyed_record(5)[0]
    told = json.loads(command("get", store.folder.path, key[:12], "--output", tmp_path / "one").stdout)
    assert told["key_terms"] == terms(5).as_dict() and told["geometry"]["original_size"] == [480, 640]
    tensor = told["tensors"]["pooler_output"]
    assert (tensor["dtype"], tensor["shape"], tensor["not_finite"]) == ("float32", [8, 64], 0)
    assert tensor["mean"] == pytest.approx(features(5).mean(dtype=np.float64))
    assert np.array_equal(load_file(tmp_path / "one")["pooler_output"], features(5))
    halves = command("ls", store.folder.path, "--tenant", "other", "--json").stdout
    told = json.loads(command("get", store.folder.path, json.loads(halves)["key"]).stdout)
    assert told["tensors"]["pooler_output"]["least"] == NUMBERS.min()
    assert told["tensors"]["pooler_output"]["most"] == NUMBERS.max()
    for prefix, said in (("", "keys begin with it"), ("zz", "no key begins")):
        refused = command("get", store.folder.path, prefix)
        assert refused.exit_code == 2 and said in refused.stderr


@pytest.mark.parametrize("form", ["parquet", "arrow", "safetensors"])
def test_others_read_what_is_exported(store: FeatureStore, tmp_path: Path, form: str) -> None:
    target = tmp_path / "out"
    done = command("export", store.folder.path, "--format", form, "--output", target)
    assert done.exit_code == 0 and "12 records" in done.stdout
    halves = variant(7, tenant="other", precision="bfloat16", decode_backend="av 17.0.1")[0]
    if form == "safetensors":
        assert len(list(target.iterdir())) == 12
        for number in range(6):
            assert np.array_equal(
                load_file(target / f"{keyed_record(number)[0]}.safetensors")["pooler_output"], features(number)
            )
        numbers = safetensors.torch.load_file(target / f"{halves}.safetensors")["pooler_output"]
        assert numbers.dtype == torch.bfloat16 and numbers.flatten().tolist() == NUMBERS.tolist()
    else:
        table = pq.read_table(target) if form == "parquet" else pa.ipc.open_file(target).read_all()
        rows = {row["key"]: row for row in table.to_pylist()}
        for number in range(6):
            row = rows[keyed_record(number)[0]]
            [tensor] = row["tensors"]
            array = np.frombuffer(tensor["data"], tensor["dtype"]).reshape(tensor["shape"])
            assert np.array_equal(array, features(number)) and row["content"] == terms(number).content
            assert json.loads(row["key_terms"]) == terms(number).as_dict()
        [tensor] = rows[halves]["tensors"]
        assert tensor["dtype"] == "float32"
        assert np.array_equal(np.frombuffer(tensor["data"], np.float32), NUMBERS)
    again = command("export", store.folder.path, "--format", form, "--output", target)
    assert again.exit_code == 2 and "exists" in again.stderr


@pytest.mark.parametrize(
    ("options", "features_left", "frames_left"),
    [
        (["--weights", "w1"], 8, 3),
        (["--processor", "p1"], 11, 3),
        (["--decode", "pillow *"], 1, 0),
        (["--decode", "av*"], 11, 3),
        (["--resize", "pil"], 0, 0),
        (["--weights", "w0", "--processor", "p1"], 11, 3),
        (["--weights", "unknown"], 12, 3),
    ],
)
def test_exactly_what_is_built_on_it_is_dropped(
    store: FeatureStore, options: list[str], features_left: int, frames_left: int
) -> None:
    def left() -> tuple[int, int]:
        tiers = json.loads(command("stat", store.folder.path, "--json").stdout)["tiers"]
        return tiers["features"]["records"], tiers.get("frames", {"records": 0})["records"]

    before = {path: path.stat().st_mtime_ns for path in Path(store.folder.path).rglob("*") if path.is_file()}
    shown = command("invalidate", store.folder.path, *options)
    assert "nothing was changed" in shown.stdout and f"features: {12 - features_left:,} records" in shown.stdout
    assert before == {path: path.stat().st_mtime_ns for path in Path(store.folder.path).rglob("*") if path.is_file()}
    dropped = command("invalidate", store.folder.path, *options, "--yes")
    assert dropped.exit_code == 0 and f"features: {12 - features_left:,} records" in dropped.stdout
    assert left() == (features_left, frames_left)
    assert list(verify(FeatureStore(store.folder.path))) == []
    refused = command("invalidate", store.folder.path)
    assert refused.exit_code == 2 and "say what is no longer valid" in refused.stderr
