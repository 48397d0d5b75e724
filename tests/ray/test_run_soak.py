"""A long run over a network and a disk that fail: nothing is lost, memory stays flat, every fault is counted."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from pipeline.demo.media import make_demo_media
from tests.media.web_server import Web
from tests.ray.conftest import Driver, Job
from tests.ray.faulty_web import FaultyMedia, is_broken

FAULTS, BROKEN = 0.02, 0.02
FIRST_ITEMS = 48
SHIM = Path(__file__).parents[1] / "features" / "faults.c"
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="the library that injects faults is built by cc")


class Watch:
    """What the driver holds of its own (RssAnon, bytes), every half second from now on.

    `media` fail no more once all is done but the page, whose pictures are read once more and counted by nobody.
    """

    def __init__(self, driver: Driver, job: Job, media: FaultyMedia) -> None:
        self.held: list[int] = []
        self._driver, self._job, self._media = driver, job, media
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        status = Path(f"/proc/{self._driver.process.pid}/status")
        looks, is_working = 0, False
        while self._driver.process.poll() is None:
            if looks % 50 == 0:
                lines = status.read_text().splitlines()
                self.held += [1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:")]
            if (self._job.output / "latest").exists():
                was_working, is_working = is_working, (self._job.folder / "_work").exists()
                if was_working and not is_working:
                    self._media.calm()
            looks += 1
            time.sleep(0.01)


def write_job(folder: Path, urls: list[str], port: int) -> Job:
    """Captions of what lies at `urls`; windows are small, so that many are written."""
    folder.mkdir()
    rows = [json.dumps({"id": str(number), "uri": url}) for number, url in enumerate(urls)]
    (folder / "manifest.jsonl").write_text("\n".join(rows))
    config = {
        "job": "caption_videos",
        "input": str(folder / "manifest.jsonl"),
        "output": str(folder / "output"),
        "model": "demo:captioner",
        "prompt": "What colour is the shape?",
        "max_quarantined_fraction": 0.2,
        "sources": {
            "http": True,
            "internal_domains": ["localhost"],
            "allowed_ports": [port],
            "read_seconds": 1.0,
        },
        "sampling": {"policy": "uniform", "num_frames": 4},
        "encode": {"device": "cpu"},
        "generate": {"max_new_tokens": 8, "device": "cpu"},
        "store": {"path": str(folder / "store")},
        "ray": {"num_cpus": 2, "object_store_bytes": 200_000_000, "first_window_items": 32, "window_items": 64},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return Job(config=folder / "config.yaml", output=folder / "output")


def check_all_there(job: Job, num_items: int, first: int) -> dict[str, Any]:
    """Each item has one row, in order; those that are broken, and no others, are out. The summary."""
    rows = [row for name in sorted(job.parts()) for row in pq.read_table(job.folder / name).to_pylist()]
    assert [row["item_index"] for row in rows] == list(range(num_items))
    out = [row["item_index"] for row in rows if row["status"] != "ok"]
    assert out == [number for number in range(num_items) if is_broken(first + number, BROKEN)]
    assert all(row["text"] for row in rows if row["status"] == "ok")
    summary = job.summary()
    assert summary["items_written"] + summary["items_quarantined"] == num_items
    assert summary["items_quarantined"] == len(out) == sum(summary["quarantine"].values())
    return summary


@pytest.fixture
def shim(tmp_path: Path) -> Path:
    target = tmp_path / "faults.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-w", "-o", str(target), str(SHIM), "-ldl"], check=True)
    return target


@pytest.mark.parametrize("seconds", [20, pytest.param(3600, marks=[pytest.mark.slow, pytest.mark.timeout(3 * 3600)])])
def test_a_run_over_what_fails(
    seconds: int,
    tmp_path: Path,
    shim: Path,
    start: Callable[..., Driver],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_demo_media(str(tmp_path / "media" / "manifest.jsonl"), images=24, videos=16, seed=5)
    files = sorted(path for path in (tmp_path / "media").rglob("*") if path.suffix in (".jpg", ".png", ".mp4"))
    with Web() as web:
        media = FaultyMedia(web, files, faults=FAULTS, broken=BROKEN, stall_seconds=3.0, seed=seconds)
        job = write_job(tmp_path / "first", media.list(range(FIRST_ITEMS)), web.port)
        # The disk is full once: the run ends, and once there is room the same command finishes it.
        with monkeypatch.context() as full:
            for name, value in (
                ("LD_PRELOAD", str(shim)),
                ("FAULT_PATH", str(tmp_path / "first" / "store" / "open")),
                ("FAULT_CALL", "pwrite"),
                ("FAULT_KIND", "enospc"),
                ("FAULT_AT", "1"),
            ):
                full.setenv(name, value)
            driver = start(job)
            assert driver.wait() == 1, driver.said
            assert "No space left on device" in driver.said
        begun = time.monotonic()
        driver = start(job)
        assert driver.wait() == 0, driver.said
        rate = FIRST_ITEMS / (time.monotonic() - begun)
        check_all_there(job, FIRST_ITEMS, 0)

        before = Counter(media.injected)
        num_items = max(2 * FIRST_ITEMS, round(rate * seconds))
        numbers = range(FIRST_ITEMS, FIRST_ITEMS + num_items)
        job = write_job(tmp_path / "second", media.list(numbers), web.port)
        driver = start(job)
        watch = Watch(driver, job, media)
        assert driver.wait() == 0, driver.said
        summary = check_all_there(job, num_items, FIRST_ITEMS)
        counted, injected = summary["fetch_retries"], media.injected - before
    half = len(watch.held) // 2
    early, late = max(watch.held[half // 2 : half]), max(watch.held[half:])
    print(
        f"{num_items} items, faults {dict(injected)}, {counted} repeated; {dict(summary['quarantine'])}; "
        f"the driver held {early / 2**20:.0f} MB, then {late / 2**20:.0f} MB"
    )
    # A request on a connection that was kept, and is reset before an answer, is sent once more by the client itself.
    assert 0 < injected.total() - injected["reset"] <= counted <= injected.total()
    assert late < 1.1 * early + 10 * 2**20
