"""Archives made by the standard library, and damaged by hand."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Mapping
from typing import Any


def make_tar(files: Mapping[str, bytes], *, format: int = tarfile.GNU_FORMAT, **headers: Any) -> bytes:
    """A tar of `files` in order."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format, **headers) as archive:
        for name, data in files.items():
            add(archive, name, data)
    return buffer.getvalue()


def add(archive: tarfile.TarFile, name: str, data: bytes = b"", **fields: Any) -> None:
    """Appends a member with `fields` of its header set."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    archive.addfile(info, io.BytesIO(data))


def make_zip(files: Mapping[str, bytes], *, method: int = zipfile.ZIP_STORED) -> bytes:
    """A zip of `files` in order."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()
