"""The line. Every stage of a run, in order; start reading here.

manifest → probe → admit → plan → decode → encode → persist       encode pass: media → features
requests → prompt → plan → fetch features → generate → restore → write   generate pass: features → text
requests → tokenize → plan → embed or score → restore → write            pool pass: → vectors, scores
features → restore → write                                               pool pass of a classifier: logits → scores
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline import engine
from pipeline.config import Config
from pipeline.demo.drawn import draw_demo
from pipeline.errors import ConfigError, QuarantineLimitError
from pipeline.language.batching import TEXT_BATCH_TOKENS
from pipeline.logs import log_ids
from pipeline.planning.windows import Window, plan_windows, segments
from pipeline.progress import PassBar
from pipeline.ray_meter import RayMeter
from pipeline.runs.base import goes_on, vanished
from pipeline.runs.durability import DurableWindows
from pipeline.runs.ledger import Ledger
from pipeline.runs.manifest import read_frozen
from pipeline.runs.metrics import RunMetrics
from pipeline.runs.own_shards import noted_shards
from pipeline.runs.receipts import PassName, ReceiptBook, Totals
from pipeline.runs.run import Run, note_ended, start_run
from pipeline.runs.run_log import log_ended, log_lost, log_published, log_receipt, log_resumed, log_started
from pipeline.runs.summary import build_summary, describe_environment, write_summary
from pipeline.schema import Receipt
from pipeline.scratch import ACTORS_END_SECONDS, release, segments_that_fit, tier_sizes, with_small_shards
from pipeline.sinks.delivery import deliver, forget
from pipeline.sinks.parquet import part_name
from pipeline.stages import memory
from pipeline.stages.calibrations import foretold
from pipeline.stages.carried import carried_items
from pipeline.stages.context import StageContext
from pipeline.stages.decode import DecodeBatches
from pipeline.stages.encode_finish import finish_encode_window, forget_encode_window
from pipeline.stages.encode_plan import PlanEncodeWindow
from pipeline.stages.generate_finish import finish_generate_window
from pipeline.stages.identity import CheckedModel
from pipeline.stages.known_check import known_check
from pipeline.stages.opened_store import open_store
from pipeline.stages.outcomes import encode_batch_receipts, remove_outcome
from pipeline.stages.planned import ready_receipt
from pipeline.stages.pool_finish import finish_pool_window
from pipeline.stages.pool_plan import PlanTextWindow
from pipeline.stages.prompt import PlanPromptWindow
from pipeline.stages.prompt_vectors_finish import finish_prompt_vectors_window
from pipeline.stages.rank_finish import finish_rank_window
from pipeline.stages.rank_plan import PlanPairsWindow
from pipeline.stages.score_finish import finish_score_window
from pipeline.stages.score_media_finish import finish_score_media_window
from pipeline.stages.score_plan import PlanScoresWindow
from pipeline.stages.window_plan import planned_windows
from pipeline.storage import Folder

# Of a batch of media, for how many actors are worth their start: a batch is full of patches long before it has as many
# items as it may have.
_LIKELY_ITEMS = 16


def encode_pass(context: StageContext, windows: Sequence[Window]) -> Iterator[Receipt]:
    """Media → features in the store."""
    config = context.config
    workers = engine.preflight(
        config.encode.device,
        config.ray.encode_workers,
        config.ray,
        decode_workers=config.ray.decode_workers,
        batches=_least_batches(windows, min(config.encode.max_batch_items, _LIKELY_ITEMS)),
        memory=engine.Memory(
            window_task=memory.plan_bytes(config),
            block_task=memory.decode_bytes(context),
            actor=memory.encode_bytes(context),
        ),
    )
    rows = engine.windows_dataset(windows)
    planned = engine.map_windows(rows, PlanEncodeWindow(context, workers.batches_per_block), workers)
    decoded = engine.map_blocks(planned, DecodeBatches(context), workers)
    encoded = engine.map_actors(decoded, "pipeline.stages.encode:EncodeBatches", {"context": context}, workers)
    return engine.receipts(encoded)


def generate_pass(context: StageContext, windows: Sequence[Window]) -> Iterator[Receipt]:
    """Features → answers."""
    return _prompt_pass(context, windows, "pipeline.stages.generate:GenerateBatches")


def _prompt_pass(context: StageContext, windows: Sequence[Window], stage: str) -> Iterator[Receipt]:
    config = context.config
    section = config.generate
    workers = engine.preflight(
        section.device,
        config.ray.generate_workers,
        config.ray,
        batches=_least_batches(windows, section.max_batch_items),
        batch_flops=2
        * context.checked.parameters["language"]
        * section.max_batch_items
        * max(1, context.answer_tokens),
        memory=engine.Memory(window_task=memory.prompt_bytes(), actor=memory.generate_bytes(context)),
    )
    rows = engine.windows_dataset(windows)
    prompted = engine.map_windows(rows, PlanPromptWindow(context), workers)
    return engine.receipts(engine.map_actors(prompted, stage, {"context": context}, workers))


def embed_pass(context: StageContext, windows: Sequence[Window]) -> Iterator[Receipt]:
    """Features → vectors, by what a language model holds at the end of a prompt."""
    return _prompt_pass(context, windows, "pipeline.stages.embed_prompts:EmbedPrompts")


def pool_pass(context: StageContext, windows: Sequence[Window]) -> Iterator[Receipt]:
    """Texts → vectors. Media have theirs in the store already."""
    return _text_pass(context, windows, PlanTextWindow, "pipeline.stages.embed_texts:EmbedTexts")


def rank_pass(context: StageContext, windows: Sequence[Window]) -> Iterator[Receipt]:
    """Queries and documents → scores."""
    return _text_pass(context, windows, PlanPairsWindow, "pipeline.stages.score_pairs:ScorePairs")


def score_pass(context: StageContext, windows: Sequence[Window]) -> Iterator[Receipt]:
    """Texts → labels and scores."""
    return _text_pass(context, windows, PlanScoresWindow, "pipeline.stages.score_texts:ScoreTexts")


def score_media_pass(context: StageContext, windows: Sequence[Window]) -> Iterator[Receipt]:
    """Logits → labels and scores: by the task that publishes a window, for it is no more than arithmetic."""
    return map(ready_receipt, windows)


def _text_pass(
    context: StageContext,
    windows: Sequence[Window],
    plan: type[PlanTextWindow | PlanPairsWindow | PlanScoresWindow],
    stage: str,
) -> Iterator[Receipt]:
    config = context.config
    section = config.text
    workers = engine.preflight(
        section.device,
        config.ray.pool_workers,
        config.ray,
        batches=_least_batches(windows, section.max_batch_items),
        batch_flops=2 * context.checked.parameters["text"] * (section.max_batch_tokens or TEXT_BATCH_TOKENS["cpu"]),
        memory=engine.Memory(window_task=memory.text_plan_bytes(config), actor=memory.pool_bytes(context)),
    )
    max_batch_tokens = section.max_batch_tokens or TEXT_BATCH_TOKENS[workers.device]
    rows = engine.windows_dataset(windows)
    planned = engine.map_windows(rows, plan(context, max_batch_tokens), workers)
    if config.job == "embed_backfill" and read_frozen(context.folder).num_texts == 0:
        return engine.receipts(planned)  # no model need be loaded to embed nothing
    return engine.receipts(engine.map_actors(planned, stage, {"context": context}, workers))


def _least_batches(windows: Sequence[Window], max_batch_items: int) -> int:
    """How many batches there are at the least: budgets of tokens or memory make more."""
    return sum(-(-(window.stop - window.start) // max_batch_items) for window in windows)


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A pass over a segment's windows, and the task that publishes a window when its receipts are in."""

    name: PassName
    receipts: Callable[[StageContext, Sequence[Window]], Iterator[Receipt]]
    finish: Callable[[StageContext, Window], dict[str, Any]]


ENCODE = Pass(name="encode", receipts=encode_pass, finish=finish_encode_window)
GENERATE = Pass(name="generate", receipts=generate_pass, finish=finish_generate_window)
EMBED = Pass(name="generate", receipts=embed_pass, finish=finish_prompt_vectors_window)
POOL = Pass(name="pool", receipts=pool_pass, finish=finish_pool_window)
RANK = Pass(name="pool", receipts=rank_pass, finish=finish_rank_window)
SCORE = Pass(name="pool", receipts=score_pass, finish=finish_score_window)
SCORE_MEDIA = Pass(name="pool", receipts=score_media_pass, finish=finish_score_media_window)
# The pass that writes an item's row, by job; the encode pass comes before it where there are media to encode.
ANSWERS: dict[str, Pass] = {
    "caption_videos": GENERATE,
    "embed_backfill": POOL,
    "index_documents": POOL,
    "rerank": RANK,
    "score_texts": SCORE,
    "score_media": SCORE_MEDIA,
}


def answering_pass(context: StageContext) -> Pass:
    """The one that writes an item's row, in the run's job and with its model."""
    return EMBED if context.embeds_prompts else ANSWERS[context.config.job]


def run(config: Config) -> dict[str, Any]:
    """A whole run: freeze the listing, encode and generate by segments, write parts, summary and report.

    Returns the summary. Resumes what an earlier start of the same run left. Raises `QuarantineLimitError` after the
    summary is written, when more than `max_quarantined_fraction` of the items were quarantined.
    """
    with _driver(config) as driver:
        summary = driver.answer()
    _check_quarantine(summary, config.max_quarantined_fraction)
    return summary


def encode(config: Config) -> tuple[StageContext, list[Window]]:
    """The encode pass of a run alone: freeze the listing, put every item's features in the store.

    Returns what tells where they are: `read_encoded` of each window. `run` of the same configuration goes on from here.
    Raises `ConfigError` when the store is scratch, for nothing would be left.
    """
    if config.store.retention == "segment":
        raise ConfigError(
            f"store.retention is {config.store.retention!r}: features that are encoded by themselves have to be kept; "
            "set store.retention: keep"
        )
    with _driver(config) as driver:
        return driver.encode(), driver.windows


@contextmanager
def _driver(config: Config) -> Iterator[_Driver]:
    """The run of `config`, held while the block runs, and Ray."""
    started = time.perf_counter()
    draw_demo(config)
    config = config.anchored()
    with (
        start_run(config) as current,
        log_ids(run_id=current.run_id),
        engine.ray_session(config.ray) as ray_seconds,
        engine.quiet_ray_data(),
    ):
        log_started(current.manifest.num_items, current.folder.url)
        yield _Driver(config, current, started, ray_seconds)


class _Driver:
    """Consumes receipts; nothing else of a run passes through the driver."""

    def __init__(self, config: Config, current: Run, started: float, ray_seconds: float) -> None:
        self.config = config
        self.run = current
        self.started = started
        self.store = open_store(config.store)
        self.ledger = Ledger(current.folder)
        self.book = ReceiptBook()
        self.items: dict[str, dict[str, int]] = {"counts": {}, "quarantine": {}}
        self.several_nodes = engine.num_nodes() > 1
        self.store_peak_bytes: int | None = None
        self.seconds = {"ray_startup": ray_seconds}
        self.evicted: dict[str, int] = {}
        self.meter = RayMeter(current.run_id)
        self.metrics = RunMetrics(self.meter, current.manifest.num_items)
        self.windows = plan_windows(
            current.manifest.num_items,
            first_items=config.ray.first_window_items,
            full_items=config.window_items,
        )

    def answer(self) -> dict[str, Any]:
        """Both passes, segment by segment; returns the summary."""
        context = self._context()
        self._evict()
        answering = answering_pass(context)
        self._prepare_sinks(context)
        answered = self._restore(answering.name)
        self._deliver_missing(context, answered)
        self._release(context)
        encoded = self._still_encoded(context, needless=answered)
        for segment in self._segments(context, [window for window in self.windows if window.index not in answered]):
            if context.checked.verdicts:
                self._pass(ENCODE, context, [window for window in segment if window.index not in encoded])
            self.store_peak_bytes = max(self.store_peak_bytes or 0, self.store.num_bytes())
            self._pass(answering, context, segment)
            self._release(context)
        return self._finish(context)

    def _prepare_sinks(self, context: StageContext) -> None:
        """Sinks that refuse these vectors, or cannot be reached, do so before any work."""
        if context.deliveries:
            engine.run_task("pipeline.sinks.delivery:prepare", context.deliveries)

    def _deliver_missing(self, context: StageContext, answered: Iterable[int]) -> None:
        """Windows that are done, to sinks that the configuration did not have then."""
        known = [set(self.ledger.windows(delivery.ledger_name)) for delivery in context.deliveries]
        delivering = self._background()
        for window in answered:
            if any(window not in windows for windows in known):
                delivering.submit(_deliver, context, window)
        for _ in delivering.ended(wait=True):
            self.run.lock.check()

    def _background(self) -> engine.Background:
        # Each of a crowd would start a process of its own: seconds of imports for milliseconds of work. And a folder of
        # Qdrant's is opened by one at a time.
        qdrant = self.config.sinks.qdrant
        alone = qdrant is not None and qdrant.path is not None
        return engine.Background(limit=1 if alone else 2 * engine.num_nodes())

    def _segments(self, context: StageContext, windows: list[Window]) -> Iterator[list[Window]]:
        """Runs of windows that are encoded, generated, written and released together."""
        if self.config.store.max_bytes is None or self.config.store.retention != "segment":
            return iter(segments(windows, self.config.ray.segment_windows))
        return segments_that_fit(context, windows, self.config.store.max_bytes, self._encode_workers().actors)

    def _release(self, context: StageContext) -> None:
        if self.config.store.retention == "segment":
            release(context, self.windows, answering_pass(context).name)

    def encode(self) -> StageContext:
        """The encode pass, and every shard sealed."""
        context = self._context()
        encoded = self._still_encoded(context, needless={})
        self._pass(ENCODE, context, [window for window in self.windows if window.index not in encoded])
        self._seal(context, self._written_shards())
        self.run.folder.remove("_work/encode")
        return context

    def _context(self) -> StageContext:
        """What the stages need to know; the model is checked where it will run."""
        workers = self._encode_workers()
        checked = known_check(self.config, workers.device)
        if checked is None:
            check = "pipeline.stages.checked_model:checked_model"
            checked = engine.run_task(check, self.config, workers.device, num_gpus=workers.actor_gpus)
        assert checked is not None
        in_place = self.config.store.retention == "segment" and not self.several_nodes and self.store.is_local
        config = self.config if in_place else with_small_shards(self.config, workers.actors)
        return StageContext(
            config=config,
            run_url=self.run.folder.url,
            checked=checked,
            device=workers.device,
            in_place=in_place,
            base_url=self._base_url(checked),
            meter=self.meter,
        )

    def _base_url(self, checked: CheckedModel) -> str | None:
        """The run whose rows stand for what is unchanged; None without one, or when its vectors are of another kind."""
        base = self.run.base
        if base is None or checked.vectors is None:
            return None
        engine.run_task("pipeline.runs.base:index_base", self.run.folder, base)
        return base.url if goes_on(self.run.folder, base, dataclasses.asdict(checked.vectors)) else None

    def _encode_workers(self) -> engine.Workers:
        return engine.preflight(
            self.config.encode.device,
            self.config.ray.encode_workers,
            self.config.ray,
            memory=engine.Memory(window_task=memory.plan_bytes(self.config)),
        )

    def _still_encoded(self, context: StageContext, *, needless: Mapping[int, Any]) -> dict[int, dict[str, Any]]:
        """What earlier starts encoded: of the windows that are not `needless`, those whose shards are still there."""
        self._seal_leftovers(context)
        self._forget_lost_windows(context, needless)
        self._forget_lost_batches()
        return self._restore("encode")

    def _forget_lost_windows(self, context: StageContext, needless: Mapping[int, Any]) -> None:
        """Windows that were encoded, whose features are needed, and whose shards have left the store since."""
        waiting = {w: e for w, e in self.ledger.finished("encode").items() if w not in needless}
        shards = {shard for entry in waiting.values() for shard in entry["items"]["shards"]}
        lost = self._lost(shards)
        for window, entry in waiting.items():
            if lost.intersection(entry["items"]["shards"]):
                self.ledger.forget("encode", window)
                forget_encode_window(context, window)

    def _forget_lost_batches(self) -> list[Receipt]:
        """Batches that were put away, of windows that were not finished, and whose shards went with their node."""
        folder, finished = self.run.folder, self.ledger.finished("encode")
        begun = [window for window in planned_windows(folder) if window not in finished]
        receipts = [receipt for window in begun for receipt, _ in encode_batch_receipts(folder, window).values()]
        lost = self._lost({shard for receipt in receipts for shard in receipt.shards})
        forgotten = [receipt for receipt in receipts if lost.intersection(receipt.shards)]
        for receipt in forgotten:
            remove_outcome(folder, receipt)
        return forgotten

    def _lost(self, shards: set[str]) -> set[str]:
        """Those that are neither sealed nor open on any node."""
        return (
            shards.difference(*engine.run_on_every_node(_held_shards, self.config, sorted(shards))) if shards else set()
        )

    def _restore(self, name: PassName) -> dict[int, dict[str, Any]]:
        entries = self.ledger.finished(name)
        log_resumed(name, entries)
        for window, entry in entries.items():
            self.book.restore(name, window, entry)
        self._count(entry["items"] for entry in entries.values())
        return entries

    def _pass(self, each: Pass, context: StageContext, windows: list[Window]) -> None:
        if not windows:
            return
        started = time.perf_counter()
        by_index = {window.index: window for window in windows}
        finishing = self._background()
        ready = DurableWindows(self.store.is_sealed)
        left = windows

        def publish(durable: list[int]) -> None:
            for window in durable:
                self.run.lock.check()
                totals = self.book.settle(each.name, window)
                finishing.submit(_publish, each, context, by_index[window], totals)

        with PassBar(each.name, shown=self.config.logs.format == "text") as bar:
            while left:
                nodes = engine.alive_nodes()
                for receipt in each.receipts(context, left):
                    if not self.book.add(receipt):
                        continue
                    bar.update(receipt)
                    self.metrics.add_receipt(receipt, each.name)
                    log_receipt(receipt, each.name)
                    if self.book.is_finished(each.name, receipt.window):
                        receipts = self.book.window_receipts(each.name, receipt.window)
                        written = {shard for one in receipts for shard in one.shards}
                        ready.add(receipt.window, written if self._on_several_nodes() else ())
                    publish(ready.take())
                    self._published(finishing.ended())
                lost = self._seal(context, ready.shards)
                publish(ready.take(look=True))
                is_lost = bool(lost) or not nodes <= engine.alive_nodes()
                left = self._to_redo(each, windows, ready, lost) if is_lost else []
            self._published(finishing.ended(wait=True))
        missing = sorted(set(by_index) - set(self.ledger.finished(each.name)))
        if missing:
            raise RuntimeError(f"the {each.name} pass ended without finishing windows {missing}")
        name = f"{each.name}_pass"
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def _to_redo(self, each: Pass, windows: list[Window], ready: DurableWindows, lost: set[str]) -> list[Window]:
        """Of a pass that came to its end without a node that was there at its start, the windows that are not finished.
        What they had in shards that are `lost` is taken back."""
        gone = {(receipt.window, receipt.batch) for receipt in self._forget_lost_batches()}
        withdrawn = self.book.withdraw(
            each.name, lambda one: bool(lost.intersection(one.shards)) or (one.window, one.batch) in gone
        )
        ready.drop(receipt.window for receipt in withdrawn)
        if withdrawn:
            log_lost(each.name, withdrawn)
        return [window for window in windows if not self.book.is_finished(each.name, window.index)]

    def _on_several_nodes(self) -> bool:
        """True from when there are, or have been, several: an autoscaling cluster may begin with one."""
        self.several_nodes = self.several_nodes or engine.num_nodes() > 1
        return self.several_nodes

    def _published(self, windows: Iterable[Mapping[str, Any]]) -> None:
        for items in windows:
            self._count([items])
            if "letters" in items:
                self.metrics.add_published(items["counts"], items["quarantine"])
                log_published(items["window"], items["counts"], items["letters"])

    def _count(self, published: Iterable[Mapping[str, Any]]) -> None:
        for items in published:
            for kind, sums in self.items.items():
                for name, count in items.get(kind, {}).items():
                    sums[name] = sums.get(name, 0) + count

    def _evict(self, *, ended: bool = False) -> None:
        """What is older than a kept store's records may be; at the end of a run also what there is no room for."""
        section = self.config.store
        if section.retention == "segment" or not (
            section.ttl or (ended and (section.max_bytes or section.frames_max_bytes))
        ):
            return
        engine.end_actors()
        found = engine.run_task("pipeline.scratch:evict_records", self.config, ended)
        for name, count in found.items():
            self.evicted[name] = self.evicted.get(name, 0) + count

    def _seal_leftovers(self, context: StageContext) -> None:
        """Shards whose writer has gone become sealed, and so known to later runs and to other machines."""
        spared = noted_shards(self.run.folder) if context.in_place else set()
        engine.run_on_every_node(_recover, self.config, spared)

    def _seal(self, context: StageContext, shards: set[str]) -> set[str]:
        """Wait until `shards` are sealed, whose actors end some time after their pass; returns those that are lost with
        their node."""
        deadline = time.monotonic() + ACTORS_END_SECONDS
        engine.end_actors()
        lost: set[str] = set()
        while shards := {shard for shard in shards - lost if not self.store.is_sealed(shard)}:
            if time.monotonic() > deadline:
                raise RuntimeError(f"shards still open {ACTORS_END_SECONDS} s after their pass: {sorted(shards)}")
            self._seal_leftovers(context)
            lost |= self._lost(shards) if self.several_nodes else set()
            time.sleep(0.2)
        return lost

    def _written_shards(self) -> set[str]:
        entries = self.ledger.finished("encode").values()
        return {shard for entry in entries for shard in entry["items"]["shards_written"]}

    def _finish(self, context: StageContext) -> dict[str, Any]:
        folder = self.run.folder
        self._seal_leftovers(context)
        if self.config.store.retention != "segment":
            waiting = {shard for shard in self._written_shards() if not self.store.is_sealed(shard)}
            self._seal(context, waiting - self._lost(waiting))  # some may have been written anew, or deleted, since
        self._evict(ended=True)
        points, num_vanished = {}, 0
        if self.run.base is not None:
            num_vanished = engine.run_task("pipeline.flow:_delete_vanished", context, self.run.base)
        for delivery in context.deliveries:
            points.update(engine.run_task("pipeline.sinks.delivery:finish", delivery))
        folder.remove("_work")
        summary = build_summary(
            run_id=self.run.run_id,
            config_digest=self.run.config_digest,
            status="done",
            items_in=self.run.manifest.num_items,
            counts={**self.book.counts, **self.items["counts"], **self.evicted},
            seconds={**self.book.seconds, **self.seconds, "total": time.perf_counter() - self.started},
            quarantine=self.items["quarantine"],
            environment={**describe_environment(engine.accelerators()), "threads_per_worker": 1},
            store_peak_bytes=self.store_peak_bytes,
            points=points,
            stage_seconds=foretold(self.config, self._encode_workers().device, self.book.counts),
            sample_fraction=self.config.sample_fraction,
            cpu_seconds=self.book.cpu_seconds,
            accelerator_seconds=self.book.accelerator_seconds,
            job=self.config.job,
            tier_sizes=tier_sizes(self.config),
        )
        if self.run.base is not None:
            summary["items_vanished"] = num_vanished
        engine.run_task("pipeline.runs.run_page:write_run_page", folder, summary)
        write_summary(folder, summary)
        log_ended(summary)
        note_ended(self.config, self.run.run_id)
        return summary


def _publish(each: Pass, context: StageContext, window: Window, totals: Totals) -> dict[str, Any]:
    """In a task: publish a finished window, then say so in the ledger. Returns what the ledger notes and, where rows
    were published, their `window` and its `letters`, which the driver logs."""
    with context.logging(window=window.index):
        items = each.finish(context, window)
        letters = items.pop("letters", None)
        if each.name != "encode":
            _deliver(context, window.index)
        entry = {**totals.to_entry(), "items": items, "finished_at": time.time()}
        Ledger(context.folder).record(each.name, window.index, entry)
    return items if letters is None else {**items, "window": window.index, "letters": letters}


def _deliver(context: StageContext, window: int) -> None:
    """The part of a window to every sink that has not acknowledged it yet."""
    ledger = Ledger(context.folder)
    waiting = [each for each in context.deliveries if not ledger.has(each.ledger_name, window)]
    if not waiting:
        return
    with context.folder.open(part_name(window)) as file:
        part = pq.read_table(file)
    carried = pa.array(carried_items(context, window) if context.base_url is not None else (), pa.int64())
    changed = part.filter(pc.invert(pc.is_in(part["item_index"], carried)))
    name = answering_pass(context).name
    for delivery in waiting:
        goes_on_from = context.base_url is not None and _is_delivered(context.base_url, name, delivery.ledger_name)
        deliver(delivery, changed if goes_on_from else part)
        ledger.record(delivery.ledger_name, window, {})


@functools.lru_cache(maxsize=16)
def _is_delivered(run_url: str, name: PassName, ledger_name: str) -> bool:
    """True when the sink has all of a run that has ended, whose rows were written by the pass `name`."""
    ledger = Ledger(Folder(run_url))
    return set(ledger.windows(name)) == set(ledger.windows(ledger_name))


def _delete_vanished(context: StageContext, base: Folder) -> int:
    """How many items of the base run the listing no longer has; deleted from the sinks where that is asked for."""
    gone = vanished(context.folder, base)
    if context.config.incremental.delete_vanished:
        for delivery in context.deliveries:
            forget(delivery, gone)
    return sum(map(len, gone.values()))


def _recover(config: Config, spared: set[str]) -> None:
    store = open_store(config.store)
    store.recover(spared)
    store.frames.recover()  # whether or not this run keeps any: what an earlier one left


def _held_shards(config: Config, shards: list[str]) -> list[str]:
    store = open_store(config.store)
    return [shard for shard in shards if store.holds(shard)]


def _check_quarantine(summary: Mapping[str, Any], allowed: float) -> None:
    quarantined, items = summary["items_quarantined"], summary["items_in"]
    if items and quarantined / items > allowed:
        raise QuarantineLimitError(
            f"{quarantined} of {items} items were quarantined, max_quarantined_fraction allows {allowed:.1%}; "
            f"by code: {summary['quarantine']}"
        )
