import errno
import hashlib
import io
import os
import subprocess
import sys

import fsspec
import pytest
from botocore.exceptions import ClientError, NoCredentialsError
from fsspec.implementations.memory import MemoryFileSystem
from s3fs.errors import translate_boto_error

from pipeline.errors import ConfigError, ItemError, TransientError
from pipeline.media.source import FetchCounter, Place, open_source, read_source, retrying, stat_source
from pipeline.schema import MediaItem

CONTENT = bytes(range(256)) * 40


@pytest.fixture(params=["path", "file", "memory"])
def stored(request, tmp_path):
    """The URI of an object that holds CONTENT, for each kind of storage that needs no server."""
    if request.param == "memory":
        uri = f"memory://test-source{tmp_path}/clip.bin"
        with fsspec.open(uri, "wb") as file:
            file.write(CONTENT)
        return uri
    path = tmp_path / "a clip #1%20.bin"
    path.write_bytes(CONTENT)
    return str(path) if request.param == "path" else f"file://{path}"


def refusal(call, *arguments) -> str:
    with pytest.raises(ItemError) as caught:
        call(*arguments)
    assert caught.value.stage == "fetch"
    return caught.value.code


def every_call(item: MediaItem) -> set[str]:
    return {
        refusal(call, item, *rest)
        for call, *rest in ((stat_source,), (read_source, FetchCounter()), (open_source, FetchCounter()))
    }


def place(scheme: str = "s3") -> Place:
    return Place(uri=f"{scheme}://bucket/key", scheme=scheme, fs=None, path="bucket/key")


def service_error(code: str, status: int) -> ClientError:
    answer = {"Error": {"Code": code, "Message": "said so"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(answer, "GetObject")


def test_whole_objects_are_counted(stored):
    counter = FetchCounter()
    assert read_source(MediaItem(uri=stored), counter) == CONTENT
    assert counter == FetchCounter(fetches=1, bytes_fetched=len(CONTENT))


def test_ranges_are_counted(stored):
    counter = FetchCounter()
    with open_source(MediaItem(uri=stored), counter) as file:
        assert (file.seekable(), file.readable()) == (True, True)
        assert file.seek(-100, io.SEEK_END) == len(CONTENT) - 100
        assert file.read(50) == CONTENT[-100:-50]
        assert file.tell() == len(CONTENT) - 50
        file.seek(10)
        assert file.read(20) == CONTENT[10:30]
        buffer = bytearray(8)
        assert file.readinto(buffer) == 8
        assert buffer == CONTENT[30:38]
    assert counter == FetchCounter(fetches=1, bytes_fetched=78)
    with open_source(MediaItem(uri=stored), counter) as file:
        assert file.read() == CONTENT


def test_inline_bytes_cost_no_fetch():
    counter = FetchCounter()
    item = MediaItem(data=CONTENT)
    assert read_source(item, counter) == CONTENT
    assert open_source(item, counter).read() == CONTENT
    assert counter == FetchCounter()


def test_a_local_id_is_path_size_and_time(tmp_path):
    path = tmp_path / "x.jpg"
    path.write_bytes(b"12345")
    os.utime(path, ns=(1, 1_700_000_000_123_456_789))
    facts = stat_source(MediaItem(uri=str(path)))
    assert facts.num_bytes == 5
    assert facts.source_id == f"file:{path}:5:1700000000123456789"
    assert stat_source(MediaItem(uri=f"file://{path}")) == facts


def test_an_id_is_stable_until_the_object_changes(stored):
    item = MediaItem(uri=stored)
    first = stat_source(item)
    assert (stat_source(item), first.num_bytes) == (first, len(CONTENT))
    with fsspec.open(stored if "://" in stored else f"file://{stored}", "wb") as file:
        file.write(CONTENT + b"!")
    assert stat_source(item).source_id != first.source_id


def test_what_the_caller_knows_comes_first(stored):
    assert stat_source(MediaItem(uri=stored, sha256="ab", version="7")).source_id == "sha256:ab"
    assert stat_source(MediaItem(uri=stored, version="7")).source_id == f"version:{stored}:7"
    assert stat_source(MediaItem(uri=stored, version="7")).num_bytes == len(CONTENT)
    assert stat_source(MediaItem(data=b"abc")).source_id == f"sha256:{hashlib.sha256(b'abc').hexdigest()}"
    assert stat_source(MediaItem(data=b"abc", sha256="ab")).source_id == "sha256:ab"
    # Two rows may have bytes of their own, and say the same version.
    assert stat_source(MediaItem(data=b"abc", version="7")) == stat_source(MediaItem(data=b"abc"))


def test_an_etag_identifies_an_object(monkeypatch, stored):
    info = {"type": "file", "size": 9, "ETag": '"d41d8"', "LastModified": "today"}
    monkeypatch.setattr(MemoryFileSystem, "info", lambda self, path, **_: info)
    uri = "memory://bucket/x"
    assert stat_source(MediaItem(uri=uri)).source_id == f"etag:{uri}:d41d8:9"


def test_no_content_is_read_for_an_id(monkeypatch):
    with fsspec.open("memory://test-source/stat.bin", "wb") as file:
        file.write(CONTENT)
    for reader in ("cat_file", "_open"):
        monkeypatch.setattr(MemoryFileSystem, reader, lambda *_, **__: pytest.fail("content was read"))
    assert stat_source(MediaItem(uri="memory://test-source/stat.bin")).num_bytes == len(CONTENT)


@pytest.mark.parametrize(
    "uri", ["/nowhere/x.jpg", "file:///nowhere/x.jpg", "memory://nowhere/x.jpg", "/etc/passwd/x.jpg"]
)
def test_missing_objects(uri):
    assert every_call(MediaItem(uri=uri)) == {"not_found"}


@pytest.mark.parametrize(
    "uri",
    [
        "ftp://example.com/x.jpg",
        "data:image/png;base64,AAAA",
        "zip://x.jpg::file:///nowhere/a.zip",
        "simplecache::s3://bucket/x.jpg",
        "github://org:repo@/x.jpg",
        "javascript://x",
    ],
)
def test_other_schemes_are_refused(uri):
    assert every_call(MediaItem(uri=uri)) == {"scheme_refused"}


def test_a_chained_address_names_no_second_file(tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    assert every_call(MediaItem(uri=f"memory://a::file://{secret}")) == {"not_found"}


def test_directories_pipes_and_devices(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for uri in (str(tmp_path), str(tmp_path / "pipe"), "/dev/zero"):
        assert every_call(MediaItem(uri=uri)) == {"not_a_file"}


def test_empty_objects(tmp_path):
    (tmp_path / "empty.jpg").write_bytes(b"")
    item = MediaItem(uri=str(tmp_path / "empty.jpg"))
    assert refusal(stat_source, item) == "empty_file"
    assert refusal(read_source, item, FetchCounter()) == "empty_file"
    assert refusal(stat_source, MediaItem(data=b"", modality="image")) == "empty_file"


def test_resets_while_reading_are_got_over(monkeypatch):
    uri = "memory://test-source/flaky.bin"
    with fsspec.open(uri, "wb") as file:
        file.write(CONTENT)
    monkeypatch.setattr("random.uniform", lambda low, high: 0.0)
    failures = iter([ConnectionResetError("reset"), TimeoutError("slow")])
    cat_file = MemoryFileSystem.cat_file

    def flaky(self, path, **options):
        for error in failures:
            raise error
        return cat_file(self, path, **options)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", flaky)
    counter = FetchCounter()
    assert read_source(MediaItem(uri=uri), counter) == CONTENT
    assert counter == FetchCounter(fetches=1, bytes_fetched=len(CONTENT), retries=2)


def test_a_range_is_read_again_from_where_it_began(monkeypatch):
    uri = "memory://test-source/flaky-range.bin"
    with fsspec.open(uri, "wb") as file:
        file.write(CONTENT)
    monkeypatch.setattr("random.uniform", lambda low, high: 0.0)
    counter = FetchCounter()
    with open_source(MediaItem(uri=uri), counter) as file:
        inner, attempts = file._file, []

        class Flaky:
            seek, tell, close = inner.seek, inner.tell, inner.close

            def read(self, size):
                attempts.append(inner.tell())
                data = inner.read(size)
                if len(attempts) == 1:
                    raise ConnectionResetError("reset")
                return data

        file._file = Flaky()
        file.seek(100)
        assert file.read(10) == CONTENT[100:110]
    assert attempts == [100, 100]
    assert counter.bytes_fetched == 10


def test_waits_grow_with_jitter_and_end():
    waits, calls = [], []

    def fetch():
        calls.append(1)
        raise ConnectionResetError("reset")

    with pytest.raises(TransientError, match="reset"):
        retrying(fetch, place("file"), sleep=waits.append)
    assert len(calls) == 5
    for wait, most in zip(waits, (0.2, 0.4, 0.8, 1.6), strict=True):
        assert 0 <= wait <= most
    assert len(set(waits)) == 4


@pytest.mark.parametrize(
    "error",
    [
        translate_boto_error(service_error("SlowDown", 503)),
        translate_boto_error(service_error("InternalError", 500)),
        translate_boto_error(service_error("RequestTimeout", 400)),
        service_error("ThrottlingException", 400),
        service_error("", 502),
        ConnectionResetError("reset"),
        BrokenPipeError("pipe"),
        TimeoutError("slow"),
    ],
)
def test_what_may_pass_is_tried_again(error):
    outcomes = iter([error, None])

    def fetch():
        if (outcome := next(outcomes)) is not None:
            raise outcome
        return "done"

    assert retrying(fetch, place(), sleep=lambda seconds: None) == "done"


@pytest.mark.parametrize(
    "error",
    [
        NoCredentialsError(),
        translate_boto_error(service_error("InvalidAccessKeyId", 403)),
        translate_boto_error(service_error("SignatureDoesNotMatch", 403)),
        translate_boto_error(service_error("ExpiredToken", 400)),
    ],
)
def test_wrong_credentials_are_no_items_fault(error):
    with pytest.raises(ConfigError, match="credentials for s3://"):
        retrying(lambda: raise_(error), place(), sleep=lambda seconds: pytest.fail("retried"))


@pytest.mark.parametrize(
    "error, code",
    [
        (translate_boto_error(service_error("NoSuchKey", 404)), "not_found"),
        (translate_boto_error(service_error("AccessDenied", 403)), "access_denied"),
        (PermissionError("no"), "access_denied"),
        (IsADirectoryError("dir"), "not_a_file"),
    ],
)
def test_what_is_the_items_fault(error, code):
    assert (
        refusal(lambda: retrying(lambda: raise_(error), place(), sleep=lambda seconds: pytest.fail("retried"))) == code
    )


@pytest.mark.parametrize(
    "error", [OSError(errno.EINVAL, "strange"), translate_boto_error(service_error("InvalidBucketName", 400))]
)
def test_what_nobody_knows_stops_the_run(error):
    with pytest.raises(OSError) as caught:
        retrying(lambda: raise_(error), place(), sleep=lambda seconds: pytest.fail("retried"))
    assert caught.value is error


@pytest.mark.parametrize("call", [stat_source, read_source, open_source])
def test_a_denial_without_a_reason_is_looked_into(monkeypatch, call):
    """Object stores answer a HEAD with wrong credentials by a bare 403; the body of a read says which it is."""

    def denied(self, path, *_, start=None, **__):
        raise translate_boto_error(service_error("403" if start is None else "InvalidAccessKeyId", 403))

    for name in ("info", "_open", "cat_file"):
        monkeypatch.setattr(MemoryFileSystem, name, denied)
    arguments = (MediaItem(uri="memory://bucket/x"), FetchCounter())
    with pytest.raises(ConfigError, match="credentials"):
        call(*arguments[: 1 if call is stat_source else 2])


def test_a_bug_is_not_retried():
    with pytest.raises(ZeroDivisionError):
        retrying(lambda: 1 // 0, place(), sleep=lambda seconds: pytest.fail("retried"))


def test_storage_needs_no_decoder():
    program = "import sys, pipeline.media.source; print(sorted({'torch', 'PIL', 'av', 'ray'} & set(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def raise_(error: Exception):
    raise error
