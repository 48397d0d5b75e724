"""Small pictures for people, of media that may have been replaced since they were looked at."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jobs import search
from pipeline.config import Config, parse_config
from pipeline.media.budget import TIERS
from pipeline.media.decode import decode_media
from pipeline.media.probe import probe_media
from pipeline.media.sandbox import Sandbox
from pipeline.media.source import ANYWHERE
from pipeline.media.thumbnail import scaled, thumbnail
from pipeline.schema import MediaItem, SamplePlan
from pipeline.search import Answers
from pipeline.sinks.contract import Hit
from tests.media.hostile_images import lying_sizes
from tests.media.media_files import Recipe, make_audio, make_image, make_video
from tests.media.pdf_files import Page, make_pdf, rectangle
from tests.media.sandboxed import child_pid, is_alive, open_hostile, order

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the child is kept in by Linux")
FILES = {
    "a.jpg": make_image("JPEG"),
    "b.png": make_image("PNG"),
    "c.mp4": make_video(Recipe()),
    "d.pdf": make_pdf([Page(content=rectangle(0, 0, 300, 300, (250, 0, 0)))]),
}


@pytest.fixture
def hostile() -> Iterator[Sandbox]:
    sandbox = open_hostile(item_seconds=1.0)
    yield sandbox
    sandbox.close()


def shown(data: bytes, sandbox: Sandbox | None) -> np.ndarray | None:
    is_page = data.startswith(b"%PDF")
    media = MediaItem(data=data, modality="page" if is_page else None, page=0 if is_page else None)
    return thumbnail(media, 24, ANYWHERE, TIERS["default"], sandbox)


def test_pictures_are_the_same_in_the_sandbox_and_out_of_it(hostile: Sandbox) -> None:
    for data in FILES.values():
        probe = probe_media(io.BytesIO(data), num_bytes=len(data), declared=None, name="item", page=0, dpi=72.0)
        plan = SamplePlan(pts_seconds=(probe.duration_seconds / 2,))
        expected = scaled(decode_media(io.BytesIO(data), probe, plan, None, page=0).pixels[0], 24)
        assert max(expected.shape) == 24
        for sandbox in (hostile, None):
            found = shown(data, sandbox)
            assert found is not None
            assert np.array_equal(found, expected)


def test_what_breaks_its_decoder_has_no_picture_and_the_next_has_one(hostile: Sandbox) -> None:
    for what in ("hang", "probe_segfault"):
        assert shown(order(what), hostile) is None
        assert shown(FILES["a.jpg"], hostile) is not None


def test_what_is_over_the_limits_or_a_sound_has_none(hostile: Sandbox) -> None:
    for sandbox in (hostile, None):
        assert shown(lying_sizes()["png of zeros"], sandbox) is None
        assert shown(make_audio("mp4", "aac"), sandbox) is None
        assert shown(FILES["a.jpg"][:20], sandbox) is None


def test_a_search_shows_what_it_found_from_its_run_s_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hostile: Sandbox
) -> None:
    files = {**FILES, "e.jpg": order("segfault")}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    opened, pids = [], []

    def opening(mode: str, item_seconds: float) -> Sandbox:
        opened.append((mode, item_seconds))
        hostile.start()
        pids.append(child_pid(hostile))
        return hostile

    monkeypatch.setattr(search, "open_sandbox", opening)
    config: Config = parse_config(
        {"job": "embed_backfill", "input": "", "model": "demo:dual_encoder", "decode": {"sandbox": "on"}}
    )
    hits = [hit(tmp_path / name) for name in files]
    found = search._pictures([Answers(of="media", model="demo:dual_encoder", hits=hits)], config)
    assert [name for name, picture in found.items() if picture is None] == ["e.jpg"]
    assert opened == [("on", 120.0)]
    assert not is_alive(pids[0]) and hostile._child is None


def hit(path: Path) -> Hit:
    return Hit(
        id=path.name,
        score=1.0,
        item_id=path.name,
        tenant="",
        kind="video" if path.suffix == ".mp4" else "page" if path.suffix == ".pdf" else "image",
        uri=str(path),
        page=0 if path.suffix == ".pdf" else None,
        start_char=None,
        end_char=None,
        text=None,
        source_id="",
    )
