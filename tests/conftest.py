"""Fixtures shared by all tests: demo media drawn once a session, and configurations over them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from pipeline.config import Config, parse_config
from pipeline.demo.media import make_demo_media

# Set before anything imports Ray: 2.60 writes a token file into the home folder otherwise.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
# Its workers give way to everything else by default, such as the other process that runs tests, and then take for ever.
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


# What starts Ray or servers, which would take each other's cores and time: one after another, and first of all, for it
# takes longest.
_ALONE = ("tests/ray/", "tests/s3/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The order of the tests."""
    items.sort(key=lambda item: not item.nodeid.startswith(_ALONE))


class _Together(LoadScopeScheduling):  # type: ignore[misc]
    """Where processes share the tests, those of a file stay together, for they share what is made once."""

    def _split_scope(self, nodeid: str) -> str:
        return "alone" if nodeid.startswith(_ALONE) else nodeid.partition("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Of `scripts/test`."""
    return _Together(config, log)


@pytest.fixture(scope="session")
def demo_media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `manifest.jsonl`, `truth.jsonl`, `labels.jsonl` and 20 drawn images and clips in every format."""
    folder = tmp_path_factory.mktemp("media")
    make_demo_media(str(folder / "manifest.jsonl"), images=12, videos=8, seed=11)
    return folder


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., Config]:
    """A configuration of the demo model whose output and store are this test's own."""

    def make(input: Path | str, **changes: Any) -> Config:
        raw: dict[str, Any] = {
            "job": "caption_videos",
            "input": str(input),
            "output": str(tmp_path / "output"),
            "model": "demo:captioner",
            "prompt": "Describe what you see.",
            "sampling": {"policy": "fps", "fps": 2, "max_frames": 16},
            "generate": {"max_new_tokens": 24},
            "store": {"path": str(tmp_path / "store")},
        }
        for name, value in changes.items():
            raw[name] = {**raw.get(name, {}), **value} if isinstance(value, dict) else value
        return parse_config(raw)

    return make


@pytest.fixture
def write_manifest(tmp_path: Path) -> Callable[..., Path]:
    """Writes rows as a JSONL manifest."""

    def write(rows: list[dict[str, Any]], name: str = "manifest.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write
