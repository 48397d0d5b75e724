"""Whole runs as their own processes: started, watched, killed, and looked for afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.demo.media import make_demo_media
from pipeline.models.location import resolve_model
from tests.media.media_files import Recipe, make_video

ROOT = Path(__file__).parents[2]
NUM_ITEMS = 64  # windows of 8, 16, 32 and 8: two segments
CLIP_PLACES = range(10, 40, 10)
_POLL_SECONDS = 0.005
# Ray's own, when its control store ends with a driver: workers that were starting (the last title) or had just started
# and had no task yet look for that store for up to a minute (ray 2.60: 20 to 62 s) before they end. So do its agents
# when a driver is killed; one that ends by itself ends them.
_RAY_STARTING = ("ray::IDLE", "default_worker.py")
_RAY_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
_RAY_SECONDS = 90


@dataclass(frozen=True)
class Job:
    """A configuration file, and where its run puts things."""

    config: Path
    output: Path

    @property
    def folder(self) -> Path:
        """The run's folder, which exists once it has started."""
        return self.output / (self.output / "latest").read_text().strip()

    def ledger(self, name: str) -> dict[str, tuple[bytes, int]]:
        """(bytes, mtime) of a pass's ledger files; none before the run has a folder."""
        return files(self.folder, f"_run/ledger/{name}-*") if (self.output / "latest").exists() else {}

    def parts(self) -> dict[str, bytes]:
        """The bytes of each part."""
        return {path.name: path.read_bytes() for path in sorted(self.folder.glob("part-*.parquet"))}

    def summary(self) -> dict[str, Any]:
        """summary.json."""
        return dict(json.loads((self.folder / "summary.json").read_text()))


def files(folder: Path, pattern: str) -> dict[str, tuple[bytes, int]]:
    """(bytes, mtime in ns) by relative name; what is half written does not count."""
    found = [path for path in folder.glob(pattern) if path.is_file() and path.suffix != ".tmp"]
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in found}


def kill_all(pids: list[int]) -> None:
    """SIGKILL to each that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Driver:
    """`python -m jobs.NAME` as a session of its own, which all processes of its Ray belong to."""

    def __init__(self, job: Job, *settings: str, name: str = "caption_videos") -> None:
        self.scratch = tempfile.mkdtemp(prefix="hr", dir="/tmp")  # short: Ray's sockets lie below it
        self.log = Path(self.scratch) / "log"
        self._ended: float | None = None
        command = [sys.executable, "-m", f"jobs.{name}", "--config", str(job.config)]
        for setting in settings:
            command += ["--set", setting]
        environment = {**os.environ, "TMPDIR": self.scratch, "RAY_TMPDIR": self.scratch}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def said(self) -> str:
        """What it printed."""
        return self.log.read_text()

    def wait(self) -> int:
        """Its exit code, once it and everything it started are gone, besides what is Ray's own."""
        code = self.process.wait()
        self._ended = time.monotonic()
        self._assert_gone(_RAY_STARTING if code >= 0 else (*_RAY_STARTING, *_RAY_AGENTS), self._ended + 45)
        return code

    def signal(self, number: int) -> int:
        """Signal the driver alone, then `wait`."""
        self.process.send_signal(number)
        return self.wait()

    def until(self, happened: Callable[[], Any]) -> Any:
        """Wait for a truth; an end of the driver before it is a failure."""
        while not (value := happened()):
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.said}"
            time.sleep(_POLL_SECONDS)
        return value

    def processes(self, title: str = "") -> list[int]:
        """Live processes of the session whose title holds `title`."""
        entries = [entry for entry in os.listdir("/proc") if entry.isdigit()]
        return [int(entry) for entry in entries if self._is_ours(entry) and title in _title(entry)]

    def close(self) -> None:
        """End what runs. Nothing that it started may outlive it by more than `_RAY_SECONDS`."""
        try:
            if self._ended is not None:
                self._assert_gone((), self._ended + _RAY_SECONDS)
        finally:
            self.kill()
            shutil.rmtree(self.scratch, ignore_errors=True)

    def _assert_gone(self, but: tuple[str, ...], deadline: float) -> None:
        while (left := self._titles(but)) and time.monotonic() < deadline:
            time.sleep(0.1)
        if left:
            self.kill()
        assert not left, f"still there when they had to be gone: {left}"

    def _titles(self, but: tuple[str, ...]) -> set[str]:
        titles = {_title(str(pid)) for pid in self.processes()}
        return {title for title in titles if not any(name in title for name in but)}

    def scratch_files(self) -> list[str]:
        """What lies in the folder for temporary files besides Ray's session, the log and torch's cache of kernels."""
        names = (name for name in os.listdir(self.scratch) if name not in ("log", "ray") and "session" not in name)
        return sorted(name for name in names if not name.startswith("torchinductor_"))

    def kill(self) -> None:
        """End all of it at once, as when a machine loses its power."""
        kill_all(self.processes())
        self.process.wait()

    def _is_ours(self, entry: str) -> bool:
        try:
            state, _, _, session = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            return False
        return int(session) == self.process.pid and state != "Z"


def _title(entry: str) -> str:
    try:
        return Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


@contextlib.contextmanager
def drivers() -> Iterator[Callable[..., Driver]]:
    """Starts drivers as `Driver` does, and closes them all at the end."""
    with contextlib.ExitStack() as closing:

        def begin(job: Job, *settings: str, name: str = "caption_videos") -> Driver:
            driver = Driver(job, *settings, name=name)
            closing.callback(driver.close)
            return driver

        yield begin


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[..., Driver]]:
    """Starts drivers; whatever a failing test left of them ends with the module."""
    with drivers() as begin:
        yield begin


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A manifest of more than `NUM_ITEMS` items: images, clips, thrice one large clip, and one that is missing."""
    folder = tmp_path_factory.mktemp("corpus")
    make_demo_media(str(folder / "manifest.jsonl"), images=70, videos=6, seed=23)
    clip = make_video(Recipe(size=(720, 1280), num_frames=48, rate=12, options={"preset": "ultrafast"}))
    (folder / "large.mp4").write_bytes(clip)
    rows = [json.loads(line) for line in (folder / "manifest.jsonl").read_text().splitlines()]
    for place in CLIP_PLACES:
        rows[place] = {"id": f"large-{place}", "media": [{"uri": "large.mp4"}]}
    rows[5] = {"id": "missing", "media": [{"uri": "nowhere.jpg"}]}
    path = folder / "mixed.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model, out of reach of whoever trains it anew meanwhile."""
    return Path(shutil.copytree(resolve_model("demo:captioner"), tmp_path_factory.mktemp("model") / "captioner"))


@pytest.fixture(scope="module")
def make_job(corpus: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Job]:
    """A job over the corpus with an output and a store of its own, and `workers` of each kind.

    Answers are sampled at a temperature that makes every one long and different, whatever the weights: items that
    change places show, and so do seeds that depend on the batch. Without reuse, equal clips are encoded each. Batches
    are small, for a kill must find some that are done and some that are not.
    """

    def make(name: str, workers: int) -> Job:
        folder = tmp_path_factory.mktemp(name)
        config = {
            "job": "caption_videos",
            "input": str(corpus),
            "output": str(folder / "output"),
            "model": str(model),
            "prompt": "Describe what you see.",
            "limit": NUM_ITEMS,
            "sampling": {"policy": "fps", "fps": 2, "max_frames": 16},
            "encode": {"max_batch_items": 1, "device": "cpu"},
            "generate": {"max_new_tokens": 40, "temperature": 50.0, "seed": 3, "max_batch_items": 3, "device": "cpu"},
            "store": {"path": str(folder / "store"), "reuse": False, "keep_frames": True},
            "ray": {
                "num_cpus": workers,
                "object_store_bytes": 200_000_000,
                "decode_workers": workers,
                "encode_workers": workers,
                "generate_workers": workers,
                "first_window_items": 8,
                "window_items": 32,
                "segment_windows": 3,
            },
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        return Job(config=folder / "config.yaml", output=folder / "output")

    return make
