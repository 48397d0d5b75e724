"""What a run holds on a small machine: decoding workers, seen from outside, and the object store."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.media.media_files import Recipe, make_video
from tests.ray.conftest import ROOT

pytestmark = pytest.mark.timeout(400)
MB = 2**20
NUM_CLIPS, BATCH_CLIPS = 320, 16
CLIP_BYTES = 16 * 160 * 128 * 3  # 16 frames, the size that the demo's processor leaves as it is
STORE_BYTES = 100_000_000  # of 315 MB that go through it
# Encodes on a Ray of its own, and prints how much the object store has written to disk.
PROGRAM = """
import ray, sys
from ray._private.internal_api import get_memory_info_reply, get_state_from_address
import pipeline
ray.init(num_cpus=1, object_store_memory=int(sys.argv[3]), _memory=int(sys.argv[4]), _temp_dir=sys.argv[2],
         include_dashboard=False, log_to_driver=False)
pipeline.encode(sys.argv[1] + "/manifest.jsonl", sys.argv[1] + "/job.yaml")
state = get_state_from_address(ray.get_runtime_context().gcs_address)
print("spilled", get_memory_info_reply(state).store_stats.spilled_bytes_total)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One clip, listed over and over, and a job that encodes it each time."""
    clip = make_video(Recipe(size=(160, 128), num_frames=32, rate=8, options={"preset": "ultrafast"}))
    (tmp_path / "clip.mp4").write_bytes(clip)
    rows = [json.dumps({"id": str(i), "uri": "clip.mp4"}) for i in range(NUM_CLIPS)]
    (tmp_path / "manifest.jsonl").write_text("\n".join(rows))
    config = {
        "job": "caption_videos",
        "input": "",
        "output": str(tmp_path / "output"),
        "model": "demo:captioner",
        "sampling": {"policy": "fps", "fps": 4, "max_frames": 16},
        "encode": {"device": "cpu", "max_batch_items": BATCH_CLIPS},
        "store": {"path": str(tmp_path / "store"), "reuse": False},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(config))  # JSON is YAML
    return tmp_path


@pytest.fixture
def scratch() -> Iterator[str]:
    """A folder for Ray's session."""
    path = tempfile.mkdtemp(prefix="hr", dir="/tmp")  # short: Ray's sockets lie below it
    yield path
    shutil.rmtree(path, ignore_errors=True)


def start(folder: Path, scratch: str, memory_bytes: float) -> subprocess.Popen[str]:
    """The program in a session of its own, on one CPU and as much memory as Ray gives out."""
    command = [sys.executable, "-c", PROGRAM, str(folder), scratch, str(STORE_BYTES), str(int(memory_bytes))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def own_bytes(session: int, title: str) -> dict[int, int]:
    """What processes of the session with such a title hold of their own (RssAnon), in bytes, by process id."""
    found = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.getsid(int(entry)) == session and title in Path(f"/proc/{entry}/cmdline").read_text():
                lines = Path(f"/proc/{entry}/status").read_text().splitlines()
                found[int(entry)] = next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))
        except (FileNotFoundError, ProcessLookupError, StopIteration):
            continue
    return found


def test_a_small_machine_decodes_within_its_bar_and_spills_nothing(folder: Path, scratch: str) -> None:
    with start(folder, scratch, 2.3 * 2**30) as process:  # of a machine of 4 GB
        decoding: dict[int, int] = {}
        while process.poll() is None:
            for pid, held in own_bytes(process.pid, "DecodeBatches").items():
                decoding[pid] = max(held, decoding.get(pid, 0))
            time.sleep(0.1)
        said = process.stdout.read() if process.stdout else ""
    assert process.returncode == 0, said
    assert said.split()[-2:] == ["spilled", "0"]
    assert decoding
    assert max(decoding.values()) <= 300 * MB + 4 * BATCH_CLIPS * CLIP_BYTES


@pytest.mark.slow
def test_a_machine_without_the_memory_is_told_so(folder: Path, scratch: str) -> None:
    with start(folder, scratch, 1.5 * 2**30) as process:
        said, _ = process.communicate()
    assert process.returncode != 0
    assert "UnschedulableError: 1 workers of" in said and "the cluster has 1,611 MB; add memory, or lower" in said


@pytest.mark.slow
def test_thousands_of_small_images(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "scripts" / "bench" / "memory"), "--quick"]
    done = subprocess.run([*script, "--json", str(tmp_path / "rows.json")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
