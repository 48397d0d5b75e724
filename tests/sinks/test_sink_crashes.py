"""Writers that are really killed, and writers that meet: what was acknowledged is there, and nothing is there twice."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sample_points import CHILD_ENVIRONMENT, documents, make_collection, vector
from sink_child import PARTS

from pipeline.config import Section
from pipeline.sinks.contract import Collection, Sink
from pipeline.sinks.registry import open_sink

CHILD = Path(__file__).with_name("sink_child.py")
DOCUMENTS = 400


def start(mode: str, section: Section, first: int, last: int) -> subprocess.Popen[str]:
    told = [type(section).__name__, section.model_dump_json(), str(first), str(last)]
    command = [sys.executable, str(CHILD), mode, *told]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=CHILD_ENVIRONMENT)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def killed_after(child: subprocess.Popen[str], seconds: float, first: int) -> int:
    """SIGKILL; how many documents were acknowledged before."""
    assert child.stdout is not None
    time.sleep(seconds)
    child.kill()
    lines = [line for line in child.stdout.readlines() if line.endswith("\n")]
    child.stdout.close()
    child.wait()
    return int(lines[-1]) if lines else first


def finished(child: subprocess.Popen[str]) -> None:
    assert child.stdout is not None
    child.communicate()
    assert child.returncode == 0


def item_of_each_point(sink: Sink, collection: Collection) -> dict[str, str]:
    """Point id → item id; asserts that no point is there twice."""
    sink.switch(collection)
    hits = sink.search(collection.name, vector(1), 100_000, tenant="")
    found = {hit.id: hit.item_id for hit in hits}
    assert len(found) == len(hits) == sink.count(collection)
    return found


def kill_and_resume(section: Section, mode: str, parts: int, kills: int, longest_seconds: float) -> None:
    """Kills writers at random times, each of which starts where the last acknowledgement left off."""
    sink, collection, rng = open_sink(section), make_collection(), random.Random(kills)
    acknowledged = 0
    for _ in range(kills):
        child = start(mode, section, acknowledged, DOCUMENTS)
        acknowledged = killed_after(child, rng.uniform(0, longest_seconds), acknowledged)
        found = item_of_each_point(sink, collection)
        written = documents(acknowledged, parts)
        assert {found.get(id_) for id_ in written["id"].to_pylist()} == set(written["item_id"].to_pylist())
        if acknowledged >= DOCUMENTS:
            acknowledged = 0
    finished(start(mode, section, acknowledged, DOCUMENTS))
    assert item_of_each_point(sink, collection).keys() == set(documents(DOCUMENTS, parts)["id"].to_pylist())


@pytest.mark.parametrize("store", ["lancedb", "pgvector"])
def test_killed_while_upserting(store: str, make_section: Callable[..., Any]) -> None:
    section = make_section(store)
    open_sink(section).prepare(make_collection())
    kill_and_resume(section, "upsert", PARTS, kills=1, longest_seconds=0.4)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["upsert", "replace"])
@pytest.mark.parametrize("store", ["lancedb", "pgvector"])
def test_killed_often(store: str, mode: str, make_section: Callable[..., Any]) -> None:
    section = make_section(store)
    sink, collection = open_sink(section), make_collection()
    sink.prepare(collection)
    parts = PARTS
    if mode == "replace":
        sink.write(collection, documents(DOCUMENTS, PARTS))
        parts = PARTS // 2
    kill_and_resume(section, mode, parts, kills=10, longest_seconds=1.0)


@pytest.mark.parametrize("store", ["lancedb", "pgvector"])
def test_four_writers_of_the_same_points(store: str, make_section: Callable[..., Any]) -> None:
    """As when a batch is given to a second worker while the first, thought dead, still writes it."""
    section = make_section(store)
    sink, collection = open_sink(section), make_collection()
    sink.prepare(collection)
    for child in [start("upsert", section, first, 100) for first in (0, 0, 0, 50)]:
        finished(child)
    assert item_of_each_point(sink, collection).keys() == set(documents(100, PARTS)["id"].to_pylist())
