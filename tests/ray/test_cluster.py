"""Two nodes: what the ledger says is encoded is sealed, for a node can be lost with its disk."""

from __future__ import annotations

import json
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator

import pytest
from ray.cluster_utils import Cluster

from tests.ray.conftest import Driver, Job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # 2 to 3 minutes: a cluster, three runs


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a cluster of two nodes of one CPU each."""
    scratch = tempfile.mkdtemp(prefix="hr", dir="/tmp")  # short: Ray's sockets lie below it
    monkeypatch.setenv("RAY_TMPDIR", scratch)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    node = {"num_cpus": 1, "object_store_memory": 150_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    cluster.add_node(**node)
    cluster.wait_for_nodes()
    yield cluster.address
    cluster.shutdown()
    shutil.rmtree(scratch, ignore_errors=True)


def test_a_window_is_done_when_its_shards_are_sealed(
    two_nodes: str, make_job: Callable[..., Job], start: Callable[..., Driver]
) -> None:
    settings = ("ray.num_cpus=null", "ray.object_store_bytes=null", "store.shard_windows=1", "ray.segment_windows=64")
    undisturbed = make_job("alone", workers=1)
    assert start(undisturbed).wait() == 0
    job = make_job("cluster", workers=2)
    driver = start(job, f"ray.address={two_nodes}", *settings)
    driver.until(lambda: job.ledger("encode"))
    driver.signal(signal.SIGKILL)
    done = [json.loads(content)["items"]["shards_written"] for content, _ in job.ledger("encode").values()]
    store = job.output.parent / "store"
    listed = {path.stem for path in (store / "catalogue").glob("*.parquet")}
    assert done and all(shards and listed.issuperset(shards) for shards in done), (done, listed)

    # The disks of the nodes are lost with what was open on them, and batches that were put away there with it.
    time.sleep(5)  # the killed driver's workers end
    open_shards = list((store / "open").glob("[!.]*"))
    assert open_shards
    for path in open_shards:
        shutil.rmtree(path, ignore_errors=True)
    resumed = start(job, f"ray.address={two_nodes}", *settings)
    assert resumed.wait() == 0, resumed.said
    assert job.parts() == undisturbed.parts()
    assert not list((store / "open").glob("[!.]*"))
    assert job.summary()["environment"]
