"""The threads that probe a window: what handing them an item costs, and what ends them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import Config
from pipeline.planning.windows import Window
from pipeline.runs.run import start_run
from pipeline.stages import encode_plan
from pipeline.stages.checked_model import checked_model
from pipeline.stages.context import StageContext
from pipeline.stages.encode_plan import written_plan
from tests.media.media_files import make_image


@pytest.fixture
def listing(tmp_path: Path, write_manifest: Callable[..., Path]) -> Path:
    """100 images in one file."""
    (tmp_path / "a.png").write_bytes(make_image("PNG"))
    return write_manifest([{"id": f"r{i}", "media": [str(tmp_path / "a.png")]} for i in range(100)])


def test_no_future_is_made_for_an_item(
    listing: Path, make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[Any] = []

    class Counting(ThreadPoolExecutor):
        def submit(self, *arguments: Any, **named: Any) -> Any:
            submitted.append(arguments)
            return super().submit(*arguments, **named)

    monkeypatch.setattr(encode_plan, "ThreadPoolExecutor", Counting)
    config = make_config(listing, decode={"io_threads": 4, "sandbox": "off"})
    with start_run(config) as run:
        context = StageContext(config=config, run_url=run.folder.url, checked=checked_model(config, "cpu"))
        plan = written_plan(context, Window(index=0, start=0, stop=100))
    assert [media.item_index for media in plan.media] == list(range(100))
    # To look where each is from, what is known of the one tenant's, and to read it.
    assert len(submitted) == 4 + 1 + 4


def test_what_is_no_fault_of_an_item_ends_the_window(
    listing: Path, make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Any] = []

    def broken(media: Any, *_: Any) -> Any:
        looked.append(media)
        raise RuntimeError("the disk is gone")

    monkeypatch.setattr(encode_plan, "stat_source", broken)
    config = make_config(listing, decode={"io_threads": 4, "sandbox": "off"})
    with start_run(config) as run:
        context = StageContext(config=config, run_url=run.folder.url, checked=checked_model(config, "cpu"))
        with pytest.raises(RuntimeError, match="the disk is gone"):
            written_plan(context, Window(index=0, start=0, stop=100))
    assert len(looked) <= 4  # one a thread
