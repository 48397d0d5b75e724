"""`headrace store delete`: nothing of an item is left, shown by searching the raw bytes of every file that is ours."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from typer.testing import CliRunner

from jobs.cli import app
from pipeline import deletion, flow
from pipeline.config import Config, parse_config
from pipeline.deletion import Selection, delete, find_derived
from pipeline.errors import ConfigError
from pipeline.features.store import FeatureStore
from pipeline.features.verify import verify
from pipeline.runs.forget import ended_runs
from pipeline.sinks.registry import open_sink
from pipeline.storage import Folder
from tests.without_ray import run_without_ray


def word(number: int) -> str:
    """Such as no compression makes by accident of its neighbours."""
    return hashlib.sha256(bytes([number])).hexdigest()[:16]


PERSON, LETTER = f"person-{word(100)}", f"letter-{word(0)}"
SECRET = "the secret word is"


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    run_without_ray(monkeypatch)


@pytest.fixture
def rows(tmp_path: Path, demo_media: Path) -> list[dict[str, Any]]:
    """Twenty media and as many texts of two tenants, under ids that nothing else has in it."""
    shutil.copytree(demo_media / "media", tmp_path / "media")
    listed = [json.loads(line) for line in (demo_media / "manifest.jsonl").read_text().splitlines()]
    rows: list[dict[str, Any]] = [
        {"id": f"person-{word(n + 100)}", "uri": str(tmp_path / row["media"][0]["uri"]), "tenant": "ab"[n % 2]}
        for n, row in enumerate(listed)
    ]
    rows += [{"id": f"letter-{word(n)}", "text": f"{SECRET} {word(n + 50)}", "tenant": "ab"[n % 2]} for n in range(20)]
    rows.append({"id": "person-gone", "uri": str(tmp_path / "absent.png"), "tenant": "a"})
    return rows


def config(folder: Path, rows: list[dict[str, Any]], run_id: str, **changes: Any) -> Config:
    manifest = folder / "given.jsonl"
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))
    raw: dict[str, Any] = {
        "job": "embed_backfill",
        "input": str(manifest),
        "output": str(folder / "ours" / "output"),
        "run_id": run_id,
        "model": "demo:dual_encoder",
        "store": {"path": str(folder / "ours" / "store"), "keep_frames": True},
        "ray": {"first_window_items": 8, "window_items": 16},
    }
    return parse_config({**raw, **changes})


def store_of(made: Config) -> FeatureStore:
    return FeatureStore(made.store.path)


def places(folder: Path, needle: bytes) -> list[str]:
    """Every file below `folder` that holds `needle`, raw or in a column of a Parquet file."""
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and (
            needle in str(path).encode() or needle in path.read_bytes() or _in_columns(path, needle)
        ):
            found.append(str(path.relative_to(folder)))
    return found


def _in_columns(path: Path, needle: bytes) -> bool:
    if path.suffix != ".parquet":
        return False
    return any(needle in _plain(value) for column in pq.read_table(path).columns for value in _values(column))


def _values(column: pa.ChunkedArray) -> Iterator[Any]:
    for value in column.to_pylist():
        yield value
        if isinstance(value, list) and value and isinstance(value[0], float):
            yield np.array(value, np.float32).tobytes()


def _plain(value: Any) -> bytes:
    return value if isinstance(value, bytes) else json.dumps(value, default=str).encode()


def part_rows(made: Config) -> list[dict[str, Any]]:
    paths = sorted(Path(made.output, made.run_id or "").glob("part-*.parquet"))
    return list(pa.concat_tables(pq.read_table(path) for path in paths).to_pylist())


@pytest.mark.parametrize("kind", ["item", "tenant", "content"])
def test_nothing_of_it_is_left(
    tmp_path: Path, rows: list[dict[str, Any]], store: str, make_section: Callable[..., Any], kind: str
) -> None:
    section = make_section(store)
    made = config(tmp_path, rows, "night").model_copy(update={"sinks": _sinks(store, section)})
    flow.run(made)
    flow.run(config(tmp_path, rows[:4] + rows[20:24], "other"))
    before = part_rows(made)
    features = store_of(made)
    keys = {row["key"]: row["item_index"] for row in _encoded(made)}
    target = 0  # an image of tenant a
    [key] = [key for key, item in keys.items() if item == target]
    content = features.get(features.of_tenant("a").find([key])[key], key).key_terms["content"]  # type: ignore[union-attr]
    selection = {
        "item": Selection(tenant="a", item_ids=(PERSON, LETTER)),
        "tenant": Selection(tenant="a"),
        "content": Selection(content=content),
    }[kind]
    gone = {
        "item": {0, 20},
        "tenant": {n for n, row in enumerate(rows) if row["tenant"] == "a"},
        "content": {0},
    }[kind]
    # What tells of them: ids, uris, texts, contents, features, vectors.
    needles = [needle for n in gone for needle in (rows[n]["id"].encode(), _said(rows[n]))]
    vectors = [np.array(row["vector"] or (), np.float32).tobytes() for row in before]
    needles += [vectors[n] for n in gone if vectors[n] and vectors.count(vectors[n]) == 1]  # some texts are all unknown
    needles += [content.removeprefix("sha256:").encode(), key.encode()]
    ours = [tmp_path / "ours"] + ([Path(section.uri)] if store == "lancedb" else [])
    if store == "qdrant":
        ours.append(Path(section.path))
    assert all(any(places(folder, needle) for folder in ours) for needle in needles)
    assert places(ours[0] / "store", content.encode())
    count = open_sink(section)
    del features

    shown = find_derived(made, store_of(made), selection)
    assert shown.rows[str(tmp_path / "ours" / "output" / "night")] == len(gone)
    receipt = delete(made, store_of(made), selection)
    assert receipt.records == {"frames": shown.records["frames"], "features": shown.records["features"]}
    assert receipt.records["features"] >= 1 and receipt.sources >= 1
    tenants = {path.name for path in (ours[0] / "store" / "tenants").iterdir()}
    assert tenants == ({"b"} if kind == "tenant" else {"a", "b"})
    if kind == "tenant":
        assert places(ours[0], b'"a_2') == []  # names of its shards
    for needle in needles:
        left = [place for folder in ours for place in places(folder, needle)]
        assert not left, (needle[:60], left)

    # Everybody else's are as they were, and all adds up.
    after = part_rows(made)
    for n, (row, was) in enumerate(zip(after, before, strict=True)):
        if n in gone:
            assert (row["status"], row["code"], row["vector"], row["uri"]) == ("skipped", "deleted", None, None)
        else:
            assert row == was
    fine = [row for row in after if row["status"] == "ok"]
    summary = json.loads((tmp_path / "ours" / "output" / "night" / "summary.json").read_text())
    assert summary["items_written"] == len(fine)
    assert summary["items_in"] == 41 == len(fine) + summary["items_quarantined"] + summary["items_skipped"]
    [[physical, points]] = summary["points"].items()
    assert receipt.points[physical] == points - len(fine)
    sought = next(row for row in fine if row["tenant"] == "b")
    assert count.search(section.collection, sought["vector"], 1, tenant="b")[0].score > 0.999
    hits = count.search(section.collection, before[0]["vector"], 100, tenant="a")
    assert not {hit.id for hit in hits} & {rows[n]["id"] for n in gone}
    assert list(verify(store_of(made))) == []

    # Again: nothing is left to delete. The command that made the run finds it ended, and makes nothing anew.
    again = delete(made, store_of(made), selection)
    assert sum(again.records.values()) == again.sources == sum(again.points.values()) == 0
    assert flow.run(made)["encodes"] == summary["encodes"]
    assert part_rows(made) == after
    for needle in needles:
        assert not [place for folder in ours for place in places(folder, needle)]


def _sinks(store: str, section: Any) -> Any:
    from pipeline.config import Sinks

    return Sinks(**{store: section})


def _said(row: dict[str, Any]) -> bytes:
    return row["text"].encode() + b'"' if "text" in row else Path(row["uri"]).name.encode()


def _encoded(made: Config) -> list[dict[str, Any]]:
    folder = Path(made.output, made.run_id or "", "_run", "encoded")
    return [row for path in sorted(folder.glob("*.parquet")) for row in pq.read_table(path).to_pylist() if row["key"]]


def test_a_deletion_that_is_cut_off_is_done_again(
    tmp_path: Path, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = config(tmp_path, rows, "night")
    flow.run(made)
    selection = Selection(tenant="a", item_ids=(PERSON,))
    for step in ("drop_records", "forget_items"):
        real = getattr(deletion, step)

        def cut(*arguments: Any, real: Callable[..., Any] = real) -> None:
            real(*arguments)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(deletion, step, cut)
            with pytest.raises(KeyboardInterrupt):
                delete(made, store_of(made), selection)
    delete(made, store_of(made), selection)
    assert places(tmp_path / "ours", PERSON.encode()) == []


def test_runs_that_go_on_and_selections_that_say_nothing_are_refused(
    tmp_path: Path, rows: list[dict[str, Any]]
) -> None:
    made = config(tmp_path, rows, "night")
    flow.run(made)
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(made.model_dump(mode="json")))

    def command(*words: str) -> Any:
        return CliRunner().invoke(app, ["store", "delete", str(file), *words])

    assert command().exit_code == 2 and "say what is to be deleted" in command().stderr
    assert "either items or a content" in command("--item", "x", "--content", "y").stderr
    shown = command("--tenant", "a", "--item", PERSON)
    assert shown.exit_code == 0 and "nothing was changed" in shown.stdout
    assert places(tmp_path / "ours", PERSON.encode())
    done = command("--tenant", "a", "--item", PERSON, "--yes", "--receipt", str(tmp_path / "receipt.json"))
    assert done.exit_code == 0 and json.loads((tmp_path / "receipt.json").read_text())["sources"] == 1
    (tmp_path / "ours" / "output" / "night" / "summary.json").unlink()
    refused = command("--tenant", "a", "--yes")
    assert refused.exit_code == 2 and "interrupted" in refused.stderr
    with pytest.raises(ConfigError):
        ended_runs(Folder(made.output))
