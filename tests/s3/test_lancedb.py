"""LanceDB on object storage: the sink whose tables are objects of a bucket, against the real server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from pipeline.config import LanceDBSection
from pipeline.errors import ConfigError
from pipeline.sinks.contract import Selector
from pipeline.sinks.lancedb import LanceDBSink
from tests.s3.conftest import S3
from tests.sinks.sample_points import documents, keys, make_collection, nearest, vector

pytestmark = pytest.mark.timeout(400)


def sink_at(url: str) -> LanceDBSink:
    return LanceDBSink(LanceDBSection(uri=f"{url}/vectors", collection="documents", batch_points=16))


@pytest.mark.parametrize("s3", ["direct"], indirect=True)
def test_writers_that_meet_in_a_bucket_lose_nothing_and_double_nothing(s3: S3) -> None:
    collection = make_collection()
    first = sink_at(s3.url)
    first.prepare(collection)
    points = documents(40)

    def write(start: int) -> None:
        # Each half overlaps the other by half.
        some = points.slice(start, 60)
        sink_at(s3.url).replace_items(collection, some, keys(some))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, (0, 20)))
    assert first.count(collection) == len(points) == 80
    first.finish(collection)
    first.switch(collection)
    [expected] = nearest(points, vector(3), "cosine", 1)
    [hit] = sink_at(s3.url).search("documents", vector(3), 1, tenant="")
    assert (hit.id, hit.score) == (expected[0], pytest.approx(expected[1], abs=1e-6))
    receipt = first.delete(Selector(tenant="", item_ids=("doc 7",)))
    assert receipt.num_deleted == {collection.physical: 2} and first.count(collection) == 78
    assert any(name.startswith("vectors/") for name in s3.names())


@pytest.mark.parametrize("s3", ["direct"], indirect=True)
def test_wrong_credentials_are_told(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(ConfigError, match=r"sinks\.lancedb cannot be used"):
        sink_at(s3.url).prepare(make_collection())
