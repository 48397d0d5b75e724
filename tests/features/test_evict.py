"""What a kept store lets go, and in which order."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from sample_records import features, keyed_record, terms
from typer.testing import CliRunner

from jobs.cli import app
from pipeline.features import catalogue
from pipeline.features.codec import FeatureRecord
from pipeline.features.evict import choose_evictions, evict, worth_seconds
from pipeline.features.frames import frame_record
from pipeline.features.identity import FrameKeyTerms
from pipeline.features.shard import SHARD_OVERHEAD_BYTES
from pipeline.features.store import FeatureStore
from pipeline.features.verify import compact, verify
from pipeline.schema import Frames

LENGTHS = {"small": 8, "large": 400, "prompted": 8, "version": 40, "middle": 100}


def records() -> dict[str, tuple[str, FeatureRecord]]:
    made = {}
    for number, (name, length) in enumerate(LENGTHS.items()):
        own = terms(number)
        if name == "prompted":
            own = dataclasses.replace(own, prompt="what is this?")
        if name == "version":
            own = dataclasses.replace(own, content="version:etag:1")
        _, record = keyed_record(number, length)
        made[name] = own.digest(), dataclasses.replace(record, key_terms=own.as_dict())
    return made


def frame_terms() -> FrameKeyTerms:
    names = ("tenant", "content", "sampling", "decode_backend", "decode_rules", "resize_backend", "resized_size")
    return FrameKeyTerms(**{name: getattr(terms(0), name) for name in names}, cropped_size=None)


@pytest.fixture
def store(tmp_path: Path) -> FeatureStore:
    made = FeatureStore(str(tmp_path / "store"))
    writer = made.writer()
    writer.put(list(records().values()))
    writer.seal()
    pixels = np.random.default_rng(1).integers(0, 256, (1, 300, 300, 3), dtype=np.uint8)
    frames, writer = Frames(pixels=pixels, pts_seconds=(0.0,)), made.frames.writer()
    writer.put([(frame_terms().digest(), frame_record(frames, frame_terms(), "image", (300, 300)))])
    writer.seal()
    return made


def left(store: FeatureStore) -> list[str]:
    store.reload()
    found = store.find([key for key, _ in records().values()])
    names = [name for name, (key, _) in records().items() if key in found]
    kept = store.fetch([(found[records()[name][0]], records()[name][0]) for name in names])
    for name, record in zip(names, kept, strict=True):
        number = list(LENGTHS).index(name)
        assert np.array_equal(record.tensors["pooler_output"].numpy(), features(number, LENGTHS[name]))
    del kept
    store.close()  # what is read stays
    store.frames.reload()
    return names + ["frames"] * len(store.frames.find([frame_terms().digest()]))


def test_what_answers_fewest_goes_first_and_of_those_the_largest(store: FeatureStore) -> None:
    """With room for all but a byte: what reads a prompt, what is known by a version, features by size, frames."""
    order = []
    before = left(store)
    while before:
        evict(store, max_bytes=store.num_bytes() - 1)
        after = left(store)
        assert after != before
        order += [name for name in before if name not in after]
        before = after
    assert order == ["prompted", "version", "large", "middle", "small", "frames"]


def test_a_store_is_brought_down_to_its_bound(store: FeatureStore) -> None:
    bound = store.num_bytes() - 60_000
    [frames, found] = evict(store, max_bytes=bound)
    assert (frames.evicted, found.evicted) == (0, 3) and found.expired == 0  # 2 and 10 KB, and the one of 100 KB
    assert store.num_bytes() <= bound + SHARD_OVERHEAD_BYTES
    assert left(store) == ["small", "middle", "frames"] and list(verify(store)) == []
    assert all(told.evicted == told.num_bytes == 0 for told in evict(store, max_bytes=10**9))


def test_frames_have_a_bound_of_their_own(store: FeatureStore) -> None:
    """They go first within it, though of the whole store they are what goes last."""
    frames_bytes, everything = store.frames.num_bytes(), store.num_bytes()
    assert [told.evicted for told, _ in choose_evictions(store, frames_max_bytes=frames_bytes)] == [0, 0]
    both = choose_evictions(store, max_bytes=everything - 200_000, frames_max_bytes=1000)
    assert [told.evicted for told, _ in both] == [1, 0]  # what that frees is enough
    assert [told.evicted for told in evict(store, frames_max_bytes=1000)] == [1, 0]
    assert left(store) == list(LENGTHS)


def test_what_costs_less_to_make_again_than_to_hold_goes(tmp_path: Path) -> None:
    """By hand: at 0.02 for a GB a month and 3.60 for an hour, a byte for half a month is worth 1e-8 seconds, so a
    record of some 100 KB a millisecond."""
    byte_seconds = worth_seconds(0.02, 3.6, 365.25 * 86400 / 24)
    assert byte_seconds == pytest.approx(1e-8)
    made = FeatureStore(str(tmp_path / "store"))
    writer = made.writer()
    took = {"small": 1.0, "large": 0.9e-3, "middle": 1.1e-3, "prompted": 0.0}  # of the last nobody knows
    known = {name: (key, record) for name, (key, record) in records().items() if name in took}
    writer.put([(key, dataclasses.replace(record, made_seconds=took[name])) for name, (key, record) in known.items()])
    writer.seal()
    with made.entries(made.sealed_shards()[0].shard_id) as file:
        sizes = dict(zip(*(pq.read_table(file)[name].to_pylist() for name in ("key", "num_bytes")), strict=True))
    assert 90_000 < sizes[known["large"][0]] < 110_000 and sizes[known["middle"][0]] < 30_000
    assert [told.evicted for told in evict(made, byte_seconds=byte_seconds)] == [0, 1]
    made.reload()
    assert set(made.find([key for key, _ in known.values()])) == {
        known[name][0] for name in ("small", "middle", "prompted")
    }


def backdated(store: FeatureStore, name: str, age: timedelta) -> None:
    """The catalogue as if a record were so old."""
    [shard] = store.sealed_shards()
    path = store.folder.locate(catalogue.entries_name(shard.shard_id))
    table = pq.read_table(path)
    moments = table["created"].to_pylist()
    moments[table["key"].to_pylist().index(records()[name][0])] = datetime.now(UTC) - age
    column = table.schema.get_field_index("created")
    pq.write_table(table.set_column(column, "created", [moments]).cast(table.schema), path)


def test_records_do_not_become_younger_by_being_written_anew(store: FeatureStore) -> None:
    backdated(store, "middle", timedelta(days=40))
    writer = store.writer()
    writer.put([keyed_record(90)])
    writer.seal()
    assert len(compact(store)) == 1
    week, month = timedelta(days=7), timedelta(days=60)
    assert [told.expired for told in evict(store, ttl=month)] == [0, 0]
    assert [told.expired for told in evict(store, ttl=week)] == [0, 1]
    assert left(store) == ["small", "large", "prompted", "version", "frames"]


def test_what_is_read_stays(store: FeatureStore) -> None:
    [shard] = store.sealed_shards()
    reader = store.reader(shard.shard_id)
    assert evict(store, max_bytes=1)[1].evicted == 0
    assert left(store) == list(LENGTHS)
    reader.close()
    store.close()


def test_the_command_shows_and_then_drops(store: FeatureStore) -> None:
    def command(*words: object) -> str:
        done = CliRunner().invoke(app, ["store", "evict", store.folder.url, *map(str, words)])
        assert done.exit_code == 0, done.output
        return done.stdout

    shown = command("--max-bytes", store.num_bytes() - 1)
    assert "features: 0 records too old and 1 too many" in shown and "nothing was changed" in shown
    assert left(store) == [*LENGTHS, "frames"]
    assert "dropped" in command("--max-bytes", store.num_bytes() - 1, "--ttl", "2w", "--yes")
    assert left(store) == ["small", "large", "version", "middle", "frames"]
    assert "frames: 0 records too old and 1 too many" in command("--frames-max-bytes", 1000)
    for words in ([], ["--ttl", "soon"]):
        refused = CliRunner().invoke(app, ["store", "evict", store.folder.url, *words])
        assert refused.exit_code == 2 and "--ttl" in refused.stderr
    assert [told.evicted for told, _ in choose_evictions(store)] == [0, 0]
