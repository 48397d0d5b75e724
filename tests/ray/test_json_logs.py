"""Every line that a run logs as JSON is JSON, and says what it is about."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image

from tests.media.web_server import Handler, Web, make_authority

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # a minute and a half: three runs
ROOT = Path(__file__).parents[2]
NUM_ITEMS = 12
MISSING, BUSY = 9, 3  # item_index of one that is not there, and of one whose server has to be asked twice


@dataclass(frozen=True)
class Ran:
    """The lines that the driver logged, and those that its workers did."""

    code: int
    lines: list[dict[str, Any]]
    workers: list[dict[str, Any]]

    def said(self, message: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["message"] == message]


class Runner:
    """Runs one configuration, again and again."""

    def __init__(self, folder: Path, web: Web) -> None:
        self.folder, self.output = folder, folder / "output"
        pictures = [_picture(number) for number in range(NUM_ITEMS)]
        rows = []
        for number, picture in enumerate(pictures):
            (folder / f"{number}.png").write_bytes(picture)
            rows.append({"id": f"item-{number}", "image": f"{number}.png"})
        rows[MISSING]["image"] = "nowhere.png"
        rows[BUSY]["image"] = web.url("/busy.png")
        web.answers["/busy.png"] = _busy_at_first(pictures[BUSY])
        (folder / "manifest.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = {
            "job": "caption_videos",
            "input": str(folder / "manifest.jsonl"),
            "output": str(self.output),
            "model": "demo:captioner",
            "prompt": "Describe what you see.",
            "sources": {"internal_domains": ["localhost"], "allowed_ports": [web.port]},
            "generate": {"max_new_tokens": 16},
            "store": {"path": str(folder / "store")},
            "ray": {"num_cpus": 1, "object_store_bytes": 200_000_000, "first_window_items": 4, "window_items": 4},
            "logs": {"format": "json"},
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(config))

    def run(self, *settings: str, until: str | None = None) -> Ran:
        """With `until`, a glob below the output: interrupted when there is such a file."""
        scratch = Path(tempfile.mkdtemp(prefix="hr", dir="/tmp"))  # short: Ray's sockets lie below it
        command = [sys.executable, "-m", "jobs.caption_videos", "--config", str(self.folder / "config.yaml")]
        for setting in settings:
            command += ["--set", setting]
        try:
            with (scratch / "err").open("wb") as log:
                driver = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env={**os.environ, "RAY_TMPDIR": str(scratch)},
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    start_new_session=True,
                )
                while until is not None and driver.poll() is None and not list(self.output.glob(until)):
                    time.sleep(0.01)
                if until is not None:
                    driver.send_signal(signal.SIGTERM)
                code = driver.wait(120)
            logs = scratch.glob("ray/session_2*/logs/worker-*.err")
            workers = [line for log in logs for line in log.read_text().splitlines() if line.startswith("{")]
            return Ran(code, _parsed(scratch / "err"), [json.loads(line) for line in workers])
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _picture(number: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (40 + 8 * number, 64), (20 * number, 90, 200)).save(file, "PNG")
    return file.getvalue()


def _parsed(log: Path) -> list[dict[str, Any]]:
    """Every line but those of Ray's native code, which begin with the time in brackets."""
    lines = log.read_text().splitlines()
    return [json.loads(line) for line in lines if not re.match(r"\[\d{4}-\d\d-\d\d ", line)]


def _busy_at_first(data: bytes) -> Any:
    asked = []

    def answer(handler: Handler) -> None:
        asked.append(handler.path)
        if len(asked) == 1:
            handler.reply(503, b"slow down")
        else:
            handler.reply_object(data, ETag='"busy"', Content_Type="image/png")

    return answer


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    context, authority = make_authority(tmp_path, "localhost")
    with pytest.MonkeyPatch.context() as patch, Web(context) as web:
        patch.setenv("SSL_CERT_FILE", authority)
        yield Runner(tmp_path, web)


def test_a_run_a_resumption_and_a_fallback_are_told_line_by_line(runner: Runner) -> None:
    first = runner.run(until="*/_run/ledger/generate-*.json")
    assert first.code == 5
    [ended] = [line for line in first.lines if line["level"] == "error"]
    assert ended["exit_code"] == 5 and "stopped by SIGTERM" in ended["message"]
    assert first.said("run started")[0]["items"] == NUM_ITEMS and not first.said("run resumed")
    # What was tried again is told where it was: by a worker.
    [again] = [line for line in first.workers if line.get("attempt") == 1]
    assert (again["item"], again["item_index"], again["window"]) == (f"item-{BUSY}", BUSY, 0)

    second = runner.run()
    assert second.code == 0
    resumed = {line["pass"]: line["windows"] for line in second.said("run resumed")}
    assert resumed["encode"] == 3 and resumed["generate"] >= 1
    [run_id] = {line.get("run_id") for line in (*second.lines, *first.lines[1:-1])}
    assert run_id == (runner.output / "latest").read_text().strip()
    published = [line["window"] for line in second.said("window published")]
    assert published == list(range(resumed["generate"], 3))
    _assert_letter(runner, second.said("quarantined"))
    [done] = second.said("run ended")
    assert done["counts"] == {
        "items_in": NUM_ITEMS,
        "items_written": NUM_ITEMS - 1,
        "items_reused": 0,
        "items_quarantined": 1,
        "items_skipped": 0,
    }
    batches = [line for ran in (first, second) for line in ran.said("batch done") if line["pass"] == "encode"]
    assert sum(line["counts"].get("encodes", 0) for line in batches) == NUM_ITEMS - 1
    assert all(line["window"] in (0, 1, 2) and line["batch"] >= 0 and line["digest"] for line in batches)

    # Features that the catalogue lists, and that are gone.
    for shard in (runner.folder / "store").glob("shards/*"):
        shutil.rmtree(shard) if shard.is_dir() else shard.unlink()
    third = runner.run("prompt=What moves?")
    assert third.code == 0
    fallbacks = third.said("fallback")
    assert sum(line["media"] for line in fallbacks) == NUM_ITEMS - 1
    assert {line["tier"] for line in fallbacks} == {"features"} and all(line["shard"] for line in fallbacks)


def _assert_letter(runner: Runner, quarantined: list[dict[str, Any]]) -> None:
    """The one line is of the one dead letter."""
    [path] = runner.output.glob("*/quarantine/*.parquet")
    [letter] = pq.read_table(path).to_pylist()
    [line] = quarantined
    assert line["item"] == letter["id"] == f"item-{MISSING}"
    assert [line[name] for name in ("item_index", "media_index", "stage", "code", "reason")] == [
        letter[name] for name in ("item_index", "media_index", "stage", "code", "message")
    ]
    assert (line["window"], line["item_index"]) == (2, MISSING)
