"""The feature store as the configuration has it."""

from __future__ import annotations

from pipeline.config import Store
from pipeline.features.shard_cache import CacheLimits
from pipeline.features.store import FeatureStore


def open_store(section: Store) -> FeatureStore:
    """The store at `section.path`; nothing is opened before it is used."""
    return FeatureStore(
        section.path,
        section.local_path,
        section.shard_bytes,
        section.shard_windows,
        CacheLimits(max_bytes=section.cache_bytes, fetch_seconds=section.fetch_seconds),
    )
