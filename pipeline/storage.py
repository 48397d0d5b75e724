"""Files under one root, local or on any fsspec URL, written whole or not at all."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import itertools
import json
import os
import posixpath
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any, cast

import fsspec

from pipeline.errors import ConfigError, TransientError
from pipeline.retry import Fault, Result, RetryingFile, explain, judge, retry, with_reason

# Each request is tried three times by the S3 client, which tells apart what one operation of many requests cannot: at
# 5 % failing requests a listing of 100 pages would never pass whole. What still fails is tried again by `retry`.
_S3_OPTIONS = {"connect_timeout": 5, "read_timeout": 15, "retries": {"mode": "standard", "total_max_attempts": 3}}
_COPY_BYTES = 16 * 2**20
_BLOCK_BYTES = 512  # of `st_blocks`, whatever the file system's own
_READ_AHEAD_BYTES = 4 * 2**20  # not tuned against a store


def file_system(scheme: str) -> Any:
    """The process's one file system of `scheme`, which threads share. Raises `ConfigError` for an unknown scheme.

    It remembers no listings: they would hide what other processes write. For S3, `FSSPEC_S3` (JSON, as fsspec reads
    it) adds to what is set here; credentials and endpoint come from the usual places of the AWS clients.
    """
    return _file_system(scheme, os.getpid())


@functools.cache
def _file_system(scheme: str, pid: int) -> Any:
    # fsspec's own cache makes one a thread, each of which loads the client's description of S3 again. By process, for
    # an event loop does not survive a fork; a child keeps its parent's and never closes it: that would take the
    # parent's connections from the epoll set which both share.
    try:
        if scheme == "s3":
            return _s3_file_system()
        return fsspec.filesystem(scheme, skip_instance_cache=True, use_listings_cache=False)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{scheme}:// cannot be used: {error}") from error


def _s3_file_system() -> Any:
    handlers = importlib.import_module("botocore.handlers")
    session = importlib.import_module("aiobotocore.session").get_session()
    # The client would wait for "100 Continue" before it sends a body, without a time limit: a server that stalls there
    # held a write for ever (aiobotocore 3.10).
    session.unregister("before-call.s3", handlers.add_expect_header)
    configured = fsspec.config.conf.get("s3", {}).get("config_kwargs", {})
    fs = fsspec.filesystem(
        "s3",
        skip_instance_cache=True,
        use_listings_cache=False,
        session=session,
        config_kwargs={**_S3_OPTIONS, **configured},
    )
    fs.retries = 1  # s3fs would try five times without jitter, some failures and not others
    # By the server's check, an object that changes while it is read ends in a TypeError where the server gives no
    # message (s3fs 2026.9 with Ceph).
    fs.local_expiry_check = True
    return fs


def split_scheme(url: str) -> str:
    """The scheme of `url` as file systems are known by; "file" for a path."""
    scheme = url.partition("://")[0].lower() if "://" in url else "file"
    return {"local": "file", "s3a": "s3", "gcs": "gs"}.get(scheme, scheme)


def reach(call: Callable[[], Result], url: str, look: Callable[[], object] | None = None) -> Result:
    """`call()` on the storage of `url`, tried as `retry` does; a local disk is asked once.

    Raises `TransientError` for what keeps failing, `ConfigError` for wrong credentials, a denial or a missing bucket,
    `FileNotFoundError`, `FileExistsError`; other errors as they are. `look` is a read that tells a denial's reason.
    """
    scheme = split_scheme(url)
    if scheme == "file":
        return call()
    asked = call if look is None else lambda: with_reason(call, look)
    return retry(asked, scheme=scheme, meaning=lambda error: _meaning(error, url))


def open_reading(fs: Any, path: str, url: str) -> IO[bytes]:
    """A readable, seekable file at `path`, whose every read is tried as `reach` does."""
    if split_scheme(url) == "file":
        return open(path, "rb")
    file = reach(lambda: fs.open(path, "rb", block_size=_READ_AHEAD_BYTES), url, lambda: _peek(fs, path))
    return cast(IO[bytes], io.BufferedReader(RetryingFile(file, lambda read: reach(read, url))))


class Folder:
    """A directory (or object-store prefix) addressed by relative names.

    Writes go to a temporary name first and are renamed locally; object stores publish an object only when its upload
    completes, so both show a reader the whole file or none. A local path is made absolute at once: a worker that
    unpickles the folder has another working directory. Object stores are tried again as `reach` does, and raise what
    it raises.
    """

    def __init__(self, url: str) -> None:
        self._scheme = split_scheme(url)
        self.is_local = self._scheme == "file"
        path: str = self.fs._strip_protocol(url)
        self.path: str = path.rstrip("/") or path
        scheme, separator, rest = url.partition("://")
        self.url = self.path if self.is_local else f"{scheme}{separator}{rest.rstrip('/')}"

    def __reduce__(self) -> tuple[type[Folder], tuple[str]]:
        return type(self), (self.url,)

    @property
    def fs(self) -> Any:
        """The file system; asked for each time, because a forked process has another."""
        return file_system(self._scheme)

    def sub(self, name: str) -> Folder:
        """The folder `name` below this one."""
        return Folder(posixpath.join(self.url, name))

    def locate(self, name: str) -> str:
        """The full path of `name`, as the file system wants it."""
        return posixpath.join(self.path, name)

    def exists(self, name: str) -> bool:
        """True when `name` is there now."""
        try:
            return bool(self._reach(lambda path: self.fs.exists(path), name))
        except FileNotFoundError:  # said by the read that looked for the reason of a denial
            return False

    def read_bytes(self, name: str) -> bytes:
        """The whole file. Raises `FileNotFoundError`."""
        return self._reach(lambda path: bytes(self.fs.cat_file(path)), name)

    def read_json(self, name: str) -> Any:
        """The file parsed as JSON. Raises `FileNotFoundError`."""
        return json.loads(self.read_bytes(name))

    def open(self, name: str) -> IO[bytes]:
        """A readable, seekable binary file."""
        return open_reading(self.fs, self.locate(name), self._url_of(name))

    def write_bytes(self, name: str, data: bytes) -> None:
        """Publish `data` as `name`, replacing what was there."""
        if self.is_local:
            with self.writing(name) as file:
                file.write(data)
        else:
            self._reach(lambda path: self.fs.pipe_file(path, data), name)

    def write_json(self, name: str, value: Any, *, indent: int | None = None) -> None:
        """Publish `value` as JSON with sorted keys; with `indent`, which takes six times as long, for people."""
        self.write_bytes(name, json.dumps(value, indent=indent, sort_keys=True).encode() + b"\n")

    def create_bytes(self, name: str, data: bytes) -> None:
        """Publish `data` as `name` unless it exists. Raises `FileExistsError`, also when an answer was lost on the way
        and the file is this call's own: read it to know."""
        if self.is_local:
            os.makedirs(os.path.dirname(self.locate(name)), exist_ok=True)
        self._reach(lambda path: self.fs.pipe_file(path, data, mode="create"), name)

    def version(self, name: str) -> str | None:
        """What `swap_bytes` asks for; None when the file is absent. Empty where storage has no versions of its own."""
        try:
            info = self._reach(lambda path: self.fs.info(path), name)
        except FileNotFoundError:
            return None
        # Without its quotes: so AWS documents conditional writes, and Ceph compares (16.2: never equal with them).
        return str(info.get("ETag", "")).strip('"') if self._scheme == "s3" else ""

    def swap_bytes(self, name: str, data: bytes, version: str) -> bool:
        """Replace the file if it still has that version; False when not. Without versions it is replaced anyway."""
        if not version:
            self.write_bytes(name, data)
            return True
        try:
            self._reach(lambda path: self.fs.pipe_file(path, data, IfMatch=version), name)
        except (FileExistsError, FileNotFoundError):
            return False
        return True

    def upload(self, path: str, name: str) -> None:
        """Publish the local file `path` as `name`."""
        if not self.is_local:
            self._reach(lambda target: self.fs.put_file(path, target), name)
            return
        with self.writing(name) as file, open(path, "rb") as source:
            shutil.copyfileobj(source, file, _COPY_BYTES)

    def download(self, name: str, path: str, check: Callable[[], None] = lambda: None) -> None:
        """Bring `name` to the local file `path`; what `check`, called with each chunk, raises ends it.

        Raises `FileNotFoundError`.
        """
        if self.is_local:
            self._reach(lambda source: _copy(source, path, check), name)
        else:
            self._reach(lambda source: self.fs.get_file(source, path, callback=_Checking(check)), name)

    @contextmanager
    def writing(self, name: str) -> Iterator[IO[bytes]]:
        """A binary file that becomes `name` when the block ends, and nothing when it raises."""
        if not self.is_local:
            # Spooled to a local file first: fsspec back ends differ in what an abandoned upload leaves behind
            # (memory:// shows the object as soon as it is opened), put_file publishes whole objects on all of them.
            with tempfile.NamedTemporaryFile(prefix="headrace-upload-") as file:
                yield cast(IO[bytes], file)
                file.flush()
                self.upload(file.name, name)
            return
        target = self.locate(name)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        temporary = f"{target}.{uuid.uuid4().hex[:12]}.tmp"
        try:
            with open(temporary, "wb") as writer:
                yield writer
            os.replace(temporary, target)
        except BaseException:
            if os.path.exists(temporary):
                os.unlink(temporary)
            raise

    def folders(self, name: str = "") -> list[str]:
        """Sorted names of the folders directly in `name`; empty when it does not exist."""
        try:
            entries = self._reach(lambda path: self.fs.ls(path, detail=True), name)
        except FileNotFoundError:
            return []
        return sorted(posixpath.basename(e["name"].rstrip("/")) for e in entries if e["type"] == "directory")

    def list(self, name: str = "", *, suffix: str = "") -> list[str]:
        """Sorted names of the files directly in `name`, without temporary ones; empty when it does not exist."""
        try:
            entries = self._reach(lambda path: self.fs.ls(path, detail=True), name)
        except FileNotFoundError:
            return []
        files = (posixpath.basename(e["name"]) for e in entries if e["type"] == "file")
        return sorted(f for f in files if f.endswith(suffix) and not f.endswith(".tmp") and f)

    def num_bytes(self, name: str = "") -> int:
        """What a file, or everything in a folder, takes; on a disk its blocks. 0 when it is absent."""
        try:
            return self._reach(_blocks if self.is_local else lambda path: int(self.fs.du(path)), name)
        except FileNotFoundError:
            return 0

    def remove(self, name: str) -> None:
        """Delete a file or a whole folder; nothing happens when it is absent."""
        self._reach(self._remove, name)

    def _remove(self, path: str) -> None:
        if not self.fs.exists(path):
            return
        self.fs.rm(path, recursive=True)
        # S3 may fail on single keys of a bulk deletion, which s3fs does not say.
        if self.fs.exists(path):
            raise TimeoutError(f"{path}: still there after its deletion")

    def _reach(self, call: Callable[[str], Result], name: str) -> Result:
        path = self.locate(name) if name else self.path
        return reach(lambda: call(path), self._url_of(name), lambda: _peek(self.fs, path))

    def _url_of(self, name: str) -> str:
        return posixpath.join(self.url, name)


def _blocks(path: str) -> int:
    below = (os.path.join(folder, name) for folder, *names in os.walk(path) for name in itertools.chain(*names))
    total = 0
    for each in itertools.chain([path], below):
        with contextlib.suppress(FileNotFoundError):  # removed since it was listed
            total += os.lstat(each).st_blocks * _BLOCK_BYTES
    return total


class _Checking(fsspec.callbacks.Callback):  # type: ignore[misc]
    """Calls `check` at the start of a transfer and with each of its chunks."""

    def __init__(self, check: Callable[[], None]) -> None:
        super().__init__()
        self._check = check

    def set_size(self, size: int) -> None:
        self._check()

    def relative_update(self, inc: int = 1) -> None:
        self._check()


def _copy(source: str, path: str, check: Callable[[], None]) -> None:
    with open(source, "rb") as reader, open(path, "wb") as writer:
        while chunk := reader.read(_COPY_BYTES):
            check()
            writer.write(chunk)


def _peek(fs: Any, path: str) -> bytes:
    return bytes(fs.cat_file(path, start=0, end=1))


def _meaning(error: Exception, url: str) -> Exception:
    what = f"{url}: {explain(error)}"
    scheme = split_scheme(url)
    match judge(error):
        case Fault.CREDENTIALS:
            return ConfigError(f"the credentials for {scheme}:// are not valid; {what}")
        case Fault.NO_BUCKET:
            return ConfigError(f"the bucket does not exist; {what}")
        case Fault.DENIED:
            return ConfigError(f"the credentials for {scheme}:// do not allow this (objects and listings); {what}")
        case Fault.EXISTS:
            return FileExistsError(what)
        case Fault.PASSING:
            return TransientError(what)
        case _:
            return error
