"""Which shards of a scratch store are a run's own: noted before they are made, so that a crash leaves none unknown."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.storage import Folder

_NOTES = "_run/shards"


def note_shard(folder: Folder, shard_id: str) -> None:
    """Put down that the run whose folder this is will make the shard."""
    folder.write_bytes(f"{_NOTES}/{shard_id}", b"")


def noted_shards(folder: Folder) -> set[str]:
    """The shards that were noted and not forgotten; one may never have been made."""
    return set(folder.list(_NOTES))


def forget_shards(folder: Folder, shard_ids: Iterable[str]) -> None:
    """Take the notes of deleted shards back."""
    for shard_id in shard_ids:
        folder.remove(f"{_NOTES}/{shard_id}")
