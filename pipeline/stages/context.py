"""What every stage of a run needs to know; small, picklable, and cheap to make again in each worker."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config import Config
from pipeline.features.store import FeatureStore
from pipeline.schema import Modality
from pipeline.stages.identity import EncoderIdentity
from pipeline.storage import Folder

if TYPE_CHECKING:
    from pipeline.models.vision_language import VisionLanguageFacts


@dataclass(frozen=True, kw_only=True)
class StageContext:
    """A run's configuration and folder, its encoder's identity, and which modalities its model is good for."""

    config: Config
    run_url: str
    identity: EncoderIdentity
    verdicts: Mapping[Modality, str]

    @property
    def folder(self) -> Folder:
        """The run's folder."""
        return Folder(self.run_url)

    @property
    def facts(self) -> VisionLanguageFacts:
        """The model's processor and configuration, loaded once a process."""
        return _facts(self.config.model)

    @property
    def store(self) -> FeatureStore:
        """The feature store, one a process: it holds open shards and the catalogue."""
        section = self.config.store
        return _store(section.path, section.local_path, section.shard_bytes, section.shard_windows)


@functools.lru_cache(maxsize=4)
def _facts(model: str) -> VisionLanguageFacts:
    # Not at the top: decode workers have no use for transformers, which costs a process seconds and 400 MB.
    from pipeline.models.vision_language import VisionLanguageFacts

    return VisionLanguageFacts.load(model)


@functools.lru_cache(maxsize=4)
def _store(path: str, local_path: str | None, shard_bytes: int, shard_windows: int) -> FeatureStore:
    return FeatureStore(path, local_path, shard_bytes, shard_windows)
