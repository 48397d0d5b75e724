"""A corpus whose decoders hang, crash, eat memory and lie: a quarantined row each, all others as without a sandbox."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import Config
from pipeline.media.sandbox import Probers, Sandbox
from pipeline.stages import context
from tests.media.media_files import Recipe, make_image, make_video
from tests.media.sandboxed import child_pid, is_alive, open_hostile, order
from tests.stages.line import Line

BAD = {
    "hang": ("hang", "timeout"),
    "segfault": ("segfault", "crashed"),
    "abort": ("abort", "crashed"),
    "memory": (f"eat {2**33}", "out_of_memory"),
    "lie": ("say {'shown': [0.0, 1.0, 2.0]}", "crashed"),
    "header-hangs": ("probe_hang", "timeout"),
    "header-crashes": ("probe_segfault", "crashed"),
}


@pytest.fixture
def manifest(tmp_path: Path, write_manifest: Callable[..., Path]) -> Path:
    """Good and bad in turns; the bad are JPEGs which nothing is wrong with, but what the child does with them."""
    files = {f"{name}.jpg": order(what) for name, (what, _) in BAD.items()}
    for number in range(len(files)):
        files[f"good-{number}.jpg"] = make_image("JPEG", quality=90 - number)
    files["good-clip.mp4"] = make_video(Recipe())
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    names = sorted(files, key=lambda name: name[::-1])
    return write_manifest([{"id": name.partition(".")[0], "uri": str(tmp_path / name)} for name in names])


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    """The sandbox of this process, whose child follows orders."""
    sandbox = open_hostile(item_seconds=2.0)
    monkeypatch.setattr(context, "_sandbox", lambda mode, seconds: sandbox if mode == "auto" else None)
    probers = Probers([sandbox])
    monkeypatch.setattr(context, "_probers", lambda mode, seconds: probers if mode == "auto" else None)
    yield sandbox
    sandbox.close()


def test_each_costs_its_row(
    manifest: Path, hostile: Sandbox, make_config: Callable[..., Config], tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"encode": {"max_batch_items": 3}, "decode": {"sandbox": "auto"}}
    sandboxed = Line(make_config(manifest, **changes))
    found = {row["id"]: row for row in sandboxed.rows}
    assert {name: row["code"] for name, row in found.items() if row["status"] != "ok"} == {
        name: code for name, (_, code) in BAD.items()
    }
    num_probed = len(found) - 2
    assert sandboxed.count(f"sandbox:{hostile.level}") == num_probed
    apart = {"output": str(tmp_path / "apart"), "store": {"path": str(tmp_path / "apart-store")}}
    plain = Line(make_config(manifest, **{**changes, **apart, "decode": {"sandbox": "off"}}))
    assert plain.count("sandbox:off") == len(found)
    assert {row["id"] for row in plain.rows if row["status"] == "ok"} == set(found)
    good = set(found) - set(BAD)
    assert [row for row in plain.rows if row["id"] in good] == [found[name] for name in found if name in good]


def test_one_child_serves_a_process_and_ends_with_the_sandbox(
    demo_media: Path, make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Sandbox] = []

    def sandbox(mode: str, item_seconds: float) -> Sandbox:
        assert (mode, item_seconds) == ("auto", 120.0)  # the defaults
        if not opened:
            opened.append(Sandbox(item_seconds=item_seconds))
        return opened[0]

    monkeypatch.setattr(context, "_sandbox", sandbox)
    monkeypatch.setattr(context, "_probers", lambda mode, seconds: None)
    line = Line(make_config(demo_media / "manifest.jsonl", encode={"max_batch_items": 4}))
    assert {row["status"] for row in line.rows} == {"ok"}
    [only] = opened
    assert only._child is not None and only._child.num_items == len(line.rows)
    pid = child_pid(only)
    only.close()
    assert not is_alive(pid)
