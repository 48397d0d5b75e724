"""A run's metrics, as Prometheus would read them from Ray's port, beside its summary."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.ray.conftest import Driver, Job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # a minute and a half: a cluster, two runs
pytest.importorskip("opentelemetry.exporter.prometheus", reason="Ray's agent of metrics comes with ray[default]")
ROOT = Path(__file__).parents[2]
RAY = str(Path(sys.executable).with_name("ray"))
Samples = dict[str, list[tuple[dict[str, str], float]]]

# What the summary calls it → the counter, and its labels.
COUNTERS: dict[str, tuple[str, dict[str, str]]] = {
    "items_written": ("items", {"status": "written"}),
    "items_quarantined": ("items", {"status": "quarantined"}),
    "media_in": ("media", {}),
    "fetches": ("fetches", {}),
    "bytes_fetched": ("fetched_bytes", {}),
    "fetch_retries": ("fetch_retries", {}),
    "images_decoded": ("decoded_images", {}),
    "frames_decoded": ("decoded_frames", {}),
    "encodes": ("encodes", {}),
    "computed_tokens": ("encoder_tokens", {}),
    "padded_tokens": ("encoder_padded_tokens", {}),
    "prompt_tokens": ("prompt_tokens", {}),
    "prompt_padded_tokens": ("prompt_padded_tokens", {}),
    "generated_tokens": ("generated_tokens", {}),
    "decode_slots": ("decode_slots", {}),
    "idle_decode_slots": ("idle_decode_slots", {}),
    "features_reused": ("cache_hits", {"tier": "features"}),
    "fallbacks": ("cache_fallbacks", {"tier": "features"}),
    "frames_reused": ("cache_hits", {"tier": "frames"}),
    "frames_missed": ("cache_misses", {"tier": "frames"}),
    "frames_bytes_read": ("cache_read_bytes", {"tier": "frames"}),
    "frames_bytes_written": ("cache_written_bytes", {"tier": "frames"}),
}


@dataclass(frozen=True)
class ScrapedCluster:
    address: str
    metrics_port: int

    def scrape(self) -> Samples:
        """headrace's samples by name; none while nothing answers at the port."""
        found: Samples = defaultdict(list)
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=10) as answer:
                text = answer.read().decode()
        except (urllib.error.URLError, ConnectionError):
            return found
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith("ray_headrace_"):
                    found[sample.name].append((sample.labels, sample.value))
        return found


def value(samples: Samples, name: str, **labels: str) -> float:
    """Of all workers together."""
    return sum(each for own, each in samples.get(name, ()) if labels.items() <= own.items())


@pytest.fixture(scope="module")
def cluster() -> Iterator[ScrapedCluster]:
    """One node of two CPUs, started as an operator starts it."""
    scratch = tempfile.mkdtemp(prefix="hr", dir="/tmp")  # short: Ray's sockets lie below it
    ports = []
    for _ in range(2):
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            ports.append(listening.getsockname()[1])
    command = [RAY, "start", "--head", "--block", "--num-cpus=2", "--object-store-memory=300000000"]
    options = [f"--port={ports[0]}", f"--metrics-export-port={ports[1]}", "--include-dashboard=false"]
    environment = {**os.environ, "RAY_TMPDIR": scratch, "TMPDIR": scratch, "RAY_metrics_report_interval_ms": "1000"}
    with open(Path(scratch) / "log", "wb") as log:
        node = subprocess.Popen(
            [*command, *options, "--disable-usage-stats"],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    found = ScrapedCluster(f"127.0.0.1:{ports[0]}", ports[1])
    try:
        deadline = time.monotonic() + 90
        while not _answers(found):
            assert time.monotonic() < deadline, (Path(scratch) / "log").read_text()
            time.sleep(0.5)
        yield found
    finally:
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                if os.getsid(int(entry)) == node.pid:
                    os.kill(int(entry), signal.SIGKILL)
            except ProcessLookupError:
                continue
        node.wait(60)
        shutil.rmtree(scratch, ignore_errors=True)


def _answers(cluster: ScrapedCluster) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", cluster.metrics_port)) == 0


def settings(cluster: ScrapedCluster, *more: str) -> tuple[str, ...]:
    one_worker = [f"ray.{kind}_workers=1" for kind in ("decode", "encode", "generate")]
    local = ("ray.num_cpus=null", "ray.object_store_bytes=null")
    return f"ray.address={cluster.address}", *local, *one_worker, "encode.max_batch_items=4", "limit=32", *more


def last_scrape(cluster: ScrapedCluster, run_id: str) -> Samples:
    """What the port has of a run that has ended: its driver's last report is in."""
    time.sleep(3)
    samples = cluster.scrape()
    return {name: [each for each in found if each[0]["run_id"] == run_id] for name, found in samples.items()}


def test_a_run_is_scraped_while_it_runs_and_its_counters_are_the_summary_s(
    cluster: ScrapedCluster, make_job: Callable[..., Job], start: Callable[..., Driver]
) -> None:
    job = make_job("scraped", workers=1)
    driver = start(job, *settings(cluster, "store.reuse=true"))
    done, seen = "ray_headrace_done_batches_total", []
    while driver.process.poll() is None:
        seen.append(value(cluster.scrape(), done))
        time.sleep(0.5)
    assert driver.wait() == 0, driver.said
    summary = job.summary()
    assert seen == sorted(seen)
    samples = last_scrape(cluster, summary["run_id"])
    assert any(0 < each < value(samples, done) for each in seen), seen
    for name, (counter, labels) in COUNTERS.items():
        assert value(samples, f"ray_headrace_{counter}_total", **labels) == summary[name], name
    assert summary["items_quarantined"] == 1 and summary["frames_bytes_written"] > 0
    codes = {own["code"]: each for own, each in samples["ray_headrace_quarantined_items_total"]}
    assert codes == summary["quarantine"]
    for each in ("encode", "generate"):
        planned = value(samples, "ray_headrace_planned_batches_total", **{"pass": each})
        assert planned == value(samples, "ray_headrace_done_batches_total", **{"pass": each}) > 0
        assert value(samples, "ray_headrace_queue_seconds_count", queue=each) == planned  # ready once, taken once
    _assert_latencies(samples, summary)
    labels = {name for found in samples.values() for own, _ in found for name in own}
    own = {"run_id", "stage", "modality", "queue", "tier", "code", "status", "pass", "le"}
    rays = {"Component", "NodeAddress", "SessionName", "Version", "WorkerId"}
    assert {name for name in labels if not name.startswith("otel_scope")} == own | rays

    # The same items once more, under another prompt: the caches have all of it.
    assert start(job, *settings(cluster, "store.reuse=true", "prompt=What moves?")).wait() == 0
    summary = job.summary()
    samples = last_scrape(cluster, summary["run_id"])
    assert value(samples, "ray_headrace_cache_hits_total", tier="features") == summary["features_reused"] == 31
    assert value(samples, "ray_headrace_encodes_total") == summary["encodes"] == 0


def _assert_latencies(samples: Samples, summary: dict) -> None:  # type: ignore[type-arg]
    """Each stage's time is the summary's, and what was observed is of the kinds and numbers that there are."""
    for stage in ("media_decode", "vision_encode", "commit", "llm_prefill", "llm_decode", "probe", "prompt"):
        told = value(samples, "ray_headrace_busy_seconds_total", stage=stage)
        assert told == pytest.approx(summary["seconds"][stage], rel=1e-6), stage
        assert value(samples, "ray_headrace_stage_seconds_count", stage=stage) > 0, stage
    for stage, seconds in summary["cpu_seconds"].items():
        assert value(samples, "ray_headrace_cpu_seconds_total", stage=stage) == pytest.approx(seconds, rel=1e-6), stage
    kinds = [
        own["modality"] for own, each in samples["ray_headrace_stage_seconds_count"] if own["stage"] == "media_decode"
    ]
    assert set(kinds) == {"image", "video"}
    decoded = value(samples, "ray_headrace_stage_seconds_count", stage="media_decode")
    assert decoded == summary["encodes"]
