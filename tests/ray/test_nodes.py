"""Three nodes, a job, and nodes that are lost under it with their disks: the same bytes, and bounded work redone."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from pipeline.demo.media import make_demo_media
from pipeline.models.location import resolve_model
from tests.ray.conftest import Driver, Job
from tests.ray.ray_nodes import RAY, RayNodes, command_line, processes, ray_nodes
from tests.s3.conftest import BUCKET, gateway, s3_environment  # noqa: F401 (a fixture)
from tests.s3.gateway import Gateway

pytestmark = [pytest.mark.slow, pytest.mark.timeout(5400)]
pytest.importorskip("aiohttp_cors", reason="the job server comes with ray[default]")
SHARD_WINDOWS = 2
WINDOW_ITEMS = 32
LONGEST_WAIT_SECONDS = 25.0


@dataclass(frozen=True)
class Version:
    """A batch as it was put away, once or again."""

    window: str
    batch: str
    items: int
    written: float


class Watch:
    """Notes each encode batch that is put away below an output, however often."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._seen: dict[tuple[str, int, int], Version] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look_on)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    @property
    def versions(self) -> list[Version]:
        """In the order in which they were written."""
        return sorted(self._seen.values(), key=lambda version: version.written)

    def _look_on(self) -> None:
        while not self._end.wait(0.05):
            for path in self._output.glob("*/_work/encode/window-*/batch-*.parquet"):
                try:
                    status = path.stat()
                    key = (str(path), status.st_ino, status.st_mtime_ns)
                    if key not in self._seen:
                        rows = pq.read_metadata(path).num_rows
                        self._seen[key] = Version(path.parent.name, path.name, rows, status.st_mtime)
                except FileNotFoundError:
                    continue


@pytest.fixture
def cluster(request: pytest.FixtureRequest, gateway: Gateway) -> Iterator[RayNodes]:  # noqa: F811
    """Three nodes, and S3 for the store."""
    environment = {**os.environ, **s3_environment(gateway.url, read_timeout=15)}
    with ray_nodes(environment, *getattr(request, "param", ()), more=2) as nodes:
        yield nodes


def make_job(folder: Path, name: str, manifest: Path, model: Path, store: str, **ray: object) -> Job:
    config = {
        "job": "caption_videos",
        "input": str(manifest),
        "output": str(folder / name / "output"),
        "model": str(model),
        "prompt": "Describe what you see.",
        "encode": {"device": "cpu", "max_batch_items": 4},
        "generate": {"device": "cpu", "max_new_tokens": 32, "max_batch_items": 8},
        "store": {"path": store, "shard_windows": SHARD_WINDOWS},
        "ray": {"first_window_items": WINDOW_ITEMS, "window_items": WINDOW_ITEMS, **ray},
    }
    (folder / name).mkdir()
    (folder / name / "run.yaml").write_text(yaml.safe_dump(config))
    return Job(config=folder / name / "run.yaml", output=folder / name / "output")


def submit(cluster: RayNodes, job: Job) -> subprocess.Popen[str]:
    """`ray job submit`, as a user would.

    Without `--working-dir`: nodes of one machine share the folder it is unpacked in, and one of them that is through
    with it takes it from the others.
    """
    entry = ["python", "-m", "jobs.caption_videos", "--config", str(job.config)]
    return subprocess.Popen(
        [RAY, "job", "submit", "--address", cluster.address, "--", *entry],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def kill_driver(job: Job) -> None:
    """SIGKILL to the job's own process, and the shell that the job server started it with."""
    for pid in processes(f"-m jobs.caption_videos --config {job.config}"):
        if "ray job submit" not in command_line(pid) and "/ray job" not in command_line(pid):
            os.kill(pid, signal.SIGKILL)


def undisturbed(folder: Path, manifest: Path, model: Path) -> Job:
    """The same run on this machine alone."""
    alone = {"num_cpus": 2, "object_store_bytes": 300_000_000}
    job = make_job(folder, "alone", manifest, model, str(folder / "store"), **alone)
    driver = Driver(job)
    try:
        assert driver.wait() == 0, driver.said
    finally:
        driver.close()
    return job


@dataclass(frozen=True)
class Loss:
    """What was killed, and the items of batches that were put away by then of windows that were not durable."""

    victim: str
    undurable_items: int


def disturb(cluster: RayNodes, job: Job, rng: random.Random, *, nodes: int, drivers: int) -> tuple[Watch, list[Loss]]:
    """The job, with so many nodes lost and drivers killed at random moments; the same command after a driver."""
    victims = ["node"] * nodes + ["driver"] * drivers
    rng.shuffle(victims)
    losses = list[Loss]()
    with Watch(job.output) as watch:
        running = submit(cluster, job)
        for victim in victims:
            put_away = len(watch.versions)
            while len(watch.versions) == put_away and not job.ledger("generate") and running.poll() is None:
                time.sleep(0.1)  # until it is under way again
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.wait(rng.uniform(0, LONGEST_WAIT_SECONDS))
                break
            if victim == "driver":
                kill_driver(job)
                said, _ = running.communicate(timeout=60)
                assert running.returncode != 0, said
            else:
                cluster.lose(rng.choice(cluster.nodes))
                cluster.add()
            losses.append(Loss(victim, undurable_items(job, watch)))
            if victim == "driver":
                running = submit(cluster, job)
            done = {name: len(job.ledger(name)) for name in ("encode", "generate")}
            print(f"{time.strftime('%X')} {losses[-1].victim} killed, windows done: {done}", flush=True)
        said, _ = running.communicate(timeout=1800)
    assert running.returncode == 0, said
    return watch, losses


def undurable_items(job: Job, watch: Watch) -> int:
    """Of batches that were put away, the items in windows that the ledger does not have."""
    done = {name.rpartition("encode-")[2].removesuffix(".json") for name in job.ledger("encode")}
    begun = {(version.window, version.batch): version.items for version in watch.versions}
    return sum(items for (window, _), items in begun.items() if window.removeprefix("window-") not in done)


def redone(watch: Watch) -> list[Version]:
    """Every putting away of a batch but its first."""
    seen = set[tuple[str, str]]()
    again = []
    for version in watch.versions:
        if (version.window, version.batch) in seen:
            again.append(version)
        seen.add((version.window, version.batch))
    return again


@pytest.mark.parametrize(
    ("images", "videos", "nodes", "drivers", "seed"), [(90, 38, 1, 0, 1), (1800, 200, 10, 2, 2)], ids=["one", "ten"]
)
def test_lost_nodes_cost_what_was_not_durable(
    cluster: RayNodes, tmp_path: Path, images: int, videos: int, nodes: int, drivers: int, seed: int
) -> None:
    manifest = tmp_path / "drawn" / "manifest.jsonl"
    make_demo_media(str(manifest), images=images, videos=videos, seed=5)
    model = Path(shutil.copytree(resolve_model("demo:captioner"), tmp_path / "captioner"))
    alone = undisturbed(tmp_path, manifest, model)
    print(f"undisturbed: {alone.summary()['seconds']['total']:.0f} s, {alone.summary()['encodes']} encodes", flush=True)

    rng, losses, again, runs = random.Random(seed), list[Loss](), list[Version](), 0
    while len(losses) < nodes + drivers:
        runs += 1
        job = make_job(tmp_path, f"job-{runs}", manifest, model, f"s3://{BUCKET}/{uuid.uuid4().hex[:12]}")
        killed = Counter(loss.victim for loss in losses)
        watch, more = disturb(cluster, job, rng, nodes=nodes - killed["node"], drivers=drivers - killed["driver"])
        losses += more
        redone_here = redone(watch)
        again += redone_here
        assert job.parts() == alone.parts()
        assert job.summary()["encodes"] == alone.summary()["encodes"]
        # A window that was durable is never begun again.
        durable = {name[-11:-5]: mtime_ns / 1e9 for name, (_, mtime_ns) in job.ledger("encode").items()}
        late = [each for each in watch.versions if each.written > durable[each.window.removeprefix("window-")]]
        assert not late
        allowed = sum(loss.undurable_items for loss in more)
        items = sum(each.items for each in redone_here)
        print(
            f"run {runs}: {dict(Counter(loss.victim for loss in more))}, {job.summary()['seconds']['total']:.0f} s; "
            f"again: {len(redone_here)} batches, {items} items, {len({each.window for each in redone_here})} windows; "
            f"not durable were {allowed} items",
            flush=True,
        )
        assert items <= allowed


@pytest.mark.parametrize("cluster", [(f"--memory={1300 * 2**20}",)], indirect=True, ids=["1300-MiB"])
def test_a_node_that_nobody_replaces_leaves_the_run_fewer_workers(cluster: RayNodes, tmp_path: Path) -> None:
    # A node has room for one worker that encodes (716 MiB) and a task that plans (458): never for a second worker.
    manifest = tmp_path / "drawn" / "manifest.jsonl"
    make_demo_media(str(manifest), images=90, videos=38, seed=5)
    model = Path(shutil.copytree(resolve_model("demo:captioner"), tmp_path / "captioner"))
    alone = undisturbed(tmp_path, manifest, model)
    store = f"s3://{BUCKET}/{uuid.uuid4().hex[:12]}"
    job = make_job(tmp_path, "job", manifest, model, store, wait_seconds=5)
    with Watch(job.output) as watch:
        running = submit(cluster, job)
        while not watch.versions:
            assert running.poll() is None, running.communicate()
            time.sleep(0.05)
        assert not job.ledger("encode")
        cluster.lose(cluster.nodes[0])
        said, _ = running.communicate(timeout=900)
    assert running.returncode == 0, said
    assert "the pass ended early, for 1 of its 3 nodes were lost: for 5 s there was no room" in said
    assert job.parts() == alone.parts()
    assert job.summary()["encodes"] == alone.summary()["encodes"]
    print(f"{len(redone(watch))} batches done again with two nodes")
