"""Tenants' records lie apart: by folder, shard, source and key, on a local store and on a remote one."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pickle
from pathlib import Path

import pytest
from sample_records import keyed_record, terms
from typer.testing import CliRunner

from jobs.cli import app
from pipeline.features.catalogue import SourceEntry
from pipeline.features.codec import FeatureRecord
from pipeline.features.rewrite import rewrite_shards
from pipeline.features.select import RecordFilter, drop_records, listed_records
from pipeline.features.store import FeatureStore
from pipeline.features.tenants import folder_of, shard_name, tenant_folder
from pipeline.features.verify import compact, verify
from pipeline.schema import Probe

NUMBERS = itertools.count()


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> FeatureStore:
    path = str(tmp_path / "store") if request.param == "local" else f"memory://tenants-{next(NUMBERS)}"
    return FeatureStore(path, str(tmp_path / "local"))


def record_of(tenant: str, number: int) -> tuple[str, FeatureRecord]:
    """The same features for whoever asks; the key is the tenant's own."""
    own = dataclasses.replace(terms(number), tenant=tenant)
    return own.digest(), dataclasses.replace(keyed_record(number)[1], key_terms=own.as_dict())


def put(store: FeatureStore, *batches: list[tuple[str, int]]) -> list[list[tuple[str, str]]]:
    writers = store.writers()
    located = [writers.put([record_of(*each) for each in batch]) for batch in batches]
    writers.close()
    store.recover()
    store.reload()
    return located


@pytest.mark.parametrize(
    ("tenant", "folder"),
    [
        ("", ""),
        ("acme", "acme"),
        ("Acme Ltd.", "Acme=20Ltd."),
        ("a/../b", "a=2F..=2Fb"),
        ("..", "=2E."),
        (".", "=2E"),
        ("=2E", "=3D2E"),
        ("ü", "=C3=BC"),
        ("a_b", "a_b"),
    ],
)
def test_a_folder_is_a_name_that_any_storage_takes(tenant: str, folder: str) -> None:
    assert tenant_folder(tenant) == folder
    assert folder_of(shard_name(folder, "20261201T144052.123456-abcdef")) == folder


def test_long_names_are_told_apart_by_what_is_cut_off() -> None:
    one, other = tenant_folder("ü" * 80 + "1"), tenant_folder("ü" * 80 + "2")
    assert one != other and len(one) == len(other) == 100
    assert tenant_folder("a" * 100) == "a" * 100 and "==" in tenant_folder("a" * 101)


def test_a_batch_of_several_tenants_lies_in_a_shard_of_each(store: FeatureStore) -> None:
    [located] = put(store, [("acme", 0), ("", 1), ("globex", 0), ("acme", 2)])
    shards = [shard for shard, _ in located]
    assert [folder_of(shard) for shard in shards] == ["acme", "", "globex", "acme"] and shards[0] == shards[3]
    assert store.folder.list("tenants/acme/shards") == [f"{shards[0]}.lmdb"]
    assert store.folder.list("tenants/globex/catalogue") == [f"{shards[2]}.parquet"]
    assert store.folder.list("shards") == [f"{shards[1]}.lmdb"]
    # Anyone who was told where it is finds it; also another machine, or a copy that was sent to a worker.
    for reader in (store, pickle.loads(pickle.dumps(store))):
        records = reader.fetch(located)
        assert [record.key_terms["tenant"] for record in records if record] == ["acme", "", "globex", "acme"]
    assert all(store.is_sealed(shard) and store.condition(shard) == "sound" for shard in shards)
    assert sum(shard.num_records for shard in store.sealed_shards()) == 4
    assert list(verify(store)) == []


def test_a_key_is_found_by_its_tenant_alone(store: FeatureStore) -> None:
    put(store, [("acme", 0), ("globex", 1)])
    acme, globex = record_of("acme", 0)[0], record_of("globex", 1)[0]
    # Even if the digests of two tenants' keys were one: nobody looks into another's part.
    assert store.find([acme, globex]) == {} == store.of_tenant("initech").find([acme, globex])
    assert list(store.of_tenant("acme").find([acme, globex])) == [acme]
    found = store.find_of_tenants({"acme": {acme}, "globex": {globex}, "initech": {acme}})
    assert set(found) == {acme, globex}
    entry = SourceEntry(
        content="sha256:1", probe=Probe(modality="image", container="png", codec="", width=1, height=1, num_bytes=9)
    )
    store.of_tenant("acme").sources.record({"etag:x": entry})
    assert store.of_tenant("acme").sources.find(["etag:x"]) == {"etag:x": entry}
    assert store.sources.find(["etag:x"]) == store.of_tenant("globex").sources.find(["etag:x"]) == {}


def test_frames_of_a_tenant_lie_below_its_folder(store: FeatureStore) -> None:
    put(store.frames, [("acme", 0), ("", 1)])
    assert len(store.folder.list("tenants/acme/frames/shards")) == len(store.folder.list("frames/shards")) == 1
    assert len(store.frames.sealed_shards()) == 2 and store.sealed_shards() == []


def test_few_shards_are_open_at_a_time(store: FeatureStore) -> None:
    writers = store.writers()
    located = [writers.put([record_of(f"tenant-{n}", n)])[0] for n in range(20)]
    still = [shard for shard, _ in located if not store.is_sealed(shard)]
    assert still == [shard for shard, _ in located[-16:]]
    again = writers.put([record_of("tenant-0", 77), record_of("tenant-19", 77)])
    assert again[0][0] != located[0][0] and again[1][0] == located[19][0]
    assert None not in store.fetch([*located, *again])
    assert writers.put_bytes == sum(store.reader(shard).get(key).nbytes for shard, key in [*located, *again])  # type: ignore[union-attr]
    writers.close()


def test_upkeep_keeps_tenants_apart(store: FeatureStore) -> None:
    for number in range(3):
        put(store, [("acme", number), ("globex", number), ("", number)])
    assert len(store.sealed_shards()) == 9
    assert {folder_of(shard.shard_id): shard.num_records for shard in compact(store)} == {"": 3, "acme": 3, "globex": 3}
    assert {record.tenant for record in listed_records(store, RecordFilter(tenant="acme"))} == {"acme"}
    assert len(list(listed_records(store, RecordFilter()))) == 9
    shards = [shard.shard_id for shard in store.sealed_shards()]
    made = rewrite_shards(store, shards, {record_of("acme", 0)[0]}).made
    assert {folder_of(shard.shard_id): shard.num_records for shard in made} == {"": 3, "acme": 2, "globex": 3}
    tiers = drop_records(store, RecordFilter(tenant="globex"))
    assert {tier.name: tier.records for tier in tiers} == {"frames": 0, "features": 3}
    assert {record.tenant for record in listed_records(store, RecordFilter())} == {"acme", ""}


def test_a_tenant_is_removed_with_its_folder(store: FeatureStore) -> None:
    put(store, [("acme", 0), ("acme ", 0)])
    writers = store.writers()
    writers.put([record_of("acme", 1)])
    writers.close()
    store.remove_tenant("acme")
    assert store.folder.folders("tenants") == ["acme=20"]
    assert not [name for _, names, _ in os.walk(os.path.dirname(store.open_root)) for name in names if name == "acme"]
    assert [part.folder.url.rpartition("/")[2] for part in store.parts()[1:]] == ["acme=20"]
    with pytest.raises(ValueError, match="has the store's root"):
        store.remove_tenant("")


def test_what_was_stored_before_there_were_folders_is_listed_and_dropped(store: FeatureStore) -> None:
    writer = store.writer()  # of the root, whoever's the record is
    shard = writer.put([record_of("acme", 5)])
    writer.seal()
    store.reload()
    assert [record.shard for record in listed_records(store, RecordFilter(tenant="acme"))] == [shard]
    assert drop_records(store, RecordFilter(tenant="acme"))[1].records == 1
    assert list(listed_records(store, RecordFilter())) == []


def test_the_commands_show_whose_records_they_are(store: FeatureStore) -> None:
    if not store.is_local:
        pytest.skip("memory:// is this process's own")
    put(store, [("acme", 0), ("", 1)])
    said = CliRunner().invoke(app, ["store", "ls", store.folder.path, "--tenant", "acme"]).stdout
    assert record_of("acme", 0)[0] in said and len(said.splitlines()) == 1
    assert "tenant acme: 1" in CliRunner().invoke(app, ["store", "stat", store.folder.path]).stdout
