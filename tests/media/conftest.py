"""Sandboxes whose child follows orders, for the tests of what runs in them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pipeline.media.sandbox import Sandbox
from tests.media.sandboxed import open_hostile


@pytest.fixture(scope="module")
def shared() -> Iterator[Sandbox]:
    """One child for all tests that leave it as it was."""
    sandbox = open_hostile()
    yield sandbox
    sandbox.close()


@pytest.fixture
def hostile() -> Iterator[Sandbox]:
    """One for a test, with little time."""
    sandbox = open_hostile(item_seconds=1.0)
    yield sandbox
    sandbox.close()
