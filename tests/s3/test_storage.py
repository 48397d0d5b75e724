"""What runs ask of storage, on a real S3 server: directly, and while one request in five fails."""

from __future__ import annotations

import json
import os
import pickle
import re
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.demo.media import make_demo_media
from pipeline.errors import ConfigError, ItemError, ManifestError, RunLockedError, TransientError
from pipeline.features.codec import encode_record
from pipeline.features.store import FeatureStore
from pipeline.media.source import FetchCounter, open_source, read_source, stat_source
from pipeline.runs.ledger import Ledger
from pipeline.runs.listing import read_manifest
from pipeline.runs.lock import run_lock
from pipeline.runs.manifest import freeze_manifest, publish_manifest, read_range, stage_manifest
from pipeline.schema import MediaItem
from pipeline.sinks.parquet import PART_SCHEMA, write_part
from pipeline.storage import Folder
from tests.features.sample_records import keyed_record
from tests.media.archive_files import make_tar, make_zip
from tests.s3.conftest import BUCKET, S3, s3_environment
from tests.s3.gateway import Gateway, free_port
from tests.s3.proxy import KINDS, FaultyProxy

CONTENT = os.urandom(3 * 2**20)


# ---- files


def test_what_was_written_is_read(s3: S3) -> None:
    s3.folder.write_bytes("a/b.bin", CONTENT)
    assert s3.folder.read_bytes("a/b.bin") == CONTENT
    with s3.folder.writing("a/b.bin") as file:
        file.write(b"second")
    assert s3.other.cat_file(s3.folder.locate("a/b.bin")) == b"second"
    with s3.folder.open("a/b.bin") as file:
        file.seek(2)
        assert file.read() == b"cond"
    s3.folder.write_json("c.json", {"a": [1, None]})
    assert pickle.loads(pickle.dumps(s3.folder)).read_json("c.json") == {"a": [1, None]}
    assert s3.names() == ["a/b.bin", "c.json"]


def test_what_others_do_is_seen_at_once(s3: S3) -> None:
    assert not s3.folder.exists("d/x")
    assert s3.folder.list("d") == []
    s3.other.pipe_file(s3.folder.locate("d/x"), b"1")
    assert s3.folder.exists("d/x")
    assert s3.folder.list("d") == ["x"]
    assert s3.folder.read_bytes("d/x") == b"1"
    s3.other.pipe_file(s3.folder.locate("d/x"), b"longer")
    s3.other.pipe_file(s3.folder.locate("d/y"), b"2")
    assert s3.folder.list("d") == ["x", "y"]
    with s3.folder.open("d/x") as file:
        assert file.read() == b"longer"
    s3.other.rm_file(s3.folder.locate("d/x"))
    assert not s3.folder.exists("d/x")
    assert s3.folder.list("d") == ["y"]
    with pytest.raises(FileNotFoundError):
        s3.folder.read_bytes("d/x")


def test_a_block_that_raises_leaves_things_as_they_were(s3: S3) -> None:
    s3.folder.write_bytes("old", b"old")
    for name in ("old", "new"):
        with pytest.raises(KeyboardInterrupt), s3.folder.writing(name) as file:
            file.write(b"half")
            raise KeyboardInterrupt
    assert s3.folder.read_bytes("old") == b"old"
    assert s3.names() == ["old"]


def test_removes_files_and_folders(s3: S3) -> None:
    for name in ("keep", "gone", "tree/a", "tree/deep/b", "treetop"):
        s3.folder.write_bytes(name, b"x")
    s3.folder.remove("gone")
    s3.folder.remove("tree")
    s3.folder.remove("never")
    assert s3.names() == ["keep", "treetop"]


def test_a_file_is_created_once_and_swapped_by_version(s3: S3) -> None:
    # Through the proxy the answer to a success may be lost; `create_bytes` says that it cannot tell.
    try:
        s3.folder.create_bytes("x", b"1")
    except FileExistsError:
        assert s3.proxy is not None
    with pytest.raises(FileExistsError):
        s3.folder.create_bytes("x", b"2")
    assert s3.folder.read_bytes("x") == b"1"
    first = s3.folder.version("x")
    assert first
    assert s3.folder.swap_bytes("x", b"3", first) or s3.proxy is not None
    assert not s3.folder.swap_bytes("x", b"4", first)
    assert s3.folder.read_bytes("x") == b"3"
    s3.folder.remove("x")
    assert s3.folder.version("x") is None
    assert not s3.folder.swap_bytes("x", b"5", first)


def test_threads_share_one_client(s3: S3) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: s3.folder.write_bytes(f"t/{i}", str(i).encode()), range(24)))
        read = list(pool.map(lambda i: s3.folder.read_bytes(f"t/{i}"), range(24)))
        assert len(set(pool.map(lambda _: id(s3.folder.fs), range(24)))) == 1
    assert read == [str(i).encode() for i in range(24)]


def test_a_forked_process_has_a_client_of_its_own(s3: S3) -> None:
    s3.folder.write_bytes("x", b"1")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, s3.folder.read_bytes("x"))
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:
        assert file.read() == b"1"
    assert os.waitpid(child, 0)[1] == 0
    assert s3.folder.read_bytes("x") == b"1"


def test_an_address_without_a_bucket_is_refused(s3: S3) -> None:
    with pytest.raises(ConfigError, match="bucket does not exist"):
        Folder("s3://nowhere/x").write_bytes("a", b"1")


# ---- media


def test_objects_whole_and_by_range(s3: S3) -> None:
    s3.other.pipe_file(s3.folder.locate("clip.bin"), CONTENT)
    item, counter = MediaItem(uri=f"{s3.url}/clip.bin"), FetchCounter()
    facts = stat_source(item)
    assert facts.num_bytes == len(CONTENT)
    assert re.fullmatch(rf"etag:{re.escape(item.uri or '')}:[0-9a-f]+:{len(CONTENT)}", facts.source_id)
    assert read_source(item, counter) == CONTENT
    with open_source(item, counter) as file:
        file.seek(-100, os.SEEK_END)
        assert file.read() == CONTENT[-100:]
        for start in (2_000_000, 17, 1_000_000):
            file.seek(start)
            assert file.read(70_000) == CONTENT[start : start + 70_000]
    assert (counter.fetches, counter.bytes_fetched) == (2, len(CONTENT) + 210_100)
    s3.other.pipe_file(s3.folder.locate("clip.bin"), b"changed")
    assert stat_source(item).source_id != facts.source_id
    assert read_source(item, counter) == b"changed"


def test_members_of_archives_are_single_ranges(s3: S3) -> None:
    files = {f"{number}.jpg": bytes([number]) * 40_000 for number in range(60)}
    for name, data in (("s.tar", make_tar(files)), ("s.zip", make_zip(files))):
        s3.other.pipe_file(s3.folder.locate(name), data)
        counter = FetchCounter()
        for member, content in files.items():
            item = MediaItem(uri=f"{s3.url}/{name}#{member}")
            assert stat_source(item).source_id.startswith(f"etag:{s3.url}/{name}:")
            assert read_source(item, counter) == content
        assert counter.fetches == 60
        assert counter.bytes_fetched < 61 * 41_000
        with open_source(MediaItem(uri=f"{s3.url}/{name}#7.jpg"), FetchCounter()) as file:
            file.seek(-3, os.SEEK_END)
            assert file.read() == bytes([7]) * 3
        s3.other.pipe_file(s3.folder.locate(name), data[:1000])
        with pytest.raises(ItemError) as caught:
            read_source(MediaItem(uri=f"{s3.url}/{name}#59.jpg"), counter)
        assert caught.value.code == "content_mismatch"


def test_missing_objects_and_prefixes_are_the_items_fault(s3: S3) -> None:
    s3.folder.write_bytes("p/x", b"1")
    for name, code in (("nowhere.jpg", "not_found"), ("p", "not_a_file")):
        with pytest.raises(ItemError) as caught:
            stat_source(MediaItem(uri=f"{s3.url}/{name}"))
        assert caught.value.code == code


def test_an_object_replaced_while_it_is_read_is_quarantined(s3: S3) -> None:
    s3.other.pipe_file(s3.folder.locate("clip.bin"), CONTENT)
    with open_source(MediaItem(uri=f"{s3.url}/clip.bin"), FetchCounter()) as file:
        file.read(10)
        s3.other.pipe_file(s3.folder.locate("clip.bin"), CONTENT[::-1])
        file.seek(2 * 2**20)
        with pytest.raises(ItemError) as caught:
            file.read(10)
    assert caught.value.code == "content_mismatch"


# ---- listings


def test_a_prefix_lists_its_media(s3: S3) -> None:
    for name in ("in/b.jpg", "in/a/c.mp4", "in/.hidden.jpg", "in/manifest.jsonl", "in/", "in/a/", "inside.jpg"):
        s3.other.pipe_file(s3.folder.locate(name), b"x" if not name.endswith("/") else b"")
    for given in (f"{s3.url}/in", f"{s3.url}/in/"):
        assert [(r.id, r.media[0].uri) for r in read_manifest(given, limit=None)] == [
            ("a/c.mp4", f"{s3.url}/in/a/c.mp4"),
            ("b.jpg", f"{s3.url}/in/b.jpg"),
        ]
    assert [r.id for r in read_manifest(f"{s3.url}/in/*.jpg", limit=None)] == ["b.jpg"]
    assert [r.id for r in read_manifest(f"{s3.url}/in/b.jpg", limit=None)] == ["b.jpg"]
    with pytest.raises(ManifestError, match="no such file or folder"):
        next(read_manifest(f"{s3.url}/nothing", limit=None))


def test_manifests_are_read_frozen_and_read_by_range(s3: S3, tmp_path: Path) -> None:
    rows = [{"id": f"item-{i}", "uri": f"media/{i}.jpg"} for i in range(100)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "m.parquet")
    s3.other.put_file(str(tmp_path / "m.parquet"), s3.folder.locate("m.parquet"))
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    s3.other.pipe_file(s3.folder.locate("m.jsonl"), lines.encode())
    s3.other.pipe_file(
        s3.folder.locate("m.csv"), b"id,uri\n" + b"".join(b"item-%d,media/%d.jpg\n" % (i, i) for i in range(100))
    )
    digests = set()
    for name in ("m.parquet", "m.jsonl", "m.csv"):
        with stage_manifest(f"{s3.url}/{name}", limit=None, rows_per_file=30) as staged:
            digests.add(staged.digest)
            run = s3.folder.sub(f"run-{name}")
            publish_manifest(staged, run)
            assert publish_manifest(staged, run).num_items == 100
        assert [r.id for r in read_range(run, 25, 65)] == [f"item-{i}" for i in range(25, 65)]
        assert read_range(run, 3, 4)[0].media[0].uri == f"{s3.url}/media/3.jpg"
    assert len(digests) == 1
    assert freeze_manifest("elsewhere is not looked at", run, limit=None).num_items == 100
    with pytest.raises(ManifestError, match="no such manifest file"):
        next(read_manifest(f"{s3.url}/other.jsonl", limit=None))


def test_demo_media_are_the_same_files_as_on_a_disk(s3: S3, tmp_path: Path) -> None:
    for _ in range(2):
        make_demo_media(f"{s3.url}/manifest.jsonl", images=3, videos=1, seed=4)
    make_demo_media(str(tmp_path / "manifest.jsonl"), images=3, videos=1, seed=4)
    local = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert s3.names() == [str(path.relative_to(tmp_path)) for path in local]
    assert [s3.folder.read_bytes(name) for name in s3.names()] == [path.read_bytes() for path in local]


# ---- runs


def test_the_ledger_is_read_back(s3: S3) -> None:
    for window in (3, 1, 2):
        Ledger(s3.folder).record("encode", window, {"counts": window})
    Ledger(s3.folder).record("encode", 1, {"counts": "the first stands"})
    Ledger(s3.folder).forget("encode", 2)
    assert Ledger(s3.folder).finished("encode") == {1: {"counts": 1}, 3: {"counts": 3}}
    assert Ledger(s3.folder).finished("generate") == {}


def test_a_part_is_the_same_bytes_as_on_a_disk(s3: S3, tmp_path: Path) -> None:
    table = pa.Table.from_pylist([dict.fromkeys(PART_SCHEMA.names) | {"item_index": i} for i in range(9)], PART_SCHEMA)
    name = write_part(s3.folder, 0, table)
    write_part(Folder(str(tmp_path)), 0, table)
    assert s3.folder.read_bytes(name) == (tmp_path / name).read_bytes()
    with s3.folder.open(name) as file:
        assert pq.read_table(file).equals(table)


def test_the_lock_has_one_holder(s3: S3) -> None:
    with run_lock(s3.folder) as lock:
        with pytest.raises(RunLockedError, match=rf"on host {re.escape(socket.gethostname())}, pid {os.getpid()},"):
            run_lock(s3.folder).__enter__()
        lock.check()
        assert s3.names() == ["_run/lock.json"]
    assert s3.names() == []
    with run_lock(s3.folder):
        pass


def put_lock(s3: S3, age_seconds: float) -> None:
    holder = {"host": "far", "pid": 7, "started": "then", "token": "other", "beat": time.time() - age_seconds}
    s3.other.pipe_file(s3.folder.locate("_run/lock.json"), json.dumps(holder).encode())


def test_a_stale_lock_is_taken_over_by_one(s3: S3) -> None:
    put_lock(s3, age_seconds=61)
    won, lost = [], []
    together, ended = threading.Barrier(4), threading.Barrier(4)

    def start() -> None:
        together.wait()
        try:
            with run_lock(s3.folder):
                won.append(1)
                ended.wait()
        except RunLockedError:
            lost.append(1)
            ended.wait()

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 3)


def test_a_lock_is_kept_fresh_and_its_loss_noticed(s3: S3) -> None:
    with run_lock(s3.folder, heartbeat_seconds=0.02) as lock:
        first = s3.folder.read_json("_run/lock.json")["beat"]
        wait_until(lambda: s3.folder.read_json("_run/lock.json")["beat"] > first)
        lock.check()
        put_lock(s3, age_seconds=0)
        wait_until(lock.lost.is_set)
        with pytest.raises(RunLockedError, match="no longer holds the run"):
            lock.check()
    assert json.loads(s3.other.cat_file(s3.folder.locate("_run/lock.json")))["host"] == "far"


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---- the feature store


def test_records_survive_their_machine(s3: S3, tmp_path: Path) -> None:
    keyed = [keyed_record(i) for i in range(4)]
    here = FeatureStore(f"{s3.url}/store", str(tmp_path / "here"))
    writer = here.writer()
    [first] = {writer.put([record]) for record in keyed[:3]}
    assert s3.names() == []
    writer.seal()
    second = writer.put(keyed[3:])
    writer.close()  # as a writer that died
    assert [shard.shard_id for shard in here.recover() if shard] == [second]

    there = FeatureStore(f"{s3.url}/store", str(tmp_path / "there"))
    keys = [key for key, _ in keyed]
    assert there.find([*keys, "never"]) == {**dict.fromkeys(keys[:3], first), keys[3]: second}
    found = there.fetch([(first, key) for key in keys[:3]] + [(second, keys[3])])
    assert [encode_record(record) for record in found if record] == [encode_record(record) for _, record in keyed]
    assert there.holds(first)
    assert there.fallbacks == 0

    here.delete_shards([first, second])
    assert s3.names() == []
    assert not FeatureStore(f"{s3.url}/store", str(tmp_path / "third")).holds(first)


# ---- credentials, and a server that is away


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "SignatureDoesNotMatch"),
        ({"AWS_ACCESS_KEY_ID": "nobody"}, "InvalidAccessKeyId"),
        (
            {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null"},
            "NoCredentials",
        ),
    ],
)
def test_wrong_credentials_are_said_so(
    gateway: Gateway, use_s3: Callable[[dict[str, str]], None], changed: dict[str, str], said: str, tmp_path: Path
) -> None:
    use_s3({**s3_environment(gateway.url, read_timeout=15), **changed})
    url = f"s3://{BUCKET}/credentials"
    calls: list[Callable[[], object]] = [
        lambda: Folder(url).exists("x"),
        lambda: Folder(url).read_bytes("x"),
        lambda: Folder(url).open("x"),
        lambda: Folder(url).list(),
        lambda: Folder(url).write_bytes("x", b"1"),
        lambda: Folder(url).create_bytes("x", b"1"),
        lambda: Folder(url).remove("x"),
        lambda: run_lock(Folder(url)).__enter__(),
        lambda: list(read_manifest(f"{url}/m.jsonl", limit=None)),
        lambda: list(read_manifest(f"{url}/media/", limit=None)),
        lambda: list(read_manifest(f"{url}/media/*.jpg", limit=None)),
        lambda: make_demo_media(f"{url}/m.jsonl", images=1, videos=0, seed=1),
        lambda: FeatureStore(url, str(tmp_path)).find(["key"]),
        lambda: stat_source(MediaItem(uri=f"{url}/x.jpg")),
        lambda: read_source(MediaItem(uri=f"{url}/x.jpg"), FetchCounter()),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match=f"the credentials for s3:// are not valid; .*{said}"):
            call()


def test_a_server_that_stays_away_is_a_passing_failure(use_s3: Callable[[dict[str, str]], None]) -> None:
    use_s3(s3_environment(f"http://127.0.0.1:{free_port()}", read_timeout=1))
    with pytest.raises(TransientError, match=r"s3://headrace/x/y: .*Could not connect"):
        Folder(f"s3://{BUCKET}/x").read_bytes("y")


def test_a_server_that_accepts_and_never_answers_is_a_passing_failure(use_s3: Callable[[dict[str, str]], None]) -> None:
    """Also for a write, whose client would first wait to be told to go on."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        use_s3(s3_environment(f"http://127.0.0.1:{silent.getsockname()[1]}", read_timeout=0.1))
        with pytest.raises(TransientError, match="Read timeout"):
            Folder(f"s3://{BUCKET}/x").write_bytes("y", b"1")


@pytest.mark.parametrize("kind", [*(k for k in KINDS if k != "stall"), pytest.param("stall", marks=pytest.mark.slow)])
def test_every_kind_of_fault_is_got_over(
    gateway: Gateway, use_s3: Callable[[dict[str, str]], None], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("tests.s3.proxy.KINDS", (kind,))
    with FaultyProxy(gateway.port, faults=0.4, seed=1, stall_seconds=1.0) as proxy:
        use_s3(s3_environment(proxy.url, read_timeout=0.3))
        folder = Folder(f"s3://{BUCKET}/{kind}")
        for i in range(3):
            folder.write_bytes(f"{i}", CONTENT[: 10 + i])
            assert folder.read_bytes(f"{i}") == CONTENT[: 10 + i]
        assert folder.list() == ["0", "1", "2"]
        folder.remove("")
        assert not folder.exists("0")
    assert proxy.injected[kind] >= 3


def test_a_lock_is_held_though_the_answer_to_its_creation_was_lost(
    gateway: Gateway, use_s3: Callable[[dict[str, str]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.s3.proxy.KINDS", ("lost_answer",))
    with FaultyProxy(gateway.port, faults=0.7, seed=2, stall_seconds=1.0) as proxy:
        proxy.methods = ("PUT",)
        use_s3(s3_environment(proxy.url, read_timeout=5))
        folder = Folder(f"s3://{BUCKET}/lost")
        for _ in range(4):
            with run_lock(folder) as lock:
                lock.check()
        assert not folder.exists("_run/lock.json")
    assert proxy.injected["lost_answer"] >= 4
