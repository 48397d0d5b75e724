"""`headrace submit`, through the job server of a real cluster: log, exit codes, a stopped job that goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from pipeline.demo.media import make_demo_media
from pipeline.runs.run_folder import find_run
from pipeline.runs.status import run_status
from tests.ray.ray_nodes import RAY, free_port, ray_nodes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]  # 3 minutes: a cluster with its job server, five jobs
pytest.importorskip("aiohttp_cors", reason="the job server comes with ray[default]")
ROOT = Path(__file__).parents[2]
HEADRACE = str(Path(sys.executable).with_name("headrace"))


@pytest.fixture
def job_server() -> Iterator[str]:
    """The address of the job server of a cluster of this machine's, of two CPUs."""
    with ray_nodes(os.environ, "--num-cpus=2", "--object-store-memory=300000000", more=0) as cluster:
        yield cluster.address


@pytest.fixture
def working_dir(tmp_path: Path) -> Path:
    """A folder with a configuration and nothing else that a job needs."""
    folder = tmp_path / "work"
    folder.mkdir()
    make_demo_media(str(tmp_path / "drawn" / "manifest.jsonl"), images=16, videos=8, seed=3)
    raw = {
        "job": "caption_videos",
        "input": str(tmp_path / "drawn" / "manifest.jsonl"),
        "output": str(tmp_path / "output"),
        "model": "demo:captioner",
        "prompt": "Describe what you see.",
        "store": {"path": str(tmp_path / "store")},
        "ray": {"first_window_items": 4, "window_items": 4},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(raw))
    return folder


def submit(address: str, working_dir: Path, *more: str) -> subprocess.Popen[str]:
    command: Sequence[str] = [
        *(HEADRACE, "submit", str(working_dir / "run.yaml")),
        *("--address", address, "--working-dir", str(working_dir), *more),
    ]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(submitted: subprocess.Popen[str], folder: Path, pattern: str) -> None:
    """Until a run has such a file."""
    while not list(folder.glob(f"output/*/{pattern}")):
        assert submitted.poll() is None, "\n".join(submitted.communicate())
        time.sleep(0.05)


def test_log_and_exit_code_come_back_and_a_stopped_job_goes_on(
    job_server: str, working_dir: Path, tmp_path: Path
) -> None:
    # Stopped there by another command, the job ends resumably; who waits for it here is told so.
    stopped = submit(job_server, working_dir, "--submission-id", "stopped")
    wait_for(stopped, tmp_path, "_run/plans/encode-*.json")
    stop = subprocess.run([RAY, "job", "stop", "--address", job_server, "stopped"], capture_output=True, text=True)
    assert stop.returncode == 0, stop
    said = stopped.communicate(timeout=60)
    assert stopped.returncode == 5, said
    assert run_status(find_run(str(tmp_path / "output"))).state == "interrupted"

    # Interrupted here, the job is stopped there; its run can be resumed.
    first = submit(job_server, working_dir, "--submission-id", "first")
    wait_for(first, tmp_path, "_run/ledger/generate-*.json")
    first.send_signal(signal.SIGINT)
    said = first.communicate(timeout=60)
    assert first.returncode == 5, said
    assert "stopping job first" in said[1]
    status = run_status(find_run(str(tmp_path / "output")))
    assert status.state == "interrupted" and 0 < status.passes["generate"].windows < 6

    second = submit(job_server, working_dir)
    said = second.communicate(timeout=180)
    assert second.returncode == 0, said
    assert "24 of 24 items written" in said[0]
    assert run_status(find_run(str(tmp_path / "output"))).state == "done"

    # Another run, of which more is quarantined than allowed: the job's own code.
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps({"id": "gone", "media": [{"modality": "image", "uri": str(tmp_path / "absent.png")}]}))
    third = submit(job_server, working_dir, "--set", f"input={bad}", "--set", "max_quarantined_fraction=0")
    said = third.communicate(timeout=120)
    assert third.returncode == 3, said
    refused = submit(job_server, working_dir, "--set", "input=/nowhere/at/all")
    said = refused.communicate(timeout=120)
    assert refused.returncode == 2, said


def test_a_cluster_that_is_not_there_is_refused(working_dir: Path) -> None:
    refused = submit(f"http://127.0.0.1:{free_port()}", working_dir)
    _, said = refused.communicate(timeout=60)
    assert refused.returncode == 2 and "no cluster's job server there" in said
