"""A real S3 server for the session, and ways to it: directly, or through a proxy that makes requests fail."""

from __future__ import annotations

import json
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import fsspec
import pytest

from pipeline import storage
from pipeline.storage import Folder
from tests.s3.gateway import ACCESS_KEY, PACKAGES, SECRET_KEY, Gateway, missing_programs
from tests.s3.proxy import FaultyProxy

BUCKET = "headrace"
_used: dict[str, str] = {}  # the environment of this process's client


@pytest.fixture(scope="session")
def gateway() -> Iterator[Gateway]:
    """The server, with an empty bucket `BUCKET`."""
    if missing := missing_programs():
        pytest.skip(f"no S3 server: {', '.join(missing)} not installed (Debian: {PACKAGES})")
    root = Path(tempfile.mkdtemp(prefix="s3-", dir="/tmp"))
    server = Gateway(root)
    try:
        server.start()
        make_bucket(server.url)
        yield server
    finally:
        storage._file_system.cache_clear()
        server.stop()
        shutil.rmtree(root)


def s3_environment(url: str, *, read_timeout: float, secret: str = SECRET_KEY) -> dict[str, str]:
    """What a process is told of a server, and how long it waits for an answer."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "FSSPEC_S3": json.dumps({"config_kwargs": {"read_timeout": read_timeout}}),
    }


def make_bucket(url: str) -> None:
    """Create `BUCKET`."""
    fs = fsspec.filesystem("s3", endpoint_url=url, key=ACCESS_KEY, secret=SECRET_KEY)
    fs.mkdir(BUCKET)


@pytest.fixture
def use_s3(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """Makes this process use a server, as if it had started with that environment; it tries again without pauses."""

    def use(environment: dict[str, str]) -> None:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("random.uniform", lambda low, high: 0.0)
        monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.0)
        monkeypatch.setitem(fsspec.config.conf, "s3", json.loads(environment["FSSPEC_S3"]))
        if environment != _used:  # a client takes half a second to make
            storage._file_system.cache_clear()
            _used.clear()
            _used.update(environment)

    return use


@dataclass(frozen=True)
class S3:
    """A prefix of a test's own (`url`), and another client that nothing fails for."""

    url: str
    folder: Folder
    other: fsspec.AbstractFileSystem
    proxy: FaultyProxy | None

    def names(self) -> list[str]:
        """Every object below the prefix, relative to it."""
        return sorted(name.removeprefix(f"{self.folder.path}/") for name in self.other.find(self.folder.path))


@pytest.fixture(scope="session")
def faulty_proxy(gateway: Gateway) -> Iterator[FaultyProxy]:
    """Fails one request in five; prints what it did."""
    with FaultyProxy(gateway.port, faults=0.2, seed=5, stall_seconds=1.0) as proxy:
        yield proxy
    print(f"\nproxy: {proxy.passed} requests passed, {dict(proxy.injected)} injected")


@pytest.fixture(scope="session")
def other_client(gateway: Gateway) -> fsspec.AbstractFileSystem:
    """A client that nothing fails for."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_environment(gateway.url, read_timeout=15).items():
            patch.setenv(name, value)
        fs = storage._s3_file_system()
        fs.connect()
        return fs


@pytest.fixture(params=["direct", pytest.param("faulty", marks=pytest.mark.slow)])
def s3(
    request: pytest.FixtureRequest,
    gateway: Gateway,
    other_client: fsspec.AbstractFileSystem,
    use_s3: Callable[[dict[str, str]], None],
) -> S3:
    """The server, directly and through `faulty_proxy`."""
    proxy = request.getfixturevalue("faulty_proxy") if request.param == "faulty" else None
    use_s3(s3_environment(gateway.url if proxy is None else proxy.url, read_timeout=0.5 if proxy else 15))
    url = f"s3://{BUCKET}/{uuid.uuid4().hex[:12]}"
    return S3(url=url, folder=Folder(url), other=other_client, proxy=proxy)
