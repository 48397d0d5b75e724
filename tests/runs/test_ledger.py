"""Finished windows are found again, on disk and in an object store."""

import uuid
from pathlib import Path

import pytest

from pipeline.runs.ledger import Ledger
from pipeline.storage import Folder


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    return Folder(str(tmp_path) if request.param == "local" else f"memory://{uuid.uuid4().hex}")


def entry(encodes: int) -> dict[str, object]:
    return {"counts": {"encodes": encodes}, "seconds": {"encode": 0.5}, "quarantine": {}, "shards": ["s"]}


def test_a_new_run_has_finished_nothing(folder: Folder) -> None:
    assert Ledger(folder).finished("encode") == {}


def test_windows_are_found_by_pass_in_order(folder: Folder) -> None:
    for window in (1_000_000, 12, 0, 999_999):
        Ledger(folder).record("encode", window, entry(window))
    Ledger(folder).record("generate", 12, entry(-1))
    found = Ledger(folder).finished("encode")
    assert list(found.items()) == [(window, entry(window)) for window in (0, 12, 999_999, 1_000_000)]
    assert Ledger(folder).finished("generate") == {12: entry(-1)}
    assert (Ledger(folder).windows("encode"), Ledger(folder).windows("generate")) == (list(found), [12])


def test_the_first_line_of_a_window_stands(folder: Folder) -> None:
    Ledger(folder).record("encode", 1, entry(1))
    Ledger(folder).record("encode", 1, entry(2))
    assert Ledger(folder).finished("encode") == {1: entry(1)}


def test_a_line_is_one_small_file(folder: Folder) -> None:
    Ledger(folder).record("generate", 42, entry(1))
    assert folder.list("_run/ledger") == ["generate-000042.json"]
