"""What identifies an object without its bytes being read, and how well it does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pipeline.schema import MediaItem

# What an id promises: it is the hash of the bytes; it is another for other bytes, by the storage's or the caller's
# word; or it may be the same for other bytes.
Strength = Literal["content", "strong", "weak"]

_STAMPS = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFacts:
    """What identifies an object without reading it, how well it does, and its size."""

    source_id: str
    strength: Strength
    num_bytes: int


def as_given(item: MediaItem, found: SourceFacts) -> SourceFacts:
    """With the id that the caller gives, where one is given."""
    if item.sha256:
        return SourceFacts(source_id=f"sha256:{item.sha256}", strength="content", num_bytes=found.num_bytes)
    if item.version:
        own_id = f"version:{item.uri}:{item.version}"
        return SourceFacts(source_id=own_id, strength="strong", num_bytes=found.num_bytes)
    return found


def object_version(scheme: str, uri: str, info: Mapping[str, Any]) -> tuple[str, Strength]:
    """(source id, strength) of an object by what its storage says of it, as fsspec has it.

    GCS numbers the generations of an object. S3 has an ETag, the MD5 of what was put at once, and in buckets with
    versions an id of each. Elsewhere an ETag is what it is. Without any it is size and time.
    """
    size = int(info["size"])
    if scheme == "gs" and info.get("generation"):
        return f"generation:{uri}:{info['generation']}:{size}", "strong"
    etag = str(info.get("ETag") or info.get("etag") or "").strip('"')
    if etag:
        version = info.get("VersionId") if scheme == "s3" else None
        numbered = f":{version}" if version and version != "null" else ""  # "null": of before there were versions
        return f"etag:{uri}:{etag}:{size}{numbered}", "strong" if scheme == "s3" else "weak"
    stamp = next((info[name] for name in _STAMPS if info.get(name)), "")
    return f"object:{uri}:{size}:{stamp}", "weak"
