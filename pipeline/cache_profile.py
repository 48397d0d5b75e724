"""What keeping decoded frames, or features, saves a second question about the same media; measured by runs of it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pipeline import engine, flow
from pipeline.config import Config, Incremental, Sinks
from pipeline.errors import ConfigError
from pipeline.features.identity import FeatureKeyTerms, FrameKeyTerms
from pipeline.features.store import FeatureStore
from pipeline.runs.compare import Comparison, compare_runs
from pipeline.runs.ledger import Ledger
from pipeline.runs.manifest import freeze_part
from pipeline.runs.receipts import Totals
from pipeline.runs.run import stage_listing
from pipeline.storage import Folder

JOB = "caption_videos"  # of the jobs the one that asks questions about media
Tier = Literal["none", "decoded", "encoder"]
IDENTITY: dict[Tier, tuple[str, ...]] = {
    "none": (),
    "decoded": FrameKeyTerms.__slots__,
    "encoder": FeatureKeyTerms.__slots__,
}
_FIRST, _OFF = "first", "off"


@dataclass(frozen=True, kw_only=True, slots=True)
class TierProfile:
    """A second question with one tier of the store.

    `identity` are the terms of the tier's keys; `retained_bytes` what it takes where it lies; `encode_seconds` what all
    workers spent from media to features, `saved_ms` the difference to no cache; `same_output` says whether all answers
    are those of no cache, bit by bit. `encodes` and `decodes` are of media.
    """

    tier: Tier
    identity: tuple[str, ...]
    retained_bytes: int
    encode_seconds: float
    wall_seconds: float
    encodes: int
    decodes: int
    saved_ms: float
    same_output: bool

    @property
    def saved_ms_per_mb(self) -> float | None:
        """Of each megabyte (10^6 bytes) that is kept; None where nothing is."""
        return self.saved_ms / (self.retained_bytes / 1e6) if self.retained_bytes else None


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheProfile:
    """What was measured on `items` items, and each tier's profile, no cache first."""

    items: int
    question: str
    tiers: tuple[TierProfile, ...]

    def to_json(self) -> dict[str, Any]:
        """The fields, with what is reckoned from them."""
        tiers = [
            {name: getattr(each, name) for name in each.__slots__} | {"saved_ms_per_mb": each.saved_ms_per_mb}
            for each in self.tiers
        ]
        return {"items": self.items, "question": self.question, "tiers": tiers}


def profile_cache(config: Config, question: str, num_items: int, *, told: Callable[[str], None]) -> CacheProfile:
    """Ask `config.prompt`, then `question`, of some items from the middle of the listing, with and without the tiers.

    Four runs in a store and an output of their own beside the job's store, removed at the end; sinks get nothing.
    `told` what is being done. Raises `ConfigError` for a job that asks nothing about media, and what a run raises.
    """
    if config.job != JOB:
        raise ConfigError(f"job {config.job!r} asks no question about media; profile-cache is for {JOB}")
    config = config.anchored()
    beside = FeatureStore(config.store.path, config.store.local_path).folder
    scratch = f"profiling-{uuid.uuid4().hex[:12]}"
    try:
        with engine.ray_session(config.ray):  # one for all runs
            return _Profiling(config, beside.sub(scratch).url, question, num_items, told).profile()
    finally:
        beside.remove(scratch)


class _Profiling:
    def __init__(self, config: Config, home: str, question: str, num_items: int, told: Callable[[str], None]) -> None:
        self._home = home
        self._question = question
        self._told = told
        changes = {
            "output": f"{home}/output",
            "sample_fraction": None,  # the listing is one already
            "limit": None,
            "sinks": Sinks(),
            "incremental": Incremental(),
            "max_quarantined_fraction": 1.0,
        }
        self._config = config.model_copy(update=changes)
        with stage_listing(config) as staged:
            self._items = min(num_items, staged.num_items)
            start = (staged.num_items - self._items) // 2
            for run_id in (_FIRST, _OFF, "decoded", "encoder"):
                freeze_part(Folder(staged.directory), self._folder(run_id), start, start + self._items)

    def profile(self) -> CacheProfile:
        self._told("the first question, which fills both tiers")
        self._run(_FIRST, self._config.prompt, keep_frames=True)
        kept = self._store()
        frames_bytes = sum(part.frames.num_bytes() for part in kept.parts())
        features_bytes = kept.num_bytes() - frames_bytes
        self._told("the second question, without a cache")
        off = self._profiled("none", _OFF, 0, reuse=False)
        self._told("the second question, with kept features")
        encoder = self._profiled("encoder", "encoder", features_bytes, against=off)
        # Without their features media are encoded again, from kept frames.
        kept = self._store()
        kept.delete_shards([shard.shard_id for shard in kept.sealed_shards()])
        self._told("the second question, with kept frames")
        decoded = self._profiled("decoded", "decoded", frames_bytes, against=off, keep_frames=True)
        return CacheProfile(items=self._items, question=self._question, tiers=(off, decoded, encoder))

    def _profiled(
        self, tier: Tier, run_id: str, retained_bytes: int, against: TierProfile | None = None, **store: bool
    ) -> TierProfile:
        summary = self._run(run_id, self._question, **store)
        seconds = self._encode_seconds(run_id)
        return TierProfile(
            tier=tier,
            identity=IDENTITY[tier],
            retained_bytes=retained_bytes,
            encode_seconds=seconds,
            wall_seconds=summary["seconds"]["encode_pass"],
            encodes=summary["encodes"],
            decodes=summary["images_decoded"] + summary["frames_decoded"],
            saved_ms=0.0 if against is None else 1e3 * (against.encode_seconds - seconds),
            same_output=against is None or self._compared(run_id).same_results,
        )

    def _run(self, run_id: str, prompt: str, **store: bool) -> dict[str, Any]:
        # Without reuse in a place of its own: what it encodes is not found by the others.
        path = f"{self._home}/{'store' if store.get('reuse', True) else 'unused'}"
        section = self._config.store.model_copy(
            update={"path": path, "retention": "keep", "max_bytes": None, "reuse": True, "keep_frames": False, **store}
        )
        return flow.run(self._config.model_copy(update={"run_id": run_id, "prompt": prompt, "store": section}))

    def _compared(self, run_id: str) -> Comparison:
        return compare_runs(self._folder(_OFF), self._folder(run_id))

    def _encode_seconds(self, run_id: str) -> float:
        entries = Ledger(self._folder(run_id)).finished("encode").values()
        return sum(sum(Totals.from_entry(entry).seconds.values()) for entry in entries)

    def _folder(self, run_id: str) -> Folder:
        return Folder(self._config.output).sub(run_id)

    def _store(self) -> FeatureStore:
        return FeatureStore(f"{self._home}/store", self._config.store.local_path)


def profile_text(profile: CacheProfile) -> str:
    """A table of the tiers, with what their keys have to be told by."""
    rows: list[Sequence[str]] = [
        ("kept", "retained MB", "encode s", "saved ms", "ms per MB", "encoded", "decoded", "same answers")
    ]
    for each in profile.tiers:
        per_mb = each.saved_ms_per_mb
        rows.append(
            (
                {"none": "nothing", "decoded": "decoded frames", "encoder": "features"}[each.tier],
                f"{each.retained_bytes / 1e6:.2f}",
                f"{each.encode_seconds:.3f}",
                f"{each.saved_ms:.0f}",
                "-" if per_mb is None else f"{per_mb:.1f}",
                str(each.encodes),
                str(each.decodes),
                "yes" if each.same_output else "NO",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    needed = [f"{each.tier}: known by {', '.join(each.identity)}" for each in profile.tiers if each.identity]
    return "\n".join([f"{profile.items} items, second question {profile.question!r}", *lines, *needed])
