"""A listing by page: each page once, in order, numbered; what cannot be opened stays one row."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import uuid
from collections.abc import Callable, Generator
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.errors import ManifestError, TransientError
from pipeline.media import source
from pipeline.media.sandbox import Probers
from pipeline.media.url_policy import SourcePolicy
from pipeline.runs import pages
from pipeline.runs.manifest import freeze_manifest, publish_manifest, read_range, stage_manifest
from pipeline.runs.pages import page_requests
from pipeline.schema import MediaItem, Request
from pipeline.storage import Folder
from tests.media.pdf_files import Page, make_pdf
from tests.media.sandboxed import open_hostile, ordering

THREE = make_pdf([Page(), Page(), Page()])


def frozen(
    input: str,
    tmp_path: Path,
    *,
    limit: int | None = None,
    expand_pages: bool = True,
    reader: Probers | None = None,
) -> list[Request]:
    folder = Folder(str(tmp_path / f"run-{uuid.uuid4().hex}"))
    manifest = freeze_manifest(input, folder, limit=limit, rows_per_file=2, expand_pages=expand_pages, reader=reader)
    return read_range(folder, 0, manifest.num_items)


def shown(requests: list[Request]) -> list[tuple[str, str | None, int | None]]:
    """(id, modality, page) of requests with one medium."""
    return [(request.id, item.modality, item.page) for request in requests for item in request.media]


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "in") if request.param == "local" else f"memory://{uuid.uuid4().hex}/in"


def put(folder: str, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        with fsspec.open(f"{folder}/{name}", "wb", auto_mkdir=True) as file:
            file.write(data)


def test_a_folder_by_page(folder: str, tmp_path: Path) -> None:
    put(folder, {"a.png": b"-", "b.pdf": THREE, "c/D.PDF": make_pdf([Page()]), "e.mp4": b"-"})
    requests = frozen(folder, tmp_path)
    assert shown(requests) == [
        ("a.png", "image", None),
        ("b.pdf#page=1", "page", 0),
        ("b.pdf#page=2", "page", 1),
        ("b.pdf#page=3", "page", 2),
        ("c/D.PDF#page=1", "page", 0),
        ("e.mp4", "video", None),
    ]
    assert [request.item_index for request in requests] == list(range(6))
    assert requests[2].media[0].uri == f"{folder}/b.pdf"


def test_a_document_that_cannot_be_opened_stays_one_row(folder: str, tmp_path: Path) -> None:
    put(folder, {"a.pdf": b"", "b.pdf": THREE[:100], "c.pdf": make_pdf([]), "d.pdf": THREE})
    assert shown(frozen(folder, tmp_path))[:4] == [
        ("a.pdf", "page", 0),
        ("b.pdf", "page", 0),
        ("c.pdf", "page", 0),
        ("d.pdf#page=1", "page", 0),
    ]


def test_a_document_that_breaks_what_counts_its_pages_stays_one_row_without_a_page(tmp_path: Path) -> None:
    files = {f"{what}.pdf": ordering(THREE, f"count_{what}") for what in ("hang", "segfault", "as 0")}
    put(str(tmp_path / "in"), {**files, "whole.pdf": THREE})
    sandbox = open_hostile(item_seconds=1.0)
    try:
        requests = frozen(str(tmp_path / "in"), tmp_path, reader=Probers([sandbox]))
    finally:
        sandbox.close()
    assert shown(requests) == [
        ("as 0.pdf", "page", None),
        ("hang.pdf", "page", None),
        ("segfault.pdf", "page", None),
        *((f"whole.pdf#page={n + 1}", "page", n) for n in range(3)),
    ]


def test_rows_keep_what_they_ask_and_name(tmp_path: Path) -> None:
    (tmp_path / "x.pdf").write_bytes(THREE)
    (tmp_path / "scan").write_bytes(THREE)
    rows = [
        {"id": "asks", "uri": "x.pdf", "prompt": "What?", "tenant": "acme", "version": "7"},
        {"id": "named", "media": [{"uri": "x.pdf", "page": 1}]},
        {"id": "told", "uri": "scan", "modality": "page"},
        {"id": "none"},
        {"id": "several", "media": ["x.pdf", "y.jpg"]},
        {"id": "claimed", "image": "x.pdf"},
        {"id": "gone", "uri": "gone.pdf"},
    ]
    manifest = tmp_path / "m.jsonl"
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))
    requests = frozen(str(manifest), tmp_path)
    assert shown(requests) == [
        *((f"asks#page={n + 1}", "page", n) for n in range(3)),
        ("named", "page", 1),
        *((f"told#page={n + 1}", "page", n) for n in range(3)),
        ("several", None, None),
        ("several", "image", None),
        ("claimed", "image", None),
        ("gone", "page", 0),
    ]
    assert {(r.prompt, r.tenant, r.media[0].version) for r in requests[:3]} == {("What?", "acme", "7")}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_inline_documents_are_taken_apart_too(tmp_path: Path, suffix: str) -> None:
    manifest = tmp_path / f"m.{suffix}"
    if suffix == "jsonl":
        row = {"id": "a", "media": [{"data": base64.b64encode(THREE).decode()}]}
        manifest.write_text(json.dumps(row))
    else:
        pq.write_table(pa.table({"id": ["a"], "data": [THREE]}), manifest)
    requests = frozen(str(manifest), tmp_path)
    assert shown(requests) == [(f"a#page={n + 1}", "page", n) for n in range(3)]
    assert {request.media[0].data for request in requests} == {THREE}


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"page": -1}, "page counts from 0 and is of modality 'page', got -1 of None"),
        ({"page": "3"}, "page counts from 0"),
        ({"page": True}, "page counts from 0"),
        ({"page": 2**31}, "page counts from 0"),
        ({"page": 0, "modality": "image"}, "page counts from 0 and is of modality 'page', got 0 of 'image'"),
    ],
)
def test_a_wrong_page_is_said_with_its_place(tmp_path: Path, entry: dict[str, object], problem: str) -> None:
    manifest = tmp_path / "m.jsonl"
    manifest.write_text(json.dumps({"id": "a", "media": [{"uri": "a.pdf", **entry}]}))
    with pytest.raises(ManifestError, match=r"row 1, column 'media\[0\]': " + problem):
        frozen(str(manifest), tmp_path)


def test_the_limit_counts_pages(folder: str, tmp_path: Path) -> None:
    put(folder, {"a.pdf": THREE, "b.pdf": THREE})
    assert [request.id for request in frozen(folder, tmp_path, limit=4)] == [
        *(f"a.pdf#page={n}" for n in (1, 2, 3)),
        "b.pdf#page=1",
    ]


def test_an_id_that_is_a_pages_already_is_found(tmp_path: Path) -> None:
    (tmp_path / "x.pdf").write_bytes(THREE)
    manifest = tmp_path / "m.jsonl"
    manifest.write_text('{"id": "x", "uri": "x.pdf"}\n{"id": "x#page=2", "uri": "a.png"}\n')
    with pytest.raises(ManifestError, match="rows 1 and 2, column 'id': duplicate id 'x#page=2'"):
        frozen(str(manifest), tmp_path)


def test_a_staged_listing_by_page_is_published_as_it_is(folder: str, tmp_path: Path) -> None:
    put(folder, {"a.pdf": THREE})
    run = Folder(str(tmp_path / "run"))
    with stage_manifest(folder, limit=None, expand_pages=True) as staged:
        manifest = publish_manifest(staged, run)
    assert (manifest.num_items, manifest.digest) == (3, staged.digest)
    assert [item.page for request in read_range(run, 1, 3) for item in request.media] == [1, 2]


# ---- listings that are not by page


def test_without_expansion_a_document_is_one_row_as_before(folder: str, tmp_path: Path) -> None:
    put(folder, {"a.pdf": THREE, "b.png": b"-"})
    requests = frozen(folder, tmp_path, expand_pages=False)
    assert shown(requests) == [("a.pdf", None, None), ("b.png", "image", None)]


def test_the_digest_of_a_listing_without_pages_is_what_it_was(tmp_path: Path) -> None:
    manifest = tmp_path / "m.jsonl"
    manifest.write_text('{"id": "a", "uri": "s3://b/a.png"}\n')
    media = [{"data": None, "modality": "image", "sha256": None, "uri": "s3://b/a.png", "version": None}]
    row = {"id": "a", "item_index": 0, "media": media, "messages": None, "prompt": None, "tenant": ""}
    line = json.dumps(row, sort_keys=True, separators=(",", ":")) + "\n"
    for expand_pages in (False, True):
        with stage_manifest(str(manifest), limit=None, expand_pages=expand_pages) as staged:
            assert staged.digest == hashlib.sha256(line.encode()).hexdigest()


def test_pages_enter_the_digest(tmp_path: Path) -> None:
    digests = set()
    for page in (0, 1):
        manifest = tmp_path / "m.jsonl"
        manifest.write_text(json.dumps({"id": "a", "media": [{"uri": "/a.pdf", "page": page}]}))
        with stage_manifest(str(manifest), limit=None) as staged:
            digests.add(staged.digest)
    assert len(digests) == 2


# ---- order, memory, failures


def listing(names: list[str], closed: list[bool] | None = None) -> Generator[tuple[int, Request]]:
    try:
        for i, name in enumerate(names):
            yield i + 1, Request(item_index=i, id=name, media=(MediaItem(uri=name),))
    finally:
        if closed is not None:
            closed.append(True)


@pytest.fixture
def slow_first(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The count of the first document waits for this; every document has two pages."""
    release = threading.Event()

    def count(item: MediaItem, policy: SourcePolicy, reader: object) -> int:
        assert item.uri != "0.pdf" or release.wait(20)
        return 2

    monkeypatch.setattr(pages, "_count_pages", count)
    return release


def test_order_is_kept_and_few_rows_wait(slow_first: threading.Event) -> None:
    taken = 0

    def counted() -> Generator[tuple[int, Request]]:
        nonlocal taken
        for row, request in listing([f"{n}.pdf" for n in range(500)]):
            taken += 1
            yield row, request
            if taken == 25:
                slow_first.set()

    found = []
    for row, request in page_requests(counted()):
        assert taken <= row + 33  # 32 rows ahead, and the one that was taken last
        found.append((row, request.id, request.item_index))
    assert found == [(i // 2 + 1, f"{i // 2}.pdf#page={i % 2 + 1}", i) for i in range(1000)]


def test_a_reader_that_stops_closes_the_listing(slow_first: threading.Event) -> None:
    slow_first.set()
    closed: list[bool] = []
    requests = page_requests(listing([f"{n}.pdf" for n in range(100)], closed))
    assert next(requests)[1].id == "0.pdf#page=1"
    requests.close()
    assert closed == [True]


@pytest.mark.parametrize("num_bytes", [1_000, 9 * 2**20])
def test_storage_that_keeps_failing_stops_the_listing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, num_bytes: int
) -> None:
    (tmp_path / "a.pdf").write_bytes(THREE + bytes(num_bytes))

    def fail(*_: object) -> bytes:
        raise TransientError("throttled")

    opened: Callable[..., object] = source.open_source
    monkeypatch.setattr(pages, "read_source", fail)
    monkeypatch.setattr(pages, "open_source", lambda *arguments: _Failing(opened(*arguments)))
    with pytest.raises(TransientError, match="throttled"):
        frozen(str(tmp_path / "a.pdf"), tmp_path)


class _Failing:
    """A file whose reads are throttled."""

    def __init__(self, file: object) -> None:
        self._file = file

    def __enter__(self) -> _Failing:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)

    def read(self, size: int) -> bytes:
        raise TransientError("throttled")


def test_a_large_document_is_counted_by_ranges(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tests.media.pdf_files import stream

    large = make_pdf([Page(), Page()], objects=[stream("x" * 9_000_000)])
    (tmp_path / "a.pdf").write_bytes(large)
    monkeypatch.setattr(pages, "read_source", lambda *_: pytest.fail("was read whole"))
    assert len(frozen(str(tmp_path / "a.pdf"), tmp_path)) == 2
