"""Each format to the same requests, each mistake to a message that says where, each id once."""

import base64
import csv
import json
import math
import os
import tracemalloc
import uuid
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.errors import ConfigError, ManifestError
from pipeline.runs.listing import read_manifest
from pipeline.runs.manifest import freeze_manifest, publish_manifest, read_frozen, read_range, stage_manifest
from pipeline.schema import MediaItem, Request
from pipeline.storage import Folder

CHAT = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Häh?"}]}]
ROWS = [
    {"id": "a", "uri": "clips/a.mp4", "prompt": "What happens, and why?"},
    {"id": "b", "images": ["1.jpg", "s3://bucket/2.bin"], "tenant": "acme"},
    {"id": "c", "media": [{"uri": "/abs/c.webm", "version": "v1"}, {"uri": "x.dat", "modality": "image"}]},
    {"id": "d", "messages": CHAT},
    {"id": "e"},
]


def expected_rows(base: str) -> list[Request]:
    return [
        Request(
            item_index=0,
            id="a",
            media=(MediaItem(uri=f"{base}/clips/a.mp4", modality="video"),),
            prompt="What happens, and why?",
        ),
        Request(
            item_index=1,
            id="b",
            media=(
                MediaItem(uri=f"{base}/1.jpg", modality="image"),
                MediaItem(uri="s3://bucket/2.bin", modality="image"),
            ),
            tenant="acme",
        ),
        Request(
            item_index=2,
            id="c",
            media=(
                MediaItem(uri="/abs/c.webm", modality="video", version="v1"),
                MediaItem(uri=f"{base}/x.dat", modality="image"),
            ),
        ),
        Request(item_index=3, id="d", messages=tuple(CHAT)),
        Request(item_index=4, id="e"),
    ]


def write_jsonl(path: Path, rows: list[object]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_csv(path: Path, rows: list[dict[str, object]]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        for row in rows:
            writer.writerow({k: json.dumps(v) if isinstance(v, list) else v for k, v in row.items()})


def write_parquet(path: Path, rows: list[dict[str, object]]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    pq.write_table(pa.table({name: [row.get(name) for row in rows] for name in names}), path)


WRITERS = {".jsonl": write_jsonl, ".ndjson": write_jsonl, ".csv": write_csv, ".parquet": write_parquet}


def write_manifest(folder: Path, suffix: str, rows: list[dict[str, object]]) -> str:
    path = folder / f"manifest{suffix}"
    WRITERS[suffix](path, rows)
    return str(path)


def read_all(input: str) -> list[Request]:
    return list(read_manifest(input, limit=None))


def refusal(input: str) -> str:
    with pytest.raises(ManifestError) as caught:
        read_all(input)
    return str(caught.value)


@pytest.fixture
def memory() -> str:
    url = f"memory://{uuid.uuid4().hex}"
    yield url
    fsspec.filesystem("memory").rm(url, recursive=True)


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("scheme", ["", "file://"])
def test_every_format_gives_the_same_requests(tmp_path: Path, suffix: str, scheme: str) -> None:
    path = write_manifest(tmp_path, suffix, ROWS)
    assert read_all(scheme + path) == expected_rows(str(tmp_path))


@pytest.mark.parametrize("suffix", WRITERS)
def test_every_format_is_read_from_an_object_store(tmp_path: Path, memory: str, suffix: str) -> None:
    path = write_manifest(tmp_path, suffix, ROWS)
    fsspec.filesystem("memory").put_file(path, f"{memory}/lists/manifest{suffix}")
    assert read_all(f"{memory}/lists/manifest{suffix}") == expected_rows(f"{memory}/lists")


@pytest.mark.parametrize("suffix", WRITERS)
def test_integer_ids_are_strings_and_limit_counts_rows(tmp_path: Path, suffix: str) -> None:
    path = write_manifest(tmp_path, suffix, [{"id": n, "uri": f"{n}.png"} for n in (7, -8, 9)])
    assert [request.id for request in read_manifest(path, limit=2)] == ["7", "-8"]


@pytest.mark.parametrize(
    ("uri", "modality"),
    [
        ("a.JPG", "image"),
        ("a.b/c.webp", "image"),
        ("a.MOV", "video"),
        ("a.ts", "video"),
        ("a.FLAC", "audio"),
        ("a.m4a", "audio"),
        ("a.ogg", None),
        ("a", None),
        ("a.mp4/frame", None),
        ("https://host/a.png?size=2.mp4#x", "image"),
        ("s3://bucket/a?b.mp4", "video"),
    ],
)
def test_modality_is_guessed_from_the_extension(tmp_path: Path, uri: str, modality: str | None) -> None:
    (request,) = read_all(write_manifest(tmp_path, ".jsonl", [{"id": "a", "uri": uri}]))
    assert request.media[0].modality == modality


def test_columns_say_the_modality_and_images_come_first(tmp_path: Path) -> None:
    row = {"id": "a", "audio": "s.mp4", "video": "v.jpg", "images": ["i", "j.mp4"], "image": "k"}
    (request,) = read_all(write_manifest(tmp_path, ".jsonl", [row]))
    found = [(os.path.basename(item.uri or ""), item.modality) for item in request.media]
    assert found == [("k", "image"), ("i", "image"), ("j.mp4", "image"), ("v.jpg", "video"), ("s.mp4", "audio")]


@pytest.mark.parametrize(
    ("uri", "resolved"),
    [
        ("a.png", "DIR/a.png"),
        ("../o/a.png", "PARENT/o/a.png"),
        ("./a.png", "DIR/a.png"),
        ("gs://b/a.png", "gs://b/a.png"),
    ],
)
def test_relative_uris_start_at_the_manifest(tmp_path: Path, uri: str, resolved: str) -> None:
    (request,) = read_all(write_manifest(tmp_path, ".jsonl", [{"id": "a", "uri": uri}]))
    assert request.media[0].uri == resolved.replace("DIR", str(tmp_path)).replace("PARENT", str(tmp_path.parent))


def test_a_single_media_row_may_say_its_version_hash_and_modality(tmp_path: Path) -> None:
    row = {"id": "a", "uri": "a", "version": "3", "sha256": "AB" * 32, "modality": "video"}
    (request,) = read_all(write_manifest(tmp_path, ".csv", [row]))
    assert request.media == (MediaItem(uri=f"{tmp_path}/a", modality="video", version="3", sha256="ab" * 32),)


def test_inline_bytes(tmp_path: Path) -> None:
    data = bytes(range(256))
    binary = read_all(write_manifest(tmp_path, ".parquet", [{"id": "a", "data": data, "modality": "image"}]))
    encoded = {"data": base64.b64encode(data).decode(), "modality": "image"}
    text = read_all(write_manifest(tmp_path, ".jsonl", [{"id": "a", "media": [encoded]}]))
    assert binary == text == [Request(item_index=0, id="a", media=(MediaItem(data=data, modality="image"),))]


@pytest.mark.parametrize(
    "uri",
    [
        "data:image/png;base64,AP/+YQ==",
        "DATA:image/png;BASE64,AP%2F%2BYQ%3D%3D",
        "data:image/png;name=a.png;base64,AP/+YQ==",
        "data:image/png,%00%ff%FEa",
        "data:,%00%ff%FE%61",
    ],
)
def test_a_data_uri_is_inline_bytes(tmp_path: Path, uri: str) -> None:
    for row in ({"id": "a", "uri": uri}, {"id": "a", "media": [uri]}, {"id": "a", "media": [{"uri": uri}]}):
        (request,) = read_all(write_manifest(tmp_path, ".jsonl", [row]))
        assert request.media == (MediaItem(data=b"\x00\xff\xfea"),)


def test_parquet_messages_as_structs_lose_the_nulls_of_other_parts(tmp_path: Path) -> None:
    (request,) = read_all(write_manifest(tmp_path, ".parquet", [{"id": "a", "messages": CHAT}]))
    assert request.messages == tuple(CHAT)


def test_blank_lines_and_a_byte_order_mark_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"id": "a"}\r\n\n  \n{"id": "b"}')
    assert [request.id for request in read_all(str(path))] == ["a", "b"]
    table = tmp_path / "m.csv"
    table.write_bytes(b'\xef\xbb\xbfid,prompt\r\na,"two\nlines"\r\n\r\nb,\r\n')
    assert [(request.id, request.prompt) for request in read_all(str(table))] == [("a", "two\nlines"), ("b", None)]


GOOD = {"id": "good", "uri": "a.png"}


def part(start: object, stop: object = None) -> dict[str, object]:
    return {"uri": "a.mp4", "start_seconds": start, "stop_seconds": stop}


@pytest.mark.parametrize("suffix", WRITERS)
def test_parts_of_videos_and_sounds(tmp_path: Path, folder: Folder, suffix: str) -> None:
    entries = [part(12, 20.5), part(12.25), part(None, 3), {**part(0, 1), "modality": "audio"}]
    path = write_manifest(tmp_path, suffix, [{"id": "a", "media": entries}])
    freeze_manifest(path, folder, limit=None)
    [request] = read_all(path)
    assert read_range(folder, 0, 1) == [request]
    assert [(item.modality, item.start_seconds, item.stop_seconds) for item in request.media] == [
        ("video", 12.0, 20.5),
        ("video", 12.25, None),
        ("video", None, 3.0),
        ("audio", 0.0, 1.0),
    ]
    names = [item.name.removeprefix(f"{tmp_path}/") for item in request.media]
    assert names == ["a.mp4#t=12,20.5", "a.mp4#t=12.25", "a.mp4#t=0,3", "a.mp4#t=0,1"]


BEFORE_PARTS = "007ebec779e9d41ef866f0469f98314fee142e44385178aa3cd39c633240978d"


def test_listings_without_parts_keep_their_digest(tmp_path: Path) -> None:
    with stage_manifest(write_manifest(tmp_path, ".jsonl", [{"id": "a", "uri": "s3://b/a.mp4"}]), limit=None) as staged:
        assert staged.digest == BEFORE_PARTS
    with stage_manifest(
        write_manifest(tmp_path, ".jsonl", [{"id": "a", "media": [{"uri": "s3://b/a.mp4", "start_seconds": 0}]}]),
        limit=None,
    ) as staged:
        assert staged.digest != BEFORE_PARTS


@pytest.mark.parametrize(
    ("row", "column", "said"),
    [
        ({"uri": "a.png"}, "id", "missing; every row needs an id, the columns are ['uri']"),
        ({"id": None, "uri": "a"}, "id", "null"),
        ({"id": "", "uri": "a"}, "id", "empty"),
        ({"id": 1.5, "uri": "a"}, "id", "expected a string or an integer, got 1.5"),
        ({"id": True, "uri": "a"}, "id", "got True"),
        ({"id": "\udcff", "uri": "a"}, "id", "not valid Unicode: '\\udcff'"),
        ({"id": "a", "uri": 3}, "uri", "expected a uri or a list of uris, got 3"),
        ({"id": "a", "uri": ""}, "uri", "not a uri: ''"),
        ({"id": "a", "uri": "data:image/png;base64"}, "uri", "a comma before its data, got 'data:image/png;base64'"),
        ({"id": "a", "uri": "data:image/png;base64,AA"}, "uri", "not valid base64"),
        ({"id": "a", "images": ["a", None]}, "images", "expected a uri, got None"),
        ({"id": "a", "data": "QQ=="}, "data", "expected bytes (Parquet only), got 'QQ=='"),
        ({"id": "a", "media": "a.png"}, "media", "expected a list, got 'a.png'"),
        ({"id": "a", "media": [7]}, "media[0]", "got 7"),
        ({"id": "a", "media": [{"url": "a"}]}, "media[0]", "got neither: {'url': 'a'}"),
        ({"id": "a", "media": [{"uri": "a"}, {"uri": "a", "data": "QQ=="}]}, "media[1]", "got both"),
        ({"id": "a", "media": [{"data": "Q?=="}]}, "media[0]", "not valid base64"),
        ({"id": "a", "media": [{"data": [1]}]}, "media[0]", "bytes or a base64 string, got [1]"),
        ({"id": "a", "media": [{"uri": "a", "modality": "smell"}]}, "media[0]", "'smell'; use image or video"),
        ({"id": "a", "media": [part(-1)]}, "media[0].start_seconds", "seconds from the start of the file, got -1"),
        ({"id": "a", "media": [part(0, "9")]}, "media[0].stop_seconds", "got '9'"),
        ({"id": "a", "media": [part(True)]}, "media[0].start_seconds", "got True"),
        ({"id": "a", "media": [part(0, math.inf)]}, "media[0].stop_seconds", "got inf"),
        ({"id": "a", "media": [part(0, math.nan)]}, "media[0].stop_seconds", "got nan"),
        ({"id": "a", "media": [part(2, 2)]}, "media[0]", "stops behind its start, got start_seconds 2.0 and"),
        ({"id": "a", "media": [part(None, 0)]}, "media[0]", "stops behind its start"),
        ({"id": "a", "media": [{**part(1), "modality": "image"}]}, "media[0]", "are of videos and sounds"),
        ({"id": "a", "media": [{**part(1), "page": 0}]}, "media[0]", "are of videos and sounds"),
        ({"id": "a", "media": [{"uri": "a", "sha256": "ab"}]}, "media[0]", "64 hex digits, got 'ab'"),
        ({"id": "a", "media": [{"uri": "a", "version": 3}]}, "media[0]", "expected a string, got 3"),
        ({"id": "a", "media": ["a"], "image": "b"}, "media", "given together with ['image']"),
        ({"id": "a", "images": ["a", "b"], "version": "1"}, "version", "the row has 2"),
        ({"id": "a", "image": "a", "modality": "video"}, "modality", "'video' contradicts 'image'"),
        ({"id": "a", "prompt": 4}, "prompt", "expected a string, got 4"),
        ({"id": "a", "tenant": ["x"]}, "tenant", "expected a string, got ['x']"),
        ({"id": "a", "prompt": "p", "messages": CHAT}, "messages", "both 'prompt' and 'messages'"),
        ({"id": "a", "messages": []}, "messages", "expected a list of {role, content}, got []"),
        ({"id": "a", "messages": "[{"}, "messages", "not valid JSON"),
        ({"id": "a", "messages": [{"content": "x"}]}, "messages[0]", "expected {role, content}"),
        ({"id": "a", "messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0]", "list of parts"),
        ({"id": "a", "messages": [{"role": "user", "content": "\ud800"}]}, "messages[0]", "cannot be written"),
        ({"id": "a", "vedio": "a.mp4"}, "vedio", "did you mean 'video'?"),
        ({"id": "a", "Image_Path": "a.mp4"}, "Image_Path", "did you mean 'image'?"),
        ({"id": "a", "url": "a.mp4"}, "url", "did you mean 'uri'?"),
        ({"id": "a", "promt": "What?"}, "promt", "did you mean 'prompt'?"),
    ],
)
def test_a_wrong_row_is_refused_with_file_row_and_column(
    tmp_path: Path, row: dict[str, object], column: str, said: str
) -> None:
    message = refusal(write_manifest(tmp_path, ".jsonl", [GOOD, GOOD | {"id": "g2"}, row]))
    assert message.startswith(f"{tmp_path}/manifest.jsonl: row 3, column {column!r}: ")
    assert said in message


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_a_manifest_is_closed_as_soon_as_it_is_refused_or_no_longer_read(tmp_path: Path, suffix: str) -> None:
    path = write_manifest(tmp_path, suffix, [GOOD, GOOD | {"id": None}, GOOD | {"id": "g3"}])
    with pytest.raises(ManifestError) as caught:  # which holds on to the frames that read
        read_all(path)
    limited = list(read_manifest(path, limit=1))
    assert len(limited) == 1 and caught.value.__traceback__ is not None
    links = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    assert os.path.realpath(path) not in links


@pytest.mark.parametrize("line", ["[1]", "{", '{"id": "\xff"}', "[" * 100_000])
def test_a_line_that_is_no_object_is_refused_with_its_line_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"id": "a"}\n\n' + line.encode("latin-1"))
    message = refusal(str(path))
    assert message.startswith(f"{path}: row 3: ")
    assert len(message) < 1000


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@pytest.mark.parametrize(
    ("rows", "column", "said"),
    [
        ([{"name": "a", "uri": "a"}], "id", "missing; every row needs an id, the columns are ['name', 'uri']"),
        ([{"id": "a", "uri": "a"}, {"uri": "b"}], "id", "null"),
        ([{"id": "a", "videoo": "a"}], "videoo", "did you mean 'video'?"),
        ([{"id": "a", "uri": "a"}, {"id": "b", "uri": "b", "sha256": "?"}], "uri", "64 hex digits, got '?'"),
    ],
)
def test_wrong_columns_of_tables(
    tmp_path: Path, suffix: str, rows: list[dict[str, object]], column: str, said: str
) -> None:
    message = refusal(write_manifest(tmp_path, suffix, rows))
    assert message.startswith(f"{tmp_path}/manifest{suffix}: row {len(rows)}, column {column!r}: ")
    assert said in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"id,uri\na,b,c\n", "row 1: 3 fields under 2 columns"),
        (b"id,media\na,[oops\n", "row 1, column 'media': not valid JSON"),
        (b'id,uri\na,b\nc,"d" e\n', "row 2: not valid UTF-8 CSV"),
        (b"id,uri\na,\xff\n", "row 1: not valid UTF-8 CSV"),
    ],
)
def test_broken_csv(tmp_path: Path, text: bytes, said: str) -> None:
    path = tmp_path / "m.csv"
    path.write_bytes(text)
    assert refusal(str(path)).startswith(f"{path}: {said}")


@pytest.mark.parametrize("name", ["date", "metadata", "title", "meta", "split"])
def test_ordinary_columns_of_text_only_rows_are_ignored(tmp_path: Path, name: str) -> None:
    assert read_all(write_manifest(tmp_path, ".jsonl", [{"id": "a", name: "x"}])) == [Request(item_index=0, id="a")]


@pytest.mark.parametrize("row", [{"id": "a", "url": "x", "media": []}, {"id": "a", "url": "x", "uri": "u"}])
def test_a_media_column_allows_any_other_name(tmp_path: Path, row: dict[str, object]) -> None:
    assert len(read_all(write_manifest(tmp_path, ".jsonl", [row]))) == 1


@pytest.mark.parametrize(
    ("input", "said"),
    [
        ("nowhere.jsonl", "nowhere.jsonl: no such manifest file"),
        ("nowhere", "nowhere: no such file or folder"),
        ("no*where", "no*where: no such file or folder"),
        ("memory://nowhere/m.csv", "no such manifest file"),
        ("memory://nowhere/at/all", "no such file or folder"),
        ("empty.jsonl", "no rows"),
        ("empty.csv", "row 1, column 'id': missing"),
        ("header.csv", "no rows"),
        ("empty.parquet", "not a readable Parquet file"),
        ("spark.parquet", "is a folder; a manifest is one file"),
        ("lists", "no media files there; to read a manifest, name it: {cwd}/lists/m.jsonl"),
        ("hidden", "no media files there"),
        ("http://host/m.jsonl", "http:// is not read from"),
        ("https://host/m.jsonl", "https:// is not read from"),
        ("simplecache::https://host/m.jsonl", "is not read from"),
    ],
)
def test_input_that_is_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, input: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("empty.jsonl", "empty.csv", "empty.parquet"):
        Path(name).touch()
    Path("header.csv").write_text("id,uri\n")
    for name in ("spark.parquet/part-0.parquet", "lists/m.jsonl", "hidden/.DS_Store"):
        Path(name).parent.mkdir()
        Path(name).touch()
    with pytest.raises(ConfigError) as caught:
        read_all(input)
    assert said.format(cwd=tmp_path) in str(caught.value)


TREE = ["b.mp4", "a/z.JPG", "a/notes.txt", "a/[1]/q.png", "list.csv", ".hidden.png", ".cache/x.png", "a/.y.png"]
LISTED = [("a/[1]/q.png", "image"), ("a/notes.txt", None), ("a/z.JPG", "image"), ("b.mp4", "video")]


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_folder_is_listed_by_path(tmp_path: Path, memory: str, slash: str) -> None:
    for name in TREE:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
        fsspec.filesystem("memory").pipe_file(f"{memory}/in/{name}", b"x")
    for root, base in ((str(tmp_path), str(tmp_path)), (f"{memory}/in", f"{memory}/in")):
        assert [(r.id, r.media[0].modality, r.media[0].uri) for r in read_all(root + slash)] == [
            (name, modality, f"{base}/{name}") for name, modality in LISTED
        ]


@pytest.mark.parametrize(
    ("pattern", "ids"),
    [
        ("*.mp4", ["b.mp4"]),
        ("a/*", ["notes.txt", "z.JPG"]),
        ("**/*.png", ["a/[1]/q.png"]),
        ("a/[1]", ["q.png"]),
        ("b.mp4", ["b.mp4"]),
        ("**", [name for name, _ in LISTED]),
    ],
)
def test_a_glob_is_relative_to_its_fixed_part(tmp_path: Path, pattern: str, ids: list[str]) -> None:
    for name in TREE:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert [request.id for request in read_all(f"{tmp_path}/{pattern}")] == ids


def test_links_are_followed_and_loops_end(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real/a.png").touch()
    (tmp_path / "real/up").symlink_to(tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "in/link").symlink_to(tmp_path / "real")
    (tmp_path / "in/gone.png").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "in/pipe")
    assert [request.id for request in read_all(str(tmp_path / "in"))] == ["gone.png", "link/a.png"]


def test_a_file_name_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    with open(os.fsencode(tmp_path) + b"/\xff.png", "wb"):
        pass
    assert "row 1, column 'id': not valid Unicode: '\\udcff.png'" in refusal(str(tmp_path))


def test_reading_holds_a_few_rows_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text("".join(f'{{"id": "{n}", "uri": "{n}.mp4", "prompt": "{"x" * 1000}"}}\n' for n in range(20_000)))
    tracemalloc.start()
    try:
        count = sum(1 for _ in read_manifest(str(path), limit=None))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == 20_000
    assert peak_bytes < 2**20  # the file has 20 MB


def test_freezing_holds_one_file_of_rows_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text("".join(f'{{"id": "{n}", "uri": "{n}.mp4", "prompt": "{"x" * 2000}"}}\n' for n in range(8_000)))
    tracemalloc.start()
    try:
        freeze_manifest(str(path), Folder(str(tmp_path / "run")), limit=None, rows_per_file=200)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 8 * 2**20  # 64 spill buffers of 64 KB, one file of rows; the manifest has 16 MB


# ---- freezing


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, memory: str) -> Folder:
    fsspec.filesystem("memory").pipe_file(f"{memory}/keep", b"")
    return Folder(str(tmp_path / "run") if request.param == "local" else f"{memory}/run")


def many(tmp_path: Path, count: int, suffix: str = ".jsonl") -> str:
    return write_manifest(tmp_path, suffix, [{"id": f"i{n}", "uri": f"{n}.png"} for n in range(count)])


@pytest.mark.parametrize("count", [1, 9, 10, 11, 25])
def test_frozen_ranges_are_the_requests(tmp_path: Path, folder: Folder, count: int) -> None:
    path = many(tmp_path, count)
    frozen = freeze_manifest(path, folder, limit=None, rows_per_file=10)
    assert frozen == read_frozen(folder)
    assert (frozen.num_items, frozen.num_texts) == (count, 0)
    assert len(frozen.files) == -(-count // 10)
    requests = read_all(path)
    for start, stop in [(0, count), (count - 1, count), (count // 3, count // 2), (count, count)]:
        assert read_range(folder, start, stop) == requests[start:stop]
    with pytest.raises(ValueError, match=rf"\[0, {count + 1}\) are not within the frozen listing of {count}"):
        read_range(folder, 0, count + 1)


def test_everything_a_request_holds_is_frozen(tmp_path: Path, folder: Folder) -> None:
    entry = {"data": "QUJD", "modality": "image", "version": "1", "sha256": "0" * 64}
    path = write_manifest(tmp_path, ".jsonl", [*ROWS, {"id": "f", "media": [entry], "tenant": "acme", "prompt": "ü"}])
    freeze_manifest(path, folder, limit=None)
    assert read_range(folder, 0, 6) == read_all(path)


def test_large_inline_bytes_are_read_by_row_group(tmp_path: Path) -> None:
    data = [bytes([n]) * (12 * 2**20) for n in range(5)]
    write_parquet(tmp_path / "m.parquet", [{"id": str(n), "data": each} for n, each in enumerate(data)])
    folder = Folder(str(tmp_path / "run"))
    frozen = freeze_manifest(str(tmp_path / "m.parquet"), folder, limit=None)
    with folder.open(frozen.files[0]) as raw, pq.ParquetFile(raw) as file:
        assert [file.metadata.row_group(g).num_rows for g in range(file.num_row_groups)] == [3, 2]
    assert [request.media[0].data for request in read_range(folder, 2, 5)] == data[2:]


def test_a_frozen_listing_is_not_read_from_its_input_again(tmp_path: Path, folder: Folder) -> None:
    path = many(tmp_path, 3)
    frozen = freeze_manifest(path, folder, limit=None)
    os.unlink(path)
    assert freeze_manifest(path, folder, limit=None) == frozen


def test_the_digest_covers_the_rows_and_nothing_else(tmp_path: Path) -> None:
    def digest(input: str, limit: int | None = None, rows_per_file: int = 4096) -> str:
        with stage_manifest(input, limit=limit, rows_per_file=rows_per_file) as staged:
            return staged.digest

    original = digest(write_manifest(tmp_path, ".jsonl", ROWS))
    assert digest(write_manifest(tmp_path, ".parquet", ROWS)) == original
    assert digest(write_manifest(tmp_path, ".csv", ROWS), rows_per_file=2) == original
    assert digest(f"{tmp_path}/manifest.csv", limit=4) != original
    changes = [
        ROWS[::-1],
        [*ROWS[:4], {"id": "f"}],
        [*ROWS[:4], {"id": "e", "prompt": ""}],
        [*ROWS[:4], {"id": "e", "media": [{"data": "QQ=="}]}],
        [*ROWS[:4], {"id": "e", "media": [{"data": "Qg=="}]}],
    ]
    digests = {digest(write_manifest(tmp_path, ".jsonl", rows)) for rows in changes}
    assert len(digests | {original}) == 6


def test_frozen_files_have_the_same_bytes_every_time(tmp_path: Path) -> None:
    path = many(tmp_path, 25)
    one, two = Folder(str(tmp_path / "1")), Folder(str(tmp_path / "2"))
    frozen = freeze_manifest(path, one, limit=None, rows_per_file=10)
    freeze_manifest(path, two, limit=None, rows_per_file=10)
    for name in [*frozen.files, "_run/manifest.json"]:
        assert one.read_bytes(name) == two.read_bytes(name)


def test_staged_listings_are_published_index_last(
    tmp_path: Path, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = many(tmp_path, 25)
    written: list[str] = []
    writing = Folder.writing
    monkeypatch.setattr(Folder, "writing", lambda self, name: (written.append(name), writing(self, name))[1])
    with stage_manifest(path, limit=None, rows_per_file=10) as staged:
        assert (staged.num_items, os.path.isdir(staged.directory)) == (25, True)
        written.clear()
        frozen = publish_manifest(staged, folder)
        assert written[-1] == "_run/manifest.json"
        assert sorted(written[:-1]) == [f"_run/manifest/part-{n:05d}.parquet" for n in range(3)]
        assert publish_manifest(staged, folder) == frozen
        assert len(written) == 4
    assert not os.path.exists(staged.directory)
    assert read_range(folder, 0, 25) == read_all(path)


def test_a_run_keeps_its_listing(tmp_path: Path, folder: Folder) -> None:
    freeze_manifest(many(tmp_path, 3), folder, limit=None)
    with (
        stage_manifest(many(tmp_path, 4), limit=None) as staged,
        pytest.raises(ManifestError, match=r"another listing \(3 items, .*now 4, .*use another run_id"),
    ):
        publish_manifest(staged, folder)


def test_a_refused_listing_leaves_no_staging_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_manifest(tmp_path, ".jsonl", [GOOD, GOOD])
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    with pytest.raises(ManifestError):
        stage_manifest(path, limit=None)
    assert not list((tmp_path / "tmp").iterdir())


def test_duplicates_are_named_whatever_their_bucket(tmp_path: Path) -> None:
    """Each of 300 ids in turn is repeated: together they fall in all 64 buckets, on both sides of a file boundary."""
    ids = [f"i{n}" for n in range(300)]
    for number in range(0, 300, 7):
        path = write_manifest(tmp_path, ".jsonl", [{"id": each} for each in [*ids, ids[number], "new"]])
        folder = Folder(str(tmp_path / f"run-{number}"))
        with pytest.raises(ManifestError) as caught:
            freeze_manifest(path, folder, limit=None, rows_per_file=100)
        assert str(caught.value).startswith(
            f"{path}: rows {number + 1} and 301, column 'id': duplicate id 'i{number}'; "
        )
        assert not folder.exists("_run/manifest.json")


def test_the_first_of_several_duplicates_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text("".join(f'{{"id": {json.dumps(each)}}}\n\n' for each in ["x", 7, "y", "y", "7", "x", "x"]))
    with pytest.raises(ManifestError, match=r"rows 5 and 7, column 'id': duplicate id 'y'"):
        freeze_manifest(str(path), Folder(str(tmp_path / "run")), limit=None)
    path.write_text('{"id": 7}\n{"id": "7"}\n')
    with pytest.raises(ManifestError, match=r"rows 1 and 2, column 'id': duplicate id '7'"):
        freeze_manifest(str(path), Folder(str(tmp_path / "run")), limit=None)
