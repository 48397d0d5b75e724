"""What a run would do, told from listing and headers alone: nothing is decoded, and nothing is written anywhere."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.config import Config
from pipeline.language.batching import TEXT_BATCH_TOKENS, plan_text_batches
from pipeline.language.kv_cache import KvCache
from pipeline.planning.estimate import Work
from pipeline.planning.windows import Window, plan_windows
from pipeline.pooling.rank import plan_pairs
from pipeline.runs.base import choose_base, goes_on, index_base
from pipeline.runs.manifest import read_range
from pipeline.runs.run import output_folder, stage_listing
from pipeline.schema import Request
from pipeline.stages.context import StageContext
from pipeline.stages.encode_plan import dry_plan
from pipeline.stages.forecast import forecast_work, planned_prompt_work, planned_text_work
from pipeline.stages.identity import CheckedModel, request_source
from pipeline.stages.known_check import known_check
from pipeline.stages.rank_plan import PlanPairsWindow
from pipeline.stages.request_prompts import RequestPrompts
from pipeline.stages.score_plan import PlanScoresWindow
from pipeline.stages.texts import texts_of
from pipeline.stages.window_plan import WindowPlan
from pipeline.storage import Folder

_EXAMPLES = 3  # of a reason
_MOST_SHAPES = 4096  # told apart; what comes behind them is counted together, so that memory stays flat
_PAGES_READ = 64  # of a window, evenly spaced, whose text is read to know how long texts are


@dataclass(kw_only=True)
class Forecast:
    """Sums over the windows that were planned. `shapes`: (modality, frames, height, width) → items to be encoded.

    `failures`: code → items that would be quarantined, with a few of them in `examples`. Of prompts, `prompt_lengths`
    counts those of so many tokens, by the next power of two. `pages_read` of `pages` had their text read. The encoder's
    batches have `max_batch_tokens`.
    """

    num_items: int
    max_batch_tokens: int
    planned_items: int = 0
    windows: int = 0
    media: Counter[str] = field(default_factory=Counter)
    texts_without_media: int = 0
    hits: int = 0
    duplicates: int = 0
    carried: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    shapes: Counter[tuple[str, int, int, int]] = field(default_factory=Counter)
    other_shapes: int = 0
    prompt_lengths: Counter[int] = field(default_factory=Counter)
    longest_prompt: int = 0
    kv_cache: KvCache = field(default_factory=lambda: KvCache(0))
    pages: int = 0
    pages_read: int = 0
    work: Work = field(default_factory=Work)

    @property
    def scale(self) -> float:
        """What sums over the planned items are multiplied by to be those of all."""
        return self.num_items / self.planned_items if self.planned_items else 1.0

    def fail(self, rows: Iterable[Mapping[str, Any]], ids: Mapping[int, str]) -> set[int]:
        """Count failure rows, one an item; the items that are out."""
        out: set[int] = set()
        for row in rows:
            if row["item_index"] in out:
                continue
            out.add(row["item_index"])
            self.failures[row["code"]] += 1
            known = self.examples.setdefault(row["code"], [])
            if len(known) < _EXAMPLES:
                known.append(f"{ids[row['item_index']]}: {row['message']}")
        return out

    def count_shape(self, shape: tuple[str, int, int, int]) -> None:
        """An item that is to be encoded."""
        if shape in self.shapes or len(self.shapes) < _MOST_SHAPES:
            self.shapes[shape] += 1
        else:
            self.other_shapes += 1


def dry_run(config: Config, device: str, *, sample: int | None = None, told: Callable[[int], object]) -> Forecast:
    """Plan every window of `config`, or enough of them, evenly spaced, to have `sample` items; `told` their items.

    Reads the listing, the headers of media, and the catalogue of the store. Raises what a run would raise before its
    first window.
    """
    config = config.anchored()
    checked = check_unwritten(config, device)
    with stage_listing(config) as staged:
        run = Folder(staged.directory)
        context = StageContext(
            config=config,
            run_url=run.url,
            checked=checked,
            device=device,
            base_url=_base_url(config, checked, run),
        )
        windows = plan_windows(
            staged.num_items, first_items=config.ray.first_window_items, full_items=config.window_items
        )
        forecast = Forecast(num_items=staged.num_items, max_batch_tokens=context.batch_budget.max_tokens)
        planner = _DryPlanner(context, forecast, device)
        for window in _chosen(windows, sample):
            planner.plan(window)
            told(window.stop - window.start)
        context.store.close()
    return forecast


def check_unwritten(config: Config, device: str) -> CheckedModel:
    """What is known of the model, or what is found of it now: a run remembers that in the store, and nothing here."""
    known = known_check(config, device)
    if known is not None:
        return known
    # Not at the top: what is known needs no torch.
    from pipeline.stages.checked_model import checked_model

    with tempfile.TemporaryDirectory(prefix="headrace-check-") as folder:
        store = config.store.model_copy(update={"path": os.path.join(folder, "store")})
        return checked_model(config.model_copy(update={"store": store}), device)


def _base_url(config: Config, checked: CheckedModel, run: Folder) -> str | None:
    """As a run finds it; the listing's temporary folder stands for the run's."""
    if config.incremental.base is None or checked.vectors is None:
        return None
    output = output_folder(config)
    base_id = choose_base(run, output, config.incremental.base)
    if base_id is None:
        return None
    base = output.sub(base_id)
    run.write_json("_run/config.json", {"digest": config.digest()})
    index_base(run, base)
    return base.url if goes_on(run, base, dataclasses.asdict(checked.vectors)) else None


def _chosen(windows: Sequence[Window], sample: int | None) -> list[Window]:
    """Windows evenly spaced from the last, which are the full ones: as few as have `sample` items together."""
    total = windows[-1].stop
    if sample is None or sample >= total:
        return list(windows)
    number = 1
    while True:
        step = len(windows) / number
        chosen = [windows[len(windows) - 1 - int(k * step)] for k in range(number)]
        if sum(window.stop - window.start for window in chosen) >= sample:
            return sorted(chosen, key=lambda window: window.index)
        number += 1


class _DryPlanner:
    def __init__(self, context: StageContext, forecast: Forecast, device: str) -> None:
        self.context = context
        self.forecast = forecast
        self.text_tokens = context.config.text.max_batch_tokens or TEXT_BATCH_TOKENS[device]
        asks = context.config.job == "caption_videos" or context.embeds_prompts
        self.prompts = RequestPrompts(context) if asks else None
        if self.prompts is not None:
            forecast.kv_cache = context.facts.kv_cache(context.config.generate.dtype)

    def plan(self, window: Window) -> None:
        """Add a window to the forecast."""
        forecast, config = self.forecast, self.context.config
        requests = read_range(self.context.folder, window.start, window.stop)
        ids = {request.item_index: request.id for request in requests}
        forecast.windows += 1
        forecast.planned_items += len(requests)
        forecast.texts_without_media += sum(not request.media for request in requests)
        out: set[int] = set()
        plan = None
        if self.context.checked.verdicts:
            plan = dry_plan(self.context, window)
            out = forecast.fail(plan.failures, ids) | plan.carried.keys()
            self._count_media(plan)
        left = [request for request in requests if request.item_index not in out]
        if self.prompts is not None:
            self._ask(self.prompts, left, plan, ids)
        elif config.job == "rerank":
            self._rank(window, ids)
        elif config.job == "score_texts":
            self._score(window, ids)
        elif config.job != "score_media":
            self._embed(left, ids)

    def _count_media(self, plan: WindowPlan) -> None:
        forecast = self.forecast
        forecast.work += forecast_work(plan.receipt.counts)
        forecast.hits += len(plan.hits)
        forecast.duplicates += len(plan.same_as)
        forecast.carried += len(plan.carried)
        forecast.media.update(media.probe.modality for media in plan.media)
        for _, positions in plan.batches:
            for position in positions:
                forecast.count_shape(plan.media[position].shaped.shape)

    def _ask(
        self, prompts: RequestPrompts, requests: list[Request], plan: WindowPlan | None, ids: Mapping[int, str]
    ) -> None:
        forecast = self.forecast
        media = [] if plan is None else plan.media
        own = {r.item_index: (r.tenant, r.id, request_source(r, ())) for r in requests if not r.media}
        carried = self.context.unchanged(own)
        forecast.carried += len(carried)
        lengths, failures = prompts.planned_lengths([r for r in requests if r.item_index not in carried], media)
        forecast.fail(failures, ids)
        forecast.work += planned_prompt_work(self.context, list(lengths.values()), media)
        forecast.prompt_lengths.update(1 << (length - 1).bit_length() for length in lengths.values())
        forecast.longest_prompt = max([forecast.longest_prompt, *lengths.values()])

    def _embed(self, requests: list[Request], ids: Mapping[int, str]) -> None:
        documents = self.context.config.job == "index_documents"
        read = _evenly(requests, _PAGES_READ) if documents else requests
        found = texts_of(self.context, read)
        self.forecast.fail(found.failures, ids)
        self.forecast.carried += len(found.carried)
        if documents:
            self.forecast.pages += len(requests)
            self.forecast.pages_read += len(read)
        lengths = [len(piece.input_ids) for item in found.items.values() for piece in item.pieces]
        work = self._text_work(lengths)
        self.forecast.work += work.scaled(len(requests) / len(read)) if documents and read else work

    def _score(self, window: Window, ids: Mapping[int, str]) -> None:
        tokenized, failures = PlanScoresWindow(self.context, self.text_tokens).texts(window)
        self.forecast.fail(failures, ids)
        self.forecast.work += self._text_work([len(text.input_ids) for text in tokenized.values()])

    def _text_work(self, lengths: list[int]) -> Work:
        batches = plan_text_batches(
            lengths,
            max_batch_tokens=self.text_tokens,
            max_batch_items=self.context.config.text.max_batch_items,
        )
        return planned_text_work(self.context, [[lengths[position] for position in batch] for batch in batches])

    def _rank(self, window: Window, ids: Mapping[int, str]) -> None:
        _, tokenized, failures = PlanPairsWindow(self.context, self.text_tokens).pairs(window)
        self.forecast.fail(failures, ids)
        lengths = [[len(text.input_ids) for text in texts] for texts in tokenized]
        batches = plan_pairs(
            lengths,
            max_batch_tokens=self.text_tokens,
            max_batch_items=self.context.config.text.max_batch_items,
        )
        in_batches = [[lengths[pair.request][pair.document] for pair in batch] for batch in batches]
        self.forecast.work += planned_text_work(self.context, in_batches)


def _evenly(requests: list[Request], number: int) -> list[Request]:
    """At most so many, from first to last."""
    if len(requests) <= number:
        return requests
    return [requests[k * len(requests) // number] for k in range(number)]
