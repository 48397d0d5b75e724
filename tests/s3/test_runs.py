"""Whole runs with everything on S3: the same parts as on a local disk, also while one request in twenty fails."""

from __future__ import annotations

import json
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pytest
import yaml

from pipeline.config import parse_config
from pipeline.demo.media import make_demo_media
from tests.ray.conftest import Driver, Job, drivers
from tests.s3.conftest import BUCKET, s3_environment
from tests.s3.gateway import Gateway
from tests.s3.proxy import KINDS, FaultyProxy
from tests.stages.line import Line

pytestmark = pytest.mark.timeout(400)
FEW = {"images": 6, "videos": 3, "seed": 31}
MORE = {"images": 12, "videos": 6, "seed": 31}
DEMO = {"images": 36, "videos": 24, "seed": 7}


@dataclass(frozen=True)
class Place:
    """Where a run's media, store and output lie, and who looks at them afterwards."""

    root: str
    fs: fsspec.AbstractFileSystem
    scratch: Path
    environment: dict[str, str]

    def config(self, media: dict[str, int]) -> dict[str, Any]:
        """A run of the demo; small windows make many requests."""
        return {
            "job": "caption_videos",
            "input": f"{self.root}/media/manifest.jsonl",
            "demo_media": media,
            "output": f"{self.root}/output",
            "model": "demo:captioner",
            "prompt": "Describe what you see.",
            "sampling": {"policy": "fps", "fps": 2, "max_frames": 16},
            "encode": {"device": "cpu", "max_batch_items": 4},
            "generate": {"max_new_tokens": 32, "device": "cpu", "max_batch_items": 4},
            "store": {"path": f"{self.root}/store", "local_path": str(self.scratch / "local")},
            "ray": {
                "num_cpus": 2,
                "object_store_bytes": 200_000_000,
                "encode_workers": 1,
                "generate_workers": 1,
                "first_window_items": 8,
                "window_items": 16,
                "segment_windows": 2,
            },
        }

    def job(self, media: dict[str, int]) -> Job:
        """The configuration as a file."""
        path = self.scratch / f"{media['images']}.yaml"
        path.write_text(yaml.safe_dump(self.config(media)))
        return Job(config=path, output=self.scratch)

    def names(self) -> list[str]:
        """Every file, relative to the root."""
        start = len(self.fs._strip_protocol(self.root)) + 1
        return sorted(name[start:] for name in self.fs.find(self.root))

    def read(self, name: str) -> bytes:
        """A file of `names`."""
        return bytes(self.fs.cat_file(f"{self.root}/{name}"))

    def parts(self) -> dict[str, bytes]:
        """The bytes of each part of the run that was last."""
        run = self.read("output/latest").decode().strip()
        names = [name for name in self.names() if name.startswith(f"output/{run}/part-")]
        return {name.rpartition("/")[2]: self.read(name) for name in names}

    def summary(self) -> dict[str, Any]:
        """summary.json of the run that was last."""
        run = self.read("output/latest").decode().strip()
        return dict(json.loads(self.read(f"output/{run}/summary.json")))


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Driver]]:
    """Starts runs; what a failing test left of them ends with it."""
    with drivers() as begin:

        def begin_there(place: Place, media: dict[str, int], *settings: str) -> Driver:
            for name, value in place.environment.items():
                monkeypatch.setenv(name, value)
            return begin(place.job(media), *settings)

        yield begin_there


@pytest.fixture
def on_s3(gateway: Gateway, other_client: fsspec.AbstractFileSystem, tmp_path: Path) -> Place:
    """An empty prefix of the server."""
    root = f"s3://{BUCKET}/{uuid.uuid4().hex[:12]}"
    return Place(root=root, fs=other_client, scratch=tmp_path, environment=s3_environment(gateway.url, read_timeout=15))


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, int]], dict[str, bytes]]:
    """The parts of a run on a local disk, without Ray."""

    def parts(media: dict[str, int]) -> dict[str, bytes]:
        folder = tmp_path_factory.mktemp("local")
        place = Place(root=str(folder), fs=fsspec.filesystem("file"), scratch=folder, environment={})
        config = parse_config(place.config(media))
        make_demo_media(config.input, **media)
        Line(config)
        return place.parts()

    return parts


def proxied(place: Place, proxy: FaultyProxy) -> Place:
    """The same place through a proxy, for whose stalls nobody waits long."""
    environment = s3_environment(proxy.url, read_timeout=2)
    return Place(root=place.root, fs=place.fs, scratch=place.scratch, environment=environment)


def report(name: str, place: Place, proxy: FaultyProxy) -> None:
    """Say what was done to the run."""
    injected = sum(proxy.injected.values())
    print(
        f"\n{name}: {proxy.passed} requests passed, {injected} failed {dict(proxy.injected)}, "
        f"{len(place.parts())} parts identical, {place.summary()['seconds']['total']:.0f} s"
    )


def test_a_run_through_a_faulty_proxy_gives_the_parts_of_a_local_one(
    gateway: Gateway, on_s3: Place, local: Callable[[dict[str, int]], dict[str, bytes]], start: Callable[..., Driver]
) -> None:
    with FaultyProxy(gateway.port, faults=0.05, seed=3, stall_seconds=3) as proxy:
        driver = start(proxied(on_s3, proxy), FEW)
        assert driver.wait() == 0, driver.said
        assert on_s3.parts() == local(FEW)
        report("few items", on_s3, proxy)
    assert sum(proxy.injected.values()) >= 5
    assert driver.scratch_files() == []
    left = {name.split("/")[0] for name in on_s3.names()}
    assert left == {"media", "output", "store"}
    assert [name for name in on_s3.names() if "_work" in name or "lock" in name] == []
    sealed = [name for name in on_s3.names() if name.startswith("store/shards/")]
    assert sealed
    assert len([name for name in on_s3.names() if name.startswith("store/catalogue/")]) == len(sealed)


@pytest.mark.parametrize("run_id", ["null", "nightly"])
def test_wrong_credentials_end_with_2_and_nothing_is_written(
    on_s3: Place, start: Callable[..., Driver], run_id: str
) -> None:
    on_s3.environment["AWS_SECRET_ACCESS_KEY"] = "wrong"
    driver = start(on_s3, FEW, f"run_id={run_id}")
    assert driver.wait() == 2
    assert driver.said.startswith("headrace: the credentials for s3:// are not valid; s3://headrace/")
    assert "SignatureDoesNotMatch" in driver.said
    assert len(driver.said.splitlines()) == 1
    assert on_s3.names() == []
    assert sorted(path.name for path in on_s3.scratch.iterdir()) == ["6.yaml"]


def test_wrong_credentials_for_the_input_leave_a_local_output_alone(on_s3: Place, start: Callable[..., Driver]) -> None:
    on_s3.environment["AWS_SECRET_ACCESS_KEY"] = "wrong"
    places = (f"output={on_s3.scratch}/output", f"store.path={on_s3.scratch}/store")
    driver = start(on_s3, FEW, *places, "run_id=nightly", "demo_media=null")
    assert driver.wait() == 2
    assert "the credentials for s3:// are not valid" in driver.said
    assert sorted(path.name for path in on_s3.scratch.iterdir()) == ["6.yaml"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_on_s3_gives_the_parts_of_a_local_one_with_faults_and_without(
    gateway: Gateway, on_s3: Place, tmp_path: Path, start: Callable[..., Driver]
) -> None:
    (tmp_path / "local").mkdir()
    disk = Place(root=str(tmp_path / "disk"), fs=fsspec.filesystem("file"), scratch=tmp_path / "local", environment={})
    faulty = Place(root=f"{on_s3.root}-faulty", fs=on_s3.fs, scratch=tmp_path, environment={})
    with (
        FaultyProxy(gateway.port, faults=0.0, seed=0, stall_seconds=3) as counting,
        FaultyProxy(gateway.port, faults=0.05, seed=8, stall_seconds=3) as failing,
    ):
        for place in (disk, proxied(on_s3, counting), proxied(faulty, failing)):
            driver = start(place, DEMO)
            assert driver.wait() == 0, driver.said
            assert driver.scratch_files() == []
        assert len(disk.parts()) == 5
        assert on_s3.parts() == disk.parts()
        assert faulty.parts() == disk.parts()
        report("demo on S3", on_s3, counting)
        report("demo through faults", faulty, failing)
        assert set(failing.injected) == set(KINDS)
        # A second question finds every feature on S3, from a machine that has none of the shards.
        settings = ("prompt=What colour is the shape?", f"store.local_path={tmp_path}/new")
        second = start(proxied(faulty, failing), DEMO, *settings)
        assert second.wait() == 0, second.said
        report("second question through faults", faulty, failing)
    summary = faulty.summary()
    assert (summary["fetches"], summary["encodes"], summary["fallbacks"]) == (0, 0, 0)
    assert summary["items_reused"] == summary["items_written"] == 60


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_run_on_s3_is_held_until_stale_and_then_resumed(
    on_s3: Place, local: Callable[[dict[str, int]], dict[str, bytes]], start: Callable[..., Driver]
) -> None:
    def ledger() -> list[str]:
        return [name for name in on_s3.names() if "/_run/ledger/encode-" in name]

    driver = start(on_s3, MORE)
    driver.until(ledger)
    assert driver.signal(signal.SIGKILL) == -signal.SIGKILL
    before = {name: on_s3.read(name) for name in ledger()}
    second = start(on_s3, MORE)
    assert second.wait() == 4, second.said
    assert f"pid {driver.process.pid}, since" in second.said
    [lock] = [name for name in on_s3.names() if name.endswith("_run/lock.json")]
    stale = {**json.loads(on_s3.read(lock)), "beat": time.time() - 61}
    on_s3.fs.pipe_file(f"{on_s3.root}/{lock}", json.dumps(stale).encode())
    third = start(on_s3, MORE)
    assert third.wait() == 0, third.said
    assert on_s3.parts() == local(MORE)
    assert {name: on_s3.read(name) for name in before} == before
