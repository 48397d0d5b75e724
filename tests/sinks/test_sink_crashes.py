"""Writers that are really killed, and writers that meet: what was acknowledged is there, and nothing is there twice."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sample_points import ROOT, documents, make_collection, vector
from sink_child import PARTS

from pipeline.config import Section
from pipeline.sinks.contract import Collection, Sink
from pipeline.sinks.registry import open_sink

CHILD = Path(__file__).with_name("sink_child.py")


def start(mode: str, section: Section, *ranges: tuple[int, int]) -> list[subprocess.Popen[str]]:
    """Writers of these ranges of documents, all let go when all are ready."""
    told = [sys.executable, str(CHILD), mode, type(section).__name__, section.model_dump_json()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    children = [subprocess.Popen([*told, str(first), str(last)], **pipes) for first, last in ranges]
    assert [child.stdout.readline() for child in children if child.stdout] == ["ready\n"] * len(children)
    for child in children:
        assert child.stdin is not None
        print("go", file=child.stdin, flush=True)
    return children


def killed_after(child: subprocess.Popen[str], batches: int, seconds: float) -> int:
    """SIGKILL `seconds` after so many acknowledgements; how many documents were acknowledged in the end."""
    assert child.stdout is not None
    lines = [child.stdout.readline() for _ in range(batches)]
    time.sleep(seconds)
    child.kill()
    lines += child.communicate()[0].splitlines(keepends=True)
    return int([line for line in lines if line.endswith("\n")][-1])


def finish(children: list[subprocess.Popen[str]]) -> None:
    for child in children:
        child.communicate()
    assert {child.returncode for child in children} == {0}


def item_of_each_point(sink: Sink, collection: Collection) -> dict[str, str]:
    """Point id → item id; asserts that no point is there twice."""
    sink.switch(collection)
    hits = sink.search(collection.name, vector(1), 100_000, tenant="")
    found = {hit.id: hit.item_id for hit in hits}
    assert len(found) == len(hits) == sink.count(collection)
    return found


def kill_and_resume(section: Section, mode: str, parts: int, kills: int, total: int) -> None:
    """Kills writers in the middle of `total` documents; each starts where the last acknowledgement left off."""
    sink, collection, rng = open_sink(section), make_collection(), random.Random(kills)
    acknowledged = 0
    for _ in range(kills):
        [child] = start(mode, section, (acknowledged, total))
        acknowledged = killed_after(child, rng.randint(1, 8), rng.uniform(0, 0.05))
        found = item_of_each_point(sink, collection)
        written = documents(acknowledged, parts)
        whole = set(written["item_id"].to_pylist())
        assert {id_ for id_, item in found.items() if item in whole} == set(written["id"].to_pylist())
        if mode == "replace":
            assert len(set(found.values())) == total
    assert acknowledged < total
    finish(start(mode, section, (acknowledged, total)))
    assert item_of_each_point(sink, collection).keys() == set(documents(total, parts)["id"].to_pylist())


@pytest.mark.parametrize("store", ["lancedb", "pgvector"])
def test_killed_while_upserting(store: str, make_section: Callable[..., Any]) -> None:
    section = make_section(store)
    open_sink(section).prepare(make_collection())
    kill_and_resume(section, "upsert", PARTS, kills=1, total=250)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["upsert", "replace"])
@pytest.mark.parametrize("store", ["lancedb", "pgvector"])
def test_killed_often(store: str, mode: str, make_section: Callable[..., Any]) -> None:
    section = make_section(store)
    sink, collection = open_sink(section), make_collection()
    sink.prepare(collection)
    parts = PARTS
    if mode == "replace":
        sink.write(collection, documents(1_000, PARTS))
        parts = PARTS // 2
    kill_and_resume(section, mode, parts, kills=5, total=1_000)


@pytest.mark.parametrize("store", ["lancedb", "pgvector"])
def test_writers_of_the_same_points(store: str, make_section: Callable[..., Any]) -> None:
    """As when a batch is given to a second worker while the first, thought dead, still writes it."""
    section = make_section(store)
    sink, collection = open_sink(section), make_collection()
    sink.prepare(collection)
    ranges = [(0, 40), (20, 60), (0, 40), (0, 40)]
    finish(start("upsert", section, *(ranges if store == "lancedb" else ranges[:2])))
    assert item_of_each_point(sink, collection).keys() == set(documents(60, PARTS)["id"].to_pylist())
