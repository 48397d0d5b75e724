"""Headers read in a child: the same facts, asked for by ranges, and whatever the bytes do to it costs one item."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import ItemError, TransientError
from pipeline.media.probe import probe_media
from pipeline.media.sandbox import Probers, Sandbox
from pipeline.schema import Probe
from tests.media.media_files import Recipe, make_audio, make_image, make_video
from tests.media.pdf_files import Page, make_pdf
from tests.media.sandboxed import child_pid, open_fds, order

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the child is kept in by Linux")
ROOT = Path(__file__).parents[2]
JPEG = make_image("JPEG")
MP4 = make_video(Recipe(num_frames=60))


class Storage(io.BytesIO):
    """An object in storage: what is read of it, and how slowly."""

    def __init__(self, data: bytes, *, seconds: float = 0.0, error: Exception | None = None) -> None:
        super().__init__(data)
        self.seconds, self.error, self.num_read = seconds, error, 0

    def read(self, size: int | None = -1) -> bytes:
        time.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        data = super().read(size)
        self.num_read += len(data)
        return data


def request(data: bytes, **changes: Any) -> dict[str, Any]:
    return {"num_bytes": len(data), "declared": None, "name": "item", "page": None, **changes}


def outcome(probe: Any, data: bytes | io.BytesIO, **changes: Any) -> Probe | tuple[str, str, str]:
    file = data if isinstance(data, io.BytesIO) else io.BytesIO(data)
    try:
        found: Probe = probe(file, **request(file.getvalue(), **changes))
    except ItemError as error:
        return error.stage, error.code, re.sub("<_io.*>", "<the file>", error.message)
    return found


PDF = make_pdf([Page(), Page(media_box=(0, 0, 300, 200))])
FILES = {
    "jpeg": JPEG,
    "png": make_image("PNG"),
    "webp": make_image("WEBP"),
    "tiff": make_image("TIFF"),
    "gif": make_image("GIF"),
    "mp4": MP4,
    "mp4-in-front": make_video(Recipe(container_options={"movflags": "faststart"}, rotation=90)),
    "webm": make_video(Recipe(container="webm", library="libvpx-vp9", options={"cpu-used": "8"})),
    "mpegts": make_video(Recipe(container="mpegts")),
    "sound": make_audio("mp4", "aac"),
    "mp4-of-200-KB": MP4[:32] + (200_000).to_bytes(4, "big") + b"free" + bytes(199_992) + MP4[32:],
    "text": b"Dear photographer" * 100,
    "head-only": JPEG[:20],
    "headless": MP4[: len(MP4) // 2],
    # Found by `scripts/fuzz_media`: sides that 32 bits with a sign do not hold, for admission to refuse.
    "bmp-of-4-billion-columns": make_image("BMP").replace(b"\x60\0\0\0\x40\0\0\0", b"\xff\xff\xff\xff\x40\0\0\0", 1),
}


@pytest.mark.parametrize("name", FILES)
def test_facts_and_failures_are_those_of_this_process(shared: Sandbox, name: str) -> None:
    expected = outcome(probe_media, FILES[name])
    assert outcome(shared.probe, FILES[name]) == expected  # the beginning handed over
    assert outcome(shared.probe, Storage(FILES[name])) == expected  # all asked for


@pytest.mark.parametrize("data", [PDF, PDF[: len(PDF) // 2], PDF.replace(b"/Pages 2 0 R", b"/Pages 9 9 R")])
@pytest.mark.parametrize("page", [0, 1, 2, None])
def test_pages_too(shared: Sandbox, data: bytes, page: int | None) -> None:
    assert outcome(shared.probe, data, page=page) == outcome(probe_media, data, page=page)


def test_what_is_declared_and_the_resolution_are_passed_on(shared: Sandbox) -> None:
    for changes in ({"declared": "video"}, {"page": 1, "dpi": 30.0}):
        data = JPEG if "declared" in changes else PDF
        assert outcome(shared.probe, data, **changes) == outcome(probe_media, data, **changes)


def test_of_a_large_object_little_is_read(shared: Sandbox) -> None:
    storage = Storage(JPEG + bytes(50 * 2**20))
    shared.probe(storage, **request(storage.getvalue()))
    assert storage.num_read < 2**20


def test_time_that_storage_takes_is_not_the_item_s(hostile: Sandbox) -> None:
    assert hostile.probe(Storage(JPEG, seconds=1.5), **request(JPEG)).width == 96


@pytest.mark.parametrize(
    "error", [TransientError("503"), ItemError("fetch", "not_found", "gone"), TimeoutError("slow")]
)
def test_what_storage_raises_is_raised(hostile: Sandbox, error: Exception) -> None:
    with pytest.raises(OSError if isinstance(error, TimeoutError) else type(error)) as caught:
        hostile.probe(Storage(JPEG, error=error), **request(JPEG))
    assert not isinstance(caught.value, TimeoutError)
    assert hostile.probe(io.BytesIO(JPEG), **request(JPEG)).width == 96


LIES = (
    "{'width': -1}",
    "{'width': 0}",
    "{'width': 2**62}",
    "{'height': 1.5}",
    "{'num_bytes': 5}",
    "{'duration_seconds': float('inf')}",
    "{'rate_fps': 1}",
    "{'num_frames': 2**62}",
    "{'num_frames': True}",
    "{'modality': 'smell'}",
    "{'codec': '<b>'}",
    "{'container': 'x' * 101}",
    "{'more': 1}",
)


@pytest.mark.parametrize(
    ("what", "code"),
    [("probe_hang", "timeout"), ("probe_segfault", "crashed"), *((f"probe_as {lie}", "crashed") for lie in LIES)],
)
def test_a_header_that_breaks_its_reader_costs_its_item(hostile: Sandbox, what: str, code: str) -> None:
    started = time.monotonic()
    found = outcome(hostile.probe, order(what))
    assert isinstance(found, tuple)
    assert found[:2] == ("probe", code)
    assert found[2].startswith("item: ")
    assert time.monotonic() - started < 12
    assert hostile._child is None


def test_reading_for_ever_ends(monkeypatch: pytest.MonkeyPatch, shared: Sandbox) -> None:
    monkeypatch.setattr("pipeline.media.sandbox_process._MORE_READ_BYTES", 2**20)
    found = outcome(shared.probe, Storage(order("probe_for_ever")))
    assert found == ("probe", "crashed", "item: the decoder's answer makes no sense: ['read']")


def test_nothing_leaks_over_200_headers(shared: Sandbox) -> None:
    shared.probe(io.BytesIO(JPEG), **request(JPEG))
    pid = child_pid(shared)
    before = open_fds(), open_fds(pid)
    for number in range(200):
        data = (JPEG, MP4, PDF, JPEG[:20])[number % 4]
        outcome(shared.probe, data, page=0)
    assert (open_fds(), open_fds(pid)) == before
    assert child_pid(shared) == pid


@pytest.mark.slow
def test_broken_media_end_in_a_verdict(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "scripts" / "fuzz_media"), "--minutes", "0.5", "--finds", str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_threads_share_a_few() -> None:
    from concurrent.futures import ThreadPoolExecutor

    sandboxes = [Sandbox(item_seconds=20) for _ in range(2)]
    probers = Probers(sandboxes)
    with ThreadPoolExecutor(8) as pool:
        files = [JPEG, MP4] * 40
        found = list(pool.map(lambda data: probers.probe(Storage(data, seconds=0.001), **request(data)), files))
    assert found == [probe_media(io.BytesIO(data), **request(data)) for data in files]
    assert all(sandbox._child is not None for sandbox in sandboxes)
    for sandbox in sandboxes:
        sandbox.close()
