"""Files under one root, local or on any fsspec URL, written whole or not at all."""

from __future__ import annotations

import json
import os
import posixpath
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from fsspec.core import url_to_fs


class Folder:
    """A directory (or object-store prefix) addressed by relative names.

    Writes go to a temporary name first and are renamed locally; object stores publish an object only when its upload
    completes, so both show a reader the whole file or none. A local path is made absolute at once: a worker that
    unpickles the folder has another working directory.
    """

    def __init__(self, url: str) -> None:
        self.fs, path = url_to_fs(url)
        self.is_local = "file" in _protocols(self.fs)
        self.path: str = path.rstrip("/") or path
        scheme, separator, rest = url.partition("://")
        self.url = self.path if self.is_local else f"{scheme}{separator}{rest.rstrip('/')}"

    def __reduce__(self) -> tuple[type[Folder], tuple[str]]:
        return type(self), (self.url,)

    def sub(self, name: str) -> Folder:
        """The folder `name` below this one."""
        return Folder(posixpath.join(self.url, name))

    def locate(self, name: str) -> str:
        """The full path of `name`, as the file system wants it."""
        return posixpath.join(self.path, name)

    def exists(self, name: str) -> bool:
        """True when `name` is there now (no cached listing is asked)."""
        self.fs.invalidate_cache()
        return bool(self.fs.exists(self.locate(name)))

    def read_bytes(self, name: str) -> bytes:
        """The whole file. Raises `FileNotFoundError`."""
        return bytes(self.fs.cat_file(self.locate(name)))

    def read_json(self, name: str) -> Any:
        """The file parsed as JSON. Raises `FileNotFoundError`."""
        return json.loads(self.read_bytes(name))

    def open(self, name: str) -> IO[bytes]:
        """A readable, seekable binary file."""
        return self.fs.open(self.locate(name), "rb")  # type: ignore[no-any-return]

    def write_bytes(self, name: str, data: bytes) -> None:
        """Publish `data` as `name`, replacing what was there."""
        with self.writing(name) as file:
            file.write(data)

    def write_json(self, name: str, value: Any) -> None:
        """Publish `value` as indented JSON with sorted keys."""
        self.write_bytes(name, json.dumps(value, indent=2, sort_keys=True).encode() + b"\n")

    @contextmanager
    def writing(self, name: str) -> Iterator[IO[bytes]]:
        """A binary file that becomes `name` when the block ends, and nothing when it raises."""
        target = self.locate(name)
        if not self.is_local:
            with _uploading(self.fs, target) as file:
                yield file
            return
        os.makedirs(os.path.dirname(target), exist_ok=True)
        temporary = f"{target}.{uuid.uuid4().hex[:12]}.tmp"
        try:
            with open(temporary, "wb") as file:
                yield file
            os.replace(temporary, target)
        except BaseException:
            if os.path.exists(temporary):
                os.unlink(temporary)
            raise

    def list(self, name: str = "", *, suffix: str = "") -> list[str]:
        """Sorted names of the files directly in `name`, without temporary ones; empty when it does not exist."""
        self.fs.invalidate_cache()
        directory = self.locate(name) if name else self.path
        try:
            entries = self.fs.ls(directory, detail=True)
        except FileNotFoundError:
            return []
        files = (posixpath.basename(e["name"]) for e in entries if e["type"] == "file")
        return sorted(f for f in files if f.endswith(suffix) and not f.endswith(".tmp") and f)

    def remove(self, name: str) -> None:
        """Delete a file or a whole folder; nothing happens when it is absent."""
        if self.exists(name):
            self.fs.rm(self.locate(name), recursive=True)


def _protocols(fs: Any) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


@contextmanager
def _uploading(fs: Any, target: str) -> Iterator[IO[bytes]]:
    # Spooled to a local file first: fsspec back ends differ in what an abandoned upload leaves behind
    # (memory:// shows the object as soon as it is opened), put_file publishes whole objects on all of them.
    with tempfile.NamedTemporaryFile(prefix="headrace-upload-") as file:
        yield file
        file.flush()
        fs.put_file(file.name, target)
