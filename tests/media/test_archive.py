"""Members of archives as sources: from a local disk, object storage and a web server; archives that lie."""

from __future__ import annotations

import io
import os
import random
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest

from pipeline.errors import ItemError
from pipeline.media import archive_index
from pipeline.media.archive_index import index_archive, split_member
from pipeline.media.source import FetchCounter, open_source, read_source, stat_source
from pipeline.media.url_policy import SourcePolicy
from pipeline.schema import MediaItem
from tests.media.archive_files import add, make_tar, make_zip
from tests.media.web_server import Web

FILES = {
    "a.jpg": random.Random(1).randbytes(3000),
    "folder/b c.png": random.Random(2).randbytes(512),
    "ü#1.jpg": b"x" * 2000,
    f"{'long/' * 40}name.jpg": b"long",
    "empty.jpg": b"",
}
MAKERS: dict[str, Callable[[dict[str, bytes]], bytes]] = {
    "gnu.tar": lambda files: make_tar(files, format=tarfile.GNU_FORMAT),
    "pax.tar": lambda files: make_tar(files, format=tarfile.PAX_FORMAT),
    "stored.zip": lambda files: make_zip(files),
    "deflated.zip": lambda files: make_zip(files, method=zipfile.ZIP_DEFLATED),
}


def refusal(call: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(ItemError) as caught:
        call()
    assert caught.value.stage == "fetch"
    return caught.value.code, caught.value.message


def verdict(path: Path, name: str) -> str:
    """The code with which every way to read a member is refused."""
    item = MediaItem(uri=f"{path}#{name}")
    calls = (stat_source, lambda i: read_source(i, FetchCounter()), lambda i: open_source(i, FetchCounter()))
    [code] = {refusal(lambda call=call: call(item))[0] for call in calls}
    return code


@pytest.mark.parametrize(
    "uri, split",
    [
        ("s3://bucket/0001.tar#a/b.jpg", ("s3://bucket/0001.tar", "a/b.jpg")),
        ("/data/0001.TAR#a.jpg", ("/data/0001.TAR", "a.jpg")),
        ("0001.zip#a#b.tar#c", ("0001.zip", "a#b.tar#c")),
        ("https://h/a.tar?sig=x%23#b.jpg", ("https://h/a.tar?sig=x%23", "b.jpg")),
        ("https://h/?file=a.tar#b.jpg", None),
        ("a clip #1.jpg", None),
        ("a#1.tar#b.jpg", None),
        ("a.tar.gz#b.jpg", None),
        ("a.tar", None),
        ("a.tar#", None),
    ],
)
def test_uris_of_members(uri: str, split: tuple[str, str] | None) -> None:
    assert split_member(uri) == split


@pytest.fixture(scope="module")
def web() -> Iterator[Web]:
    with Web() as server:
        yield server


@pytest.fixture(params=["path", "memory", "http"])
def put(request: pytest.FixtureRequest, tmp_path: Path, web: Web) -> Callable[[str, bytes], tuple[str, SourcePolicy]]:
    """Stores an archive; its URI and the policy to read it with."""

    def store(name: str, data: bytes) -> tuple[str, SourcePolicy]:
        if request.param == "path":
            (tmp_path / name).write_bytes(data)
            return str(tmp_path / name), SourcePolicy()
        if request.param == "http":
            policy = SourcePolicy(http=True, internal_domains=("localhost",), allowed_ports=(web.port,))
            return web.hold(f"{tmp_path}/{name}", data, ETag=f'"{zlib.crc32(data)}"'), policy
        uri = f"memory://archives{tmp_path}/{name}"
        with fsspec.open(uri, "wb") as file:
            file.write(data)
        return uri, SourcePolicy()

    return store


@pytest.mark.parametrize("kind", MAKERS)
def test_members_are_read_whole_and_by_range(put: Callable[[str, bytes], tuple[str, SourcePolicy]], kind: str) -> None:
    uri, policy = put(kind, MAKERS[kind](FILES))
    for name, data in FILES.items():
        item = MediaItem(uri=f"{uri}#{name}")
        if not data:
            assert refusal(lambda item=item: stat_source(item, policy))[0] == "empty_file"
            continue
        facts = stat_source(item, policy)
        assert facts.num_bytes == len(data)
        counter = FetchCounter()
        assert read_source(item, counter, policy) == data
        assert counter.fetches == 1
        assert read_source(MediaItem(uri=f"{uri}#./{name}"), counter, policy) == data
        with open_source(item, FetchCounter(), policy) as file:
            assert (file.seekable(), file.readable()) == (True, True)
            assert file.seek(-4, io.SEEK_END) == len(data) - 4
            assert file.read() == data[-4:]
            file.seek(1)
            assert file.read(2) == data[1:3]
            assert file.tell() == 3
            file.seek(0)
            assert file.read() == data
    assert refusal(lambda: read_source(MediaItem(uri=f"{uri}#absent.jpg"), FetchCounter(), policy))[0] == "not_found"


@pytest.mark.parametrize("kind", MAKERS)
def test_ids_are_of_archive_and_member(tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    path.write_bytes(MAKERS[kind]({"a.jpg": b"1234", "b.jpg": b"1234"}))
    first, second = (stat_source(MediaItem(uri=f"{path}#{name}")).source_id for name in ("a.jpg", "b.jpg"))
    archive = stat_source(MediaItem(uri=str(path))).source_id
    assert first.startswith(f"{archive}#a.jpg:0:4:")
    assert first != second
    path.write_bytes(MAKERS[kind]({"b.jpg": b"12345", "a.jpg": b"1234"}))
    changed = MediaItem(uri=f"{path}#a.jpg")
    assert stat_source(changed).source_id != first
    assert read_source(changed, FetchCounter()) == b"1234"
    assert stat_source(MediaItem(uri=f"{path}#a.jpg", version="7")).source_id == f"version:{path}#a.jpg:7"


def test_an_index_is_made_once_for_all_threads(web: Web) -> None:
    files = {f"{n:03}.jpg": bytes([n]) * 700 for n in range(100)}
    policy = SourcePolicy(http=True, internal_domains=("localhost",), allowed_ports=(web.port,))
    uri = web.hold("/once.tar", make_tar(files), ETag='"once"')
    web.asked.clear()
    with ThreadPoolExecutor(8) as pool:
        read = pool.map(lambda n: read_source(MediaItem(uri=f"{uri}#{n}"), FetchCounter(), policy), files)
        assert list(read) == list(files.values())
    ranges = [headers["range"] for _, headers in web.asked]
    # Its facts, twice for it is opened, its one block, and each member by itself.
    assert (len(ranges), ranges[:2], ranges[2][:8]) == (103, ["bytes=0-0"] * 2, "bytes=0-")
    assert all(int(end) - int(begin) + 1 == 512 + 700 for begin, end in (r[6:].split("-") for r in ranges[3:]))


def test_an_archive_that_changes_behind_its_index(web: Web) -> None:
    policy = SourcePolicy(http=True, internal_domains=("localhost",), allowed_ports=(web.port,))
    for kind, code in (("gnu.tar", "content_mismatch"), ("stored.zip", "corrupt_archive")):
        uri = web.hold(f"/changing.{kind}", MAKERS[kind]({"a.jpg": b"1" * 100, "b.jpg": b"2" * 100}), ETag='"1"')
        stat_source(MediaItem(uri=f"{uri}#b.jpg"), policy)
        web.hold(f"/changing.{kind}", MAKERS[kind]({"c.jpg": b"3" * 5000}), ETag='"2"')
        item = MediaItem(uri=f"{uri}#b.jpg")
        assert refusal(lambda item=item: read_source(item, FetchCounter(), policy))[0] == code
        assert refusal(lambda item=item: open_source(item, FetchCounter(), policy))[0] == code


def test_an_archive_is_larger_than_its_members_may_be(web: Web) -> None:
    policy = SourcePolicy(http=True, internal_domains=("localhost",), allowed_ports=(web.port,), max_bytes=20_000)
    uri = web.hold(
        "/large.tar", make_tar({f"{n}.jpg": b"1" * 5000 for n in range(9)} | {"l.jpg": b"1" * 20_001}), ETag='"l"'
    )
    assert read_source(MediaItem(uri=f"{uri}#8.jpg"), FetchCounter(), policy) == b"1" * 5000
    assert refusal(lambda: read_source(MediaItem(uri=f"{uri}#l.jpg"), FetchCounter(), policy))[0] == "too_large"
    assert refusal(lambda: stat_source(MediaItem(uri=uri), policy))[0] == "too_large"


def test_a_server_without_ranges_has_no_members(web: Web) -> None:
    policy = SourcePolicy(http=True, internal_domains=("localhost",), allowed_ports=(web.port,))
    uri = web.hold("/whole.tar", make_tar({"a.jpg": b"1234"}), ranges=False, ETag='"w"')
    item = MediaItem(uri=f"{uri}#a.jpg")
    assert refusal(lambda: read_source(item, FetchCounter(), policy))[0] == "unexpected_answer"


def test_roots_hold_for_archives(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(make_tar({"a.jpg": b"1234"}))
    item = MediaItem(uri=f"{tmp_path}/a.tar#a.jpg")
    assert refusal(lambda: stat_source(item, SourcePolicy(roots=("/nowhere",))))[0] == "path_refused"


@pytest.mark.parametrize("name", ["/etc/passwd", "../a.jpg", "a/../../b.jpg", "C:/a.jpg", "a\\b.jpg", "a\nb.jpg"])
@pytest.mark.parametrize("kind", ["gnu.tar", "stored.zip"])
def test_names_that_lead_elsewhere(tmp_path: Path, kind: str, name: str) -> None:
    path = tmp_path / kind
    path.write_bytes(MAKERS[kind]({"good.jpg": b"1234", name: b"1234"}))
    assert verdict(path, name) == "member_refused"
    assert read_source(MediaItem(uri=f"{path}#good.jpg"), FetchCounter()) == b"1234"


@pytest.mark.parametrize("kind", ["gnu.tar", "stored.zip"])
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_name_that_occurs_twice(tmp_path: Path, kind: str) -> None:
    buffer = io.BytesIO()
    if kind == "gnu.tar":
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for name, data in (("a.jpg", b"1"), ("b.jpg", b"2"), ("./a.jpg", b"3")):
                add(archive, name, data)
    else:
        with zipfile.ZipFile(buffer, "w") as zipped:
            for name, data in (("a.jpg", b"1"), ("b.jpg", b"2"), ("a.jpg", b"3")):
                zipped.writestr(name, data)
    path = tmp_path / kind
    path.write_bytes(buffer.getvalue())
    assert verdict(path, "a.jpg") == "member_refused"
    assert read_source(MediaItem(uri=f"{path}#b.jpg"), FetchCounter()) == b"2"


def test_what_is_no_file_in_a_tar(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        add(archive, "folder", type=tarfile.DIRTYPE)
        add(archive, "link.jpg", type=tarfile.SYMTYPE, linkname="/etc/passwd")
        add(archive, "hard.jpg", type=tarfile.LNKTYPE, linkname="good.jpg")
        add(archive, "null.jpg", type=tarfile.CHRTYPE)
        add(archive, "disk.jpg", type=tarfile.BLKTYPE)
        add(archive, "pipe.jpg", type=tarfile.FIFOTYPE)
        add(archive, "sparse.jpg", b"1" * 700, type=tarfile.GNUTYPE_SPARSE)
        add(archive, "pax.jpg", b"1" * 700, pax_headers={"GNU.sparse.major": "1", "GNU.sparse.realsize": "9999"})
        add(archive, "other.jpg", b"1" * 700, type=b"Z")
        add(archive, "good.jpg", b"1234")
    path = tmp_path / "kinds.tar"
    path.write_bytes(buffer.getvalue())
    for name in ("link", "hard", "null", "disk", "pipe", "sparse", "pax", "other"):
        assert verdict(path, f"{name}.jpg") == "member_refused", name
    assert verdict(path, "folder") == "not_found"
    assert read_source(MediaItem(uri=f"{path}#good.jpg"), FetchCounter()) == b"1234"


def test_sparse_headers_that_go_on(tmp_path: Path) -> None:
    """GNU's sparse headers have further blocks before the data: what follows is still found."""
    sparse = bytearray(make_tar({"sparse.jpg": b"1" * 512})[:1024])
    sparse[156:157], sparse[482] = b"S", 1
    sparse[148:156] = b" " * 8
    sparse[148:156] = b"%06o\0 " % sum(sparse[:512])
    more, last = bytearray(512), bytes(512)
    more[504] = 1
    path = tmp_path / "sparse.tar"
    path.write_bytes(bytes(sparse[:512]) + bytes(more) + last + bytes(sparse[512:]) + make_tar({"good.jpg": b"1234"}))
    assert verdict(path, "sparse.jpg") == "member_refused"
    assert read_source(MediaItem(uri=f"{path}#good.jpg"), FetchCounter()) == b"1234"


def test_a_tar_that_ends_early_keeps_what_is_whole(tmp_path: Path) -> None:
    whole = make_tar({"a.jpg": b"1" * 1000, "b.jpg": b"2" * 1000, "c.jpg": b"3" * 1000})
    path = tmp_path / "cut.tar"
    for length in (3 * 512 + 512 + 700, 3 * 512 + 100, 6 * 512):
        path.write_bytes(whole[:length])
        assert read_source(MediaItem(uri=f"{path}#a.jpg"), FetchCounter()) == b"1" * 1000
        assert verdict(path, "c.jpg") == "corrupt_archive"


def number_field(value: int) -> bytes:
    return b"%011o\0" % value


def with_field(data: bytes, at: int, field: bytes, *, block: int = 0) -> bytes:
    """A tar with a field of a header replaced, and its checksum right."""
    out = bytearray(data)
    out[block + at : block + at + len(field)] = field
    out[block + 148 : block + 156] = b" " * 8
    out[block + 148 : block + 156] = b"%06o\0 " % sum(out[block : block + 512])
    return bytes(out)


def pax_tar(records: bytes, kind: bytes = b"x") -> bytes:
    header = with_field(make_tar({"pax": records})[:512], 156, kind)
    return header + records.ljust(-(-len(records) // 512) * 512, b"\0") + make_tar({"b.jpg": b"1234"})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not an archive",
        b"\x1f\x8b" + bytes(2000),
        bytes(100),
        with_field(make_tar({"b.jpg": b"1234"}), 124, number_field(2**33 - 1)),
        with_field(make_tar({"b.jpg": b"1234"}), 124, b"\x80" + bytes(2) + b"\xff" * 9),
        with_field(make_tar({"b.jpg": b"1234"}), 124, b"\xff" * 12),
        with_field(make_tar({"b.jpg": b"1234"}), 124, b"nonsense\0\0\0\0"),
        with_field(make_tar({"b.jpg": b"1234"}), 124, b"-0000000001\0"),
        make_tar({"b.jpg": b"1234"})[:148] + b"0000000\0" + make_tar({"b.jpg": b"1234"})[156:],
        with_field(with_field(make_tar({"x": b"1234"}), 156, b"L"), 124, number_field(2**30)),
        pax_tar(b"12 path=..\n"),
        pax_tar(b"5009 path=" + b"a" * 4998 + b"\n"),
        pax_tar(b"0 path=a\n"),
        pax_tar(b"x path=a\n"),
        pax_tar(b"99 path=a\n"),
        pax_tar(b"9 patha\n\n"),
        pax_tar(b"99999999999999999999 path=a\n"),
        pax_tar(b"16 size=-000001\n"),
        pax_tar(b"16 size=9999999\n"),
        pax_tar(b"13 path=evil\n", kind=b"g"),
    ],
)
def test_tars_that_lie(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "lie.tar"
    path.write_bytes(data)
    assert verdict(path, "b.jpg") == "corrupt_archive"


def entry_at(data: bytes, number: int = 0) -> int:
    at = -1
    for _ in range(number + 1):
        at = data.index(b"PK\1\2", at + 1)
    return at


def patched(data: bytes, at: int, format: str, *values: Any) -> bytes:
    out = bytearray(data)
    struct.pack_into(format, out, at, *values)
    return bytes(out)


TWO = make_zip({"a.jpg": b"1" * 1000, "b.jpg": b"2" * 1000})
DEFLATED = make_zip({"b.jpg": b"2" * 100_000}, method=zipfile.ZIP_DEFLATED)


@pytest.mark.parametrize(
    "data, code",
    [
        (b"PK\3\4", "corrupt_archive"),
        (TWO[:-1], "corrupt_archive"),
        (TWO[: len(TWO) // 2], "corrupt_archive"),
        (TWO + b"x", "corrupt_archive"),
        (b"x" + TWO, "corrupt_archive"),
        (patched(TWO, len(TWO) - 12, "<H", 1), "corrupt_archive"),  # entries in all, not as many as here
        (patched(TWO, len(TWO) - 14, "<HH", 60000, 60000), "corrupt_archive"),
        (patched(TWO, len(TWO) - 14, "<HH", 1, 1), "corrupt_archive"),  # fewer than its directory has
        (patched(TWO, len(TWO) - 18, "<H", 1), "corrupt_archive"),  # another disk
        (patched(TWO, len(TWO) - 6, "<L", 0), "corrupt_archive"),
        (patched(TWO, entry_at(TWO, 1) + 20, "<LL", 2**31, 2**31), "corrupt_archive"),  # ends behind the directory
        (patched(TWO, entry_at(TWO, 1) + 42, "<L", 5), "member_refused"),  # begins within the other
        (patched(TWO, entry_at(TWO, 1) + 42, "<L", 0), "member_refused"),  # is the other
        (patched(TWO, entry_at(TWO, 1) + 24, "<L", 999), "member_refused"),  # stored, and of two sizes
        (patched(TWO, entry_at(TWO, 1) + 16, "<L", 0), "corrupt_archive"),  # another checksum
        (patched(TWO, entry_at(TWO, 1) + 8, "<H", 1), "member_refused"),  # encrypted
        (patched(TWO, entry_at(TWO, 1) + 10, "<H", 14), "member_refused"),  # LZMA
        (patched(TWO, entry_at(TWO, 1) + 38, "<L", (stat.S_IFLNK | 0o777) << 16), "member_refused"),
        (patched(TWO, entry_at(TWO, 1) + 38, "<L", (stat.S_IFCHR | 0o777) << 16), "member_refused"),
        (patched(TWO, TWO.index(b"PK\3\4", 10), "<L", 0), "corrupt_archive"),  # nothing where it should begin
        (patched(TWO, TWO.index(b"PK\3\4", 10) + 28, "<H", 60000), "corrupt_archive"),  # a long extra field
        (patched(DEFLATED, entry_at(DEFLATED) + 24, "<L", 99_999), "corrupt_archive"),
        (patched(DEFLATED, entry_at(DEFLATED) + 24, "<L", 100_001), "corrupt_archive"),
        (patched(DEFLATED, entry_at(DEFLATED) + 20, "<L", 20), "corrupt_archive"),
        (patched(DEFLATED, 40, "<L", 0xFFFFFFFF), "corrupt_archive"),
    ],
)
def test_zips_that_lie(tmp_path: Path, data: bytes, code: str) -> None:
    path = tmp_path / "lie.zip"
    path.write_bytes(data)
    item = MediaItem(uri=f"{path}#b.jpg")
    assert refusal(lambda: read_source(item, FetchCounter()))[0] == code


def test_bombs_are_refused_by_what_they_state(tmp_path: Path) -> None:
    path = tmp_path / "bomb.zip"
    path.write_bytes(make_zip({"b.bmp": bytes(50 * 2**20)}, method=zipfile.ZIP_DEFLATED))
    assert verdict(path, "b.bmp") == "member_refused"
    path.write_bytes(make_zip({"b.bmp": random.Random(3).randbytes(2**20) * 2}, method=zipfile.ZIP_DEFLATED))
    item, policy = MediaItem(uri=f"{path}#b.bmp"), SourcePolicy(max_bytes=2**20)
    assert refusal(lambda: read_source(item, FetchCounter(), policy))[0] == "too_large"
    assert len(read_source(item, FetchCounter())) == 2**21


def test_a_bomb_that_states_little_is_inflated_no_further(tmp_path: Path) -> None:
    bomb = make_zip({"b.bmp": bytes(200 * 2**20)}, method=zipfile.ZIP_DEFLATED)
    path = tmp_path / "bomb.zip"
    path.write_bytes(patched(bomb, entry_at(bomb) + 24, "<L", 1000))
    program = (
        "import resource, sys; from pipeline.media.source import *; from pipeline.schema import MediaItem\n"
        "from pipeline.errors import ItemError\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"try: read_source(MediaItem(uri={f'{path}#b.bmp'!r}), FetchCounter())\n"
        "except ItemError as error: print(error.code, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    import subprocess
    import sys

    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=os.environ)
    code, grown = said.stdout.split()
    assert (code, int(grown) < 50_000) == ("corrupt_archive", True)


def test_too_many_members(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(archive_index, "MAX_MEMBERS", 3)
    files = {f"{number}.jpg": b"1" for number in range(5)}
    for kind in ("gnu.tar", "stored.zip"):
        path = tmp_path / kind
        path.write_bytes(MAKERS[kind](files))
        assert "more than 3 members" in refusal(lambda path=path: stat_source(MediaItem(uri=f"{path}#4.jpg")))[1]


def test_zip64_as_the_standard_library_writes_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 1000)
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 2)
    files = {f"{number}.jpg": random.Random(number).randbytes(2000) for number in range(4)}
    path = tmp_path / "large.zip"
    path.write_bytes(make_zip(files))
    assert b"PK\6\6" in path.read_bytes()
    for name, data in files.items():
        assert read_source(MediaItem(uri=f"{path}#{name}"), FetchCounter()) == data


def test_zips_written_as_streams(tmp_path: Path) -> None:
    """Sizes stand behind the content then; only the directory has them in front."""

    class Stream(io.RawIOBase):
        def __init__(self) -> None:
            self.data = b""

        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            self.data += bytes(data)
            return len(data)

    stream = Stream()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:  # type: ignore[arg-type]
        for name in ("a.jpg", "b.jpg"):
            archive.writestr(name, name.encode() * 100)
    path = tmp_path / "stream.zip"
    path.write_bytes(stream.data)
    assert read_source(MediaItem(uri=f"{path}#a.jpg"), FetchCounter()) == b"a.jpg" * 100


@pytest.mark.parametrize("kind", MAKERS)
def test_random_damage_is_an_items_fault(kind: str) -> None:
    """Whatever bytes are turned, an index is made or says what is wrong, and reading raises nothing else."""
    drawn = random.Random(5)
    whole = MAKERS[kind](FILES)
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(drawn.choice((1, 3, 20))):
            data[drawn.randrange(len(data))] = drawn.randrange(256)
        cut = bytes(data[: drawn.choice((len(data), drawn.randrange(1, len(data))))])
        index = index_archive(io.BytesIO(cut), len(cut), kind)
        for name in index.members:
            try:
                member = index.find(name, kind)
                archive_index.member_bytes(member, cut[member.start : member.stop])
            except ItemError as error:
                assert error.stage == "fetch"


def test_both_of_two_members_that_overlap_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "overlap.zip"
    path.write_bytes(patched(TWO, entry_at(TWO, 1) + 42, "<L", 5))
    assert {verdict(path, name) for name in ("a.jpg", "b.jpg")} == {"member_refused"}


def test_a_header_that_reaches_into_the_next_member_opens_nothing(tmp_path: Path) -> None:
    path = tmp_path / "reach.zip"
    path.write_bytes(patched(TWO, 28, "<H", 500))
    item = MediaItem(uri=f"{path}#a.jpg")
    assert refusal(lambda: open_source(item, FetchCounter()))[0] == "corrupt_archive"


def test_names_are_read_up_to_a_limit(tmp_path: Path) -> None:
    """A long name is announced with its size, and is not read beyond what names have."""
    name = bytes(3 * 2**20)
    header = with_field(make_tar({"x": name})[:512], 156, b"L")
    path = tmp_path / "name.tar"
    path.write_bytes(header + name + make_tar({"b.jpg": b"1234"}))
    assert "3,145,728 bytes of names" in refusal(lambda: stat_source(MediaItem(uri=f"{path}#b.jpg")))[1]
