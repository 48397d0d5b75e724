"""Probe, admit and plan one window of the encode pass, and write the plan down before its first batch starts."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from pipeline.config import Config
from pipeline.errors import ItemError
from pipeline.features.catalogue import SourceEntry
from pipeline.media.budget import Budget, admit, admit_request
from pipeline.media.in_process import InProcess
from pipeline.media.part import part_plan, probe_part
from pipeline.media.sampling import sample_plan
from pipeline.media.shared_source import FileDigests, SharedSources
from pipeline.media.source import WHOLE_BLOCK_BYTES, FetchCounter, open_source, stat_source
from pipeline.media.source_id import SourceFacts
from pipeline.planning.balance import balanced_order
from pipeline.planning.buckets import PlannedBatch, plan_window
from pipeline.planning.decode_cost import decode_seconds
from pipeline.planning.windows import Window
from pipeline.runs.base import Place
from pipeline.runs.manifest import read_range
from pipeline.runs.receipts import receipt_to_json
from pipeline.runs.summary import FALLBACK_COUNT
from pipeline.schema import MediaItem, Modality, Probe, Receipt, Request, ResourceVector, SamplePlan
from pipeline.stages.context import StageContext
from pipeline.stages.forecast import forecast_counts, planned_encode_work
from pipeline.stages.identity import (
    check_content,
    is_read_by_range,
    is_trusted,
    media_content,
    media_source,
    request_source,
    sha256_content,
    source_content,
)
from pipeline.stages.kept_frames import with_known_frames
from pipeline.stages.outcomes import count_codes, encode_batch_receipts, failure_row
from pipeline.stages.rows import PlannedMedia, batch_table, receipt_row
from pipeline.stages.spending import Spending
from pipeline.stages.window_plan import WindowPlan, load_plan, plan_name

_MAX_CARRIED_BYTES = 512 * 2**20


def max_carried_bytes(config: Config) -> int:
    """How much the small objects of a window may weigh whose bytes travel from the probe to the decoder.

    What is above is read again; 4,096 objects of 128 KB each are not.
    """
    return min(config.window_items * config.decode.max_inline_bytes, _MAX_CARRIED_BYTES)


def written_plan(context: StageContext, window: Window) -> WindowPlan:
    """The window's plan, which is made and written down when there is none. Made here it has the bytes that the probe
    read, loaded it has not."""
    plan = load_plan(context, window)
    if plan is None:
        plan = _WindowPlanner(context, window).plan()
        context.folder.write_json(plan_name(window.index), plan.to_json())
        # This process outlives its pass: a shard that it kept mapped would keep its disk space when it is deleted.
        context.store.close()
    return plan


def dry_plan(context: StageContext, window: Window) -> WindowPlan:
    """The plan that would be written now. Its hits are what the catalogue lists, and not read; it has no bytes."""
    return _WindowPlanner(context, window, dry=True).plan()


@dataclass(frozen=True)
class PlanEncodeWindow:
    """Stage: window rows (`index, start, stop`) → batches still to be done, and receipts of what is known already."""

    context: StageContext
    rows_per_block: int = 1  # that the rows are cut into, in order

    def __call__(self, windows: pa.Table) -> Iterator[pa.Table]:
        """Tables (`BATCH_SCHEMA`) of one row: its receipt and then a batch each, a window after another."""
        for row in windows.to_pylist():
            with self.context.logging(window=row["index"]):
                plan = written_plan(self.context, Window(**row))
            # One by one: a table of them all would be a second copy of the bytes that they carry.
            for batch in self._rows(plan):
                yield batch_table([batch])

    def _rows(self, plan: WindowPlan) -> Iterator[dict[str, Any]]:
        """What is known already first; the rest in an order in which blocks of them take about as long to decode."""
        done = encode_batch_receipts(self.context.folder, plan.window.index)
        to_do = {}
        known = [receipt_row(plan.receipt, receipt_to_json(plan.receipt))]
        for number, (digest, positions) in enumerate(plan.batches):
            if (number, digest) in done:
                known.append(receipt_row(*done[number, digest]))
            else:
                to_do[number] = (digest, positions)
        yield from known
        by_position = {media.position: media for media in plan.media}
        costs = [sum(by_position[p].decode_seconds for p in positions) for _, positions in to_do.values()]
        numbers = list(to_do)
        for place in balanced_order(costs, per_block=self.rows_per_block, ahead=len(known)):
            number = numbers[place]
            digest, positions = to_do[number]
            items = [by_position[position].to_row() for position in positions]
            yield {"window": plan.window.index, "batch": number, "digest": digest, "items": items}


@dataclass
class _Candidate:
    """One media item on its way through probe and admission."""

    request: Request
    media_index: int
    media: MediaItem
    facts: SourceFacts | None = None
    file_source: str = ""
    content: str | None = None
    probe: Probe | None = None
    failure: ItemError | None = None
    is_carried: bool = False
    counter: FetchCounter = field(default_factory=FetchCounter)


class _WindowPlanner:
    def __init__(self, context: StageContext, window: Window, *, dry: bool = False) -> None:
        self.context = context
        self.window = window
        self.dry = dry
        self.limits: Budget = context.config.limits()
        self.failures: list[dict[str, Any]] = []
        self.fallbacks = Counter[str]()  # by shard and its condition
        self.saved_ms = 0
        self.policy = context.config.source_policy()
        self.sources = SharedSources(self.policy)
        self.digests = FileDigests()
        self.known: dict[tuple[str, str], SourceEntry] = {}  # by tenant and source id

    def plan(self) -> WindowPlan:
        spending = Spending(self._children)
        started = time.perf_counter()
        requests = read_range(self.context.folder, self.window.start, self.window.stop)
        candidates = [candidate for request in requests for candidate in self._candidates(request)]
        carried = self._stat_all(candidates)
        candidates = [candidate for candidate in candidates if candidate.request.item_index not in carried]
        self._probe(candidates)
        probed = time.perf_counter()
        media = self._admitted(candidates)
        hits = self._hits(media)
        same_as = self._same_as(media, hits)
        encoded = [m for m in media if m.position not in hits and m.position not in same_as]
        batches = self._batches(encoded)
        with_frames = {m.position: m for m in with_known_frames(self.context, encoded)}
        counts = {
            "batches": len(batches),
            "items": len(media) + len(self.failures),
            "media_in": sum(len(request.media) for request in requests),
            "fetches": sum(c.counter.fetches for c in candidates),
            "bytes_fetched": sum(c.counter.bytes_fetched for c in candidates),
            "fetch_retries": sum(c.counter.retries for c in candidates),
            "features_reused": len(hits) + len(same_as),
            "features_saved_ms": self.saved_ms,
            "fallbacks": self.fallbacks.total(),
            **{FALLBACK_COUNT + shard: count for shard, count in self.fallbacks.items()},
            **forecast_counts(planned_encode_work(self.context, batches, media)),
        }
        bytes_fetched = Counter[int]()
        for candidate in candidates:
            bytes_fetched[candidate.request.item_index] += candidate.counter.bytes_fetched
        spent = spending.spent(bytes_fetched)
        receipt = Receipt(
            stage="plan",
            window=self.window.index,
            batch=-1,
            digest=hashlib.sha256(repr([batch.digest for batch in batches]).encode()).hexdigest()[:16],
            counts=counts,
            seconds={"probe": probed - started, "plan": time.perf_counter() - probed},
            quarantine=count_codes(failure["code"] for failure in self.failures),
            cpu_seconds={"plan": spent["cpu_seconds"]},
        )
        return WindowPlan(
            window=self.window,
            media=[with_frames.get(m.position, m) for m in media],
            hits=hits,
            same_as=same_as,
            batches=[(batch.digest, [item.position for item in batch.items]) for batch in batches],
            failures=self.failures,
            receipt=receipt,
            carried=carried,
            learnt=[m.position for m in media if m.position in hits and self._is_news(m)],
            spent=spent,
        )

    def _children(self) -> list[int]:
        probers = self.context.probers
        return [] if probers is None else probers.children

    def _candidates(self, request: Request) -> list[_Candidate]:
        try:
            admit_request(len(request.media), self.limits)
        except ItemError as error:
            self.failures.append(failure_row(request.item_index, None, error))
            return []
        return [_Candidate(request, index, media) for index, media in enumerate(request.media)]

    def _stat_all(self, candidates: list[_Candidate]) -> dict[int, Place]:
        """Where each is from; those that are unchanged since the run that this one goes on from."""
        self._each(self._stat, candidates)
        found: dict[int, list[str]] = defaultdict(list)
        for candidate in candidates:
            if candidate.facts is not None and candidate.failure is None and self._is_trusted(candidate):
                found[candidate.request.item_index].append(candidate.facts.source_id)
        sources = {}
        for request in {c.request.item_index: c.request for c in candidates}.values():
            own = found[request.item_index]
            if len(own) == len(request.media) and (self.context.embeds_prompts or len(own) == 1):
                source_id = request_source(request, own) if self.context.embeds_prompts else own[0]
                sources[request.item_index] = (request.tenant, request.id, source_id)
        return self.context.unchanged(sources)

    def _probe(self, candidates: list[_Candidate]) -> None:
        self._find_sources(candidates)
        waiting = [c for c in candidates if c.failure is None]
        self._choose_carried([c for c in waiting if self._entry(c) is None])
        self._each(self._look, waiting)

    def _find_sources(self, candidates: list[_Candidate]) -> None:
        """What each tenant's sources are known to stand for: nobody learns what another's are."""
        ids: dict[str, list[str]] = defaultdict(list)
        for candidate in candidates:
            if candidate.facts is not None:
                ids[candidate.request.tenant].append(candidate.facts.source_id)

        def find(tenant: str) -> dict[str, SourceEntry]:
            sources = self.context.store.of_tenant(tenant).sources
            sources.reload()
            return sources.find(ids[tenant])

        with ThreadPoolExecutor(self.context.config.decode.io_threads) as pool:
            for tenant, found in zip(ids, pool.map(find, ids), strict=True):
                self.known.update(((tenant, source_id), entry) for source_id, entry in found.items())

    def _each(self, step: Callable[[_Candidate], None], candidates: Sequence[_Candidate]) -> None:
        """The step for each candidate, in threads, each of which takes the next one as it is done with one. Failures
        of an item are noted; any other ends it, as soon as what is under way is done."""
        guarded, left = self._guarded(step), iter(candidates)

        def work() -> None:
            try:
                for candidate in left:
                    guarded(candidate)
            except BaseException:
                for _ in left:
                    pass
                raise

        # A future an item costs more than a step over an object that is small and near.
        num_threads = self.context.config.decode.io_threads
        with ThreadPoolExecutor(num_threads) as pool:
            for worker in [pool.submit(work) for _ in range(num_threads)]:
                worker.result()

    def _guarded(self, step: Callable[[_Candidate], None]) -> Callable[[_Candidate], None]:
        """For threads: a step whose failures are noted, and whose log lines name the item."""

        def run(candidate: _Candidate) -> None:
            if candidate.failure is None:
                request = candidate.request
                ids = {"window": self.window.index, "item": request.id, "item_index": request.item_index}
                try:
                    with self.context.logging(**ids):
                        step(candidate)
                except ItemError as error:
                    candidate.failure = error

        return run

    def _choose_carried(self, candidates: list[_Candidate]) -> None:
        """Of those that are read whole, the first in order that fit are carried on."""
        left = 0 if self.dry else max_carried_bytes(self.context.config)
        for candidate in candidates:
            assert candidate.facts is not None
            if candidate.facts.num_bytes <= self.context.config.decode.max_inline_bytes:
                left -= candidate.facts.num_bytes
                candidate.is_carried = left >= 0

    def _stat(self, candidate: _Candidate) -> None:
        media, facts = candidate.media, stat_source(candidate.media, self.policy, candidate.counter)
        source_id = media_source(media, facts.source_id, self.context.config.document.dpi)
        candidate.file_source = facts.source_id
        candidate.facts = dataclasses.replace(facts, source_id=source_id)
        if media.sha256 is not None:
            candidate.content = media_content(media, f"sha256:{media.sha256.lower()}")

    def _is_trusted(self, candidate: _Candidate) -> bool:
        assert candidate.facts is not None
        return is_trusted(candidate.facts.strength, self.context.config.store.identity)

    def _entry(self, candidate: _Candidate) -> SourceEntry | None:
        """What is known of the object, where it is known by its source id."""
        assert candidate.facts is not None
        known = self.known.get((candidate.request.tenant, candidate.facts.source_id))
        return known if self._is_trusted(candidate) else None

    def _look(self, candidate: _Candidate) -> None:
        assert candidate.facts is not None
        entry = self._entry(candidate)
        num_bytes = candidate.facts.num_bytes
        if entry is not None:
            candidate.probe = entry.probe
            is_ranged = is_read_by_range(entry.probe, self.context.config.decode.max_whole_bytes)
            # What a run with a lower limit read in part has no hash yet that its bytes could be held against.
            if is_ranged or entry.content != media_content(candidate.media, source_content(candidate.file_source)):
                candidate.content = entry.content
            _check_modality(candidate.media, entry.probe)
        elif num_bytes <= self.context.config.decode.max_inline_bytes or candidate.media.data is not None:
            data = self.sources.read(candidate.media, candidate.counter)
            content = media_content(candidate.media, sha256_content(data))
            check_content(candidate.media, candidate.content, content)
            candidate.content = content
            candidate.probe = self._probe_file(candidate, io.BytesIO(data))
            if candidate.is_carried:
                candidate.media = dataclasses.replace(candidate.media, data=data, uri=None)
        elif not self._is_trusted(candidate):
            with open_source(candidate.media, candidate.counter, self.policy, WHOLE_BLOCK_BYTES) as file:
                candidate.probe = self._probe_file(candidate, file)
                sha256 = self.digests.of(candidate.file_source, file)
            candidate.content = media_content(candidate.media, f"sha256:{sha256}")
        else:
            with open_source(candidate.media, candidate.counter, self.policy) as file:
                candidate.probe = self._probe_file(candidate, file)
            if is_read_by_range(candidate.probe, self.context.config.decode.max_whole_bytes):
                candidate.content = media_content(candidate.media, source_content(candidate.file_source))

    def _probe_file(self, candidate: _Candidate, file: Any) -> Probe:
        assert candidate.facts is not None
        probe = (self.context.probers or InProcess()).probe(
            file,
            num_bytes=candidate.facts.num_bytes,
            declared=candidate.media.modality,
            name=candidate.media.name,
            page=candidate.media.page,
            dpi=self.context.config.document.dpi,
        )
        return probe_part(candidate.media, probe)

    def _admitted(self, candidates: list[_Candidate]) -> list[PlannedMedia]:
        planned: list[PlannedMedia] = []
        out: set[int] = set()
        for candidate in candidates:
            try:
                if candidate.failure is not None:
                    raise candidate.failure
                planned.append(self._admit(candidate, len(planned)))
            except ItemError as error:
                out.add(candidate.request.item_index)
                self.failures.append(failure_row(candidate.request.item_index, candidate.media_index, error))
        # An item with one bad media item is out: nothing else of it is worth decoding.
        kept = [media for media in planned if media.item_index not in out]
        return [dataclasses.replace(media, position=position) for position, media in enumerate(kept)]

    def _admit(self, candidate: _Candidate, position: int) -> PlannedMedia:
        probe, facts = candidate.probe, candidate.facts
        assert probe is not None and facts is not None
        verdict = self.context.checked.verdicts.get(probe.modality, "the model's processor does not take them")
        if verdict:
            kind = "sounds" if probe.modality == "audio" else f"{probe.modality}s"
            message = f"{self.context.config.model} cannot be used with {kind}: {verdict}"
            raise ItemError("admit", "modality_not_supported", message)
        requested = part_plan(candidate.media, self._sample(probe))
        geometry = self.context.geometry(probe, requested)
        seconds = decode_seconds(probe, requested, at_keyframes=self.context.identity.at_keyframes)
        admit(
            ResourceVector(
                num_bytes=facts.num_bytes,
                pixels_per_frame=probe.width * probe.height,
                num_frames=len(requested),
                duration_seconds=probe.duration_seconds,
                feature_tokens=geometry.feature_length,
                num_samples=probe.num_samples,
                decode_seconds=seconds,
            ),
            self.limits,
        )
        return PlannedMedia(
            position=position,
            item_index=candidate.request.item_index,
            media_index=candidate.media_index,
            tenant=candidate.request.tenant,
            media=candidate.media,
            source_id=facts.source_id,
            content=candidate.content,
            probe=probe,
            requested=requested,
            geometry=geometry,
            decode_seconds=seconds,
        )

    def _sample(self, probe: Probe) -> SamplePlan:
        sampling = self.context.config.sampling
        if probe.modality != "video":
            return sample_plan(probe, sampling)
        plan = self.context.facts.sample(probe) if sampling.policy == "model" else sample_plan(probe, sampling)
        # A tower with a temporal patch of two frames cannot take one: the last frame is shown again.
        missing = self.context.min_frames - len(plan)
        return SamplePlan(pts_seconds=plan.pts_seconds + plan.pts_seconds[-1:] * max(0, missing))

    def _hits(self, media: list[PlannedMedia]) -> dict[int, tuple[str, str]]:
        if not self.context.config.store.reuse:
            return {}
        store = self.context.store
        terms = {m.position: self.context.identity.key_terms(m, m.content) for m in media if m.content is not None}
        keys = {position: each.digest() for position, each in terms.items()}
        wanted: dict[str, set[str]] = {m.tenant: set() for m in media}
        for m in media:
            if m.position in keys:
                wanted[m.tenant].add(keys[m.position])
        found = store.find_of_tenants(wanted, anew=True)
        if self.dry:
            return {position: (key, found[key]) for position, key in keys.items() if key in found}
        claims = [position for position, key in keys.items() if key in found]
        # A hit is a claim: it is read and compared now, so that the generate pass can rely on it.
        started = time.perf_counter()
        records = store.fetch(
            [(found[keys[position]], keys[position]) for position in claims],
            [terms[position].as_dict() for position in claims],
        )
        took = sum(record.made_seconds for record in records if record is not None)
        self.saved_ms = round(1e3 * (took + started - time.perf_counter()))
        lost = [found[keys[position]] for position, record in zip(claims, records, strict=True) if record is None]
        conditions = {shard: store.condition(shard) for shard in set(lost)}
        self.fallbacks = Counter(f"{shard} ({conditions[shard]})" for shard in lost)
        return {
            position: (keys[position], found[keys[position]])
            for position, record in zip(claims, records, strict=True)
            if record is not None
        }

    def _is_news(self, media: PlannedMedia) -> bool:
        entry = self.known.get((media.tenant, media.source_id))
        return entry is None or entry.content != media.content

    def _same_as(self, media: list[PlannedMedia], hits: dict[int, tuple[str, str]]) -> dict[int, int]:
        """Items that another of the window stands for: the same bytes, sampled and sized alike, for one tenant."""
        if not self.context.config.store.reuse:
            return {}
        first: dict[tuple[Any, ...], int] = {}
        same: dict[int, int] = {}
        for m in media:
            if m.position in hits:
                continue
            identity = (m.tenant, m.content or m.source_id, m.requested, m.geometry.resized_size, m.probe.modality)
            other = first.setdefault(identity, m.position)
            if other != m.position:
                same[m.position] = other
        return same

    def _batches(self, media: list[PlannedMedia]) -> list[PlannedBatch]:
        return plan_window(self.window.index, [m.shaped for m in media], self.context.batch_budget)


def _check_modality(media: MediaItem, probe: Probe) -> None:
    declared: Modality | None = media.modality
    if declared is not None and declared != probe.modality:
        raise ItemError("probe", "modality_mismatch", f"{media.name} is a {probe.modality}, not a {declared}")
