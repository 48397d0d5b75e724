"""What every stage of a run needs to know; small, picklable, and cheap to make again in each worker."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.config import Config, Store
from pipeline.features.store import FeatureStore
from pipeline.features.writer import TenantWriters
from pipeline.logs import log_ids, start_logs
from pipeline.media.sandbox import Probers, Sandbox, SandboxMode, open_probers, open_sandbox
from pipeline.planning.buckets import BatchBudget, tower_layout
from pipeline.planning.geometry import own_size_geometry, probed_geometry
from pipeline.runs.base import Place, unchanged
from pipeline.runs.metrics import NO_METER, Meter
from pipeline.runs.own_shards import note_shard
from pipeline.schema import Geometry, Probe, SamplePlan
from pipeline.sinks.delivery import Delivery, deliveries
from pipeline.stages.identity import CheckedModel, EncoderIdentity
from pipeline.stages.opened_store import open_store
from pipeline.storage import Folder

if TYPE_CHECKING:
    from pipeline.models.dual_encoder import DualEncoderFacts
    from pipeline.models.embedder import TextSide
    from pipeline.models.image_classifier import ImageClassifierFacts
    from pipeline.models.reranker import ScorerFacts
    from pipeline.models.vision_language import VisionLanguageFacts

# Patches a batch of the tower, where the configuration leaves them to the device. One core (AMD EPYC, a ViT of 384
# dimensions, 196 patches an image) took 26 CPU-ms an image with 800 to 4,000 at a time, 31 with 6,000 and 34 with
# 16,000. A GPU wants more at a time: not measured.
_BATCH_TOKENS = {"cpu": 4_096, "cuda": 16_384}


@dataclass(frozen=True, kw_only=True)
class StageContext:
    """A run's configuration and folder, and what was found of its model.

    `device`, `cpu` or `cuda`, is what the encoder runs on. `in_place` is of a scratch store on the disk of the only
    machine: its shards are read where they are written. `base_url` is the folder of an earlier run, whose rows stand
    for items that are unchanged since. `meter` takes measurements, of every worker.
    """

    config: Config
    run_url: str
    checked: CheckedModel
    device: str = "cpu"
    in_place: bool = False
    base_url: str | None = None
    meter: Meter = NO_METER

    @property
    def identity(self) -> EncoderIdentity:
        """The encoder's terms of every feature key."""
        return self.checked.identity

    @property
    def folder(self) -> Folder:
        """The run's folder."""
        return Folder(self.run_url)

    def unchanged(self, sources: Mapping[int, tuple[str, str, str]]) -> dict[int, Place]:
        """Item → its row in the run that this one goes on from; `sources`: item → (tenant, id, source id)."""
        return {} if self.base_url is None else unchanged(self.folder, Folder(self.base_url), sources)

    @contextmanager
    def logging(self, **ids: Any) -> Iterator[None]:
        """What this process logs in the block is about the run, and what `ids` name: window, batch, item."""
        start_logs(self.config.logs.format)
        with log_ids(run_id=self.run_url.rpartition("/")[2], **ids):
            yield

    @property
    def facts(self) -> VisionLanguageFacts:
        """The model's processor and configuration, loaded once a process."""
        return _facts(self.config.model)

    @property
    def dual_encoder(self) -> DualEncoderFacts:
        """As `facts`, of a dual encoder."""
        return _dual_encoder(self.config.model, json.dumps(self.config.pooling.contract()))

    @property
    def text_side(self) -> TextSide:
        """As `facts`, of what embeds texts."""
        config = self.config
        return _text_side(config.text_model, json.dumps(config.text_pooling()), config.text.prompt_name)

    @property
    def scorer(self) -> ScorerFacts:
        """As `facts`, of a reranker, classifier or reward model."""
        config = self.config
        return _scorer(config.model, json.dumps(config.pooling.contract()), json.dumps(config.scorer_options()))

    @property
    def image_classifier(self) -> ImageClassifierFacts:
        """As `facts`, of an image classifier."""
        return _image_classifier(self.config.model)

    @property
    def embeds_prompts(self) -> bool:
        """True when vectors are what a language model holds at the end of a prompt."""
        return self.checked.kind == "vision_language" and self.checked.vectors is not None

    @property
    def answer_tokens(self) -> int:
        """That an answer may have at most; a prompt that is embedded has none."""
        return 0 if self.embeds_prompts else self.config.generate.max_new_tokens

    @property
    def deliveries(self) -> list[Delivery]:
        """The vector stores that the run fills."""
        spaces = self.checked.vectors
        return [] if spaces is None else deliveries(self.config.sinks, spaces)

    @property
    def min_frames(self) -> int:
        """Frames a video needs at least; a shorter plan shows its last frame again."""
        rules = self.checked.rules
        return rules["video"].temporal_patch_size if "video" in rules else 1

    @property
    def batch_budget(self) -> BatchBudget:
        """What a batch of the tower may hold, and how the tower takes each modality."""
        encode, checked = self.config.encode, self.checked
        return BatchBudget(
            max_items=encode.max_batch_items,
            max_tokens=encode.max_batch_tokens or _BATCH_TOKENS[self.device],
            layouts={modality: tower_layout(checked.rules.get(modality)) for modality in checked.verdicts},
        )

    def geometry(self, probe: Probe, plan: SamplePlan) -> Geometry:
        """Where the item's features will lie. Raises `ItemError` for what the processor refuses.

        By rule where there is one; only otherwise is the processor loaded, which costs a process seconds and 700 MB.
        """
        rule = self.checked.rules.get(probe.modality)
        if rule is not None:
            return probed_geometry(rule, probe, len(plan))
        own_size_rule = self.checked.own_size_rules.get(probe.modality)
        if own_size_rule is not None:
            return own_size_geometry(own_size_rule, probe, len(plan))
        return self.facts.geometry(probe, plan)

    @property
    def sandbox(self) -> Sandbox | None:
        """What decodes untrusted bytes, one a process; None where the process itself does."""
        section = self.config.decode
        return _sandbox(section.sandbox, section.item_seconds)

    @property
    def probers(self) -> Probers | None:
        """As `sandbox`, what reads headers, and the text of pages."""
        section = self.config.decode
        return _probers(section.sandbox, section.item_seconds)

    @property
    def store(self) -> FeatureStore:
        """The feature store, one a process: it holds open shards and the catalogue."""
        return _store(self.config.store)

    @property
    def frame_store(self) -> FeatureStore | None:
        """Where decoded frames are kept; None when they are not."""
        return self.store.frames if self.config.store.keep_frames else None

    def store_writer(self) -> TenantWriters:
        """A writer to the store, of all tenants.

        In a scratch store each shard has the run's note, so that the run can delete it; where shards are read in place
        they are not sealed, which would make a copy.
        """
        scratch = self.config.store.retention == "segment"
        announce = functools.partial(note_shard, self.folder) if scratch else None
        return self.store.writers(seals=not self.in_place, announce=announce)


@functools.lru_cache(maxsize=4)
def _facts(model: str) -> VisionLanguageFacts:
    # Not at the top: decode workers have no use for transformers, which costs a process seconds and 400 MB.
    from pipeline.models.vision_language import VisionLanguageFacts

    return VisionLanguageFacts.load(model)


@functools.lru_cache(maxsize=4)
def _dual_encoder(model: str, pooling: str) -> DualEncoderFacts:
    from pipeline.models.dual_encoder import DualEncoderFacts

    return DualEncoderFacts.load(model, json.loads(pooling))


@functools.lru_cache(maxsize=4)
def _text_side(model: str, pooling: str, prompt_name: str | None) -> TextSide:
    from pipeline.models.embedder import TextSide

    return TextSide.load(model, json.loads(pooling), prompt_name)


@functools.lru_cache(maxsize=4)
def _scorer(model: str, pooling: str, options: str) -> ScorerFacts:
    from pipeline.models.reranker import ScorerFacts

    return ScorerFacts.load(model, json.loads(pooling), **json.loads(options))


@functools.lru_cache(maxsize=1)
def _sandbox(mode: SandboxMode, item_seconds: float) -> Sandbox | None:
    return open_sandbox(mode, item_seconds)


@functools.lru_cache(maxsize=1)
def _probers(mode: SandboxMode, item_seconds: float) -> Probers | None:
    return open_probers(mode, item_seconds)


@functools.lru_cache(maxsize=4)
def _image_classifier(model: str) -> ImageClassifierFacts:
    from pipeline.models.image_classifier import ImageClassifierFacts

    return ImageClassifierFacts.load(model)


@functools.lru_cache(maxsize=4)
def _store(section: Store) -> FeatureStore:
    return open_store(section)
