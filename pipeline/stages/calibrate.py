"""How fast this machine does each stage: a job's own stages, one after another, on some of its items."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import pkgutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.config import Config, Encode, Generate, Text
from pipeline.features.identity import canonical_json
from pipeline.features.store import FeatureStore
from pipeline.language.batching import TEXT_BATCH_TOKENS
from pipeline.planning.calibration import Calibration, work_seconds
from pipeline.planning.windows import Window
from pipeline.runs.receipts import Totals, receipt_from_json, sum_receipts
from pipeline.runs.run import stage_listing
from pipeline.runs.summary import FORECAST_STAGES, describe_environment
from pipeline.schema import Receipt
from pipeline.stages.context import StageContext
from pipeline.stages.decode import DecodeBatches
from pipeline.stages.dry_run import check_unwritten
from pipeline.stages.encode_finish import finish_encode_window
from pipeline.stages.encode_plan import PlanEncodeWindow
from pipeline.stages.forecast import forecast_work
from pipeline.stages.outcomes import read_finished
from pipeline.stages.pool_plan import PlanTextWindow
from pipeline.stages.prompt import PlanPromptWindow
from pipeline.stages.rank_plan import PlanPairsWindow
from pipeline.stages.rows import receipts_apart
from pipeline.stages.score_plan import PlanScoresWindow

_FIRST_ITEMS = 16
_ROUND_SECONDS = 12.0  # a round that takes as long is the last; each has twice the items of the one before
_READ: dict[str, Any] = {
    "encode": {"dtype", "attention", "max_batch_items", "max_batch_tokens"},
    "generate": True,
    "text": True,
}


def calibration_name(config: Config, device: str) -> str:
    """Where the store keeps what was measured of the job's models under these settings on such a device."""
    settings = config.model_dump(mode="json", include=_READ)
    terms = [config.job, config.model, config.text_model, settings, device, importlib.metadata.version("torch")]
    return f"calibrations/{hashlib.sha256(canonical_json(terms)).hexdigest()[:20]}.json"


def read_calibration(config: Config, device: str) -> Calibration | None:
    """What the store has of it; None without."""
    folder, name = FeatureStore(config.store.path, config.store.local_path).folder, calibration_name(config, device)
    return Calibration.from_json(folder.read_json(name)) if folder.exists(name) else None


def write_calibration(config: Config, rates: Calibration) -> str:
    """Have `read_calibration` find it; where it is."""
    folder = FeatureStore(config.store.path, config.store.local_path).folder
    name = calibration_name(config, rates.device)
    folder.write_json(name, rates.to_json(), indent=2)
    return f"{folder.url}/{name}"


def foretold(config: Config, device: str, counts: Mapping[str, int]) -> dict[str, float] | None:
    """Stage → seconds, summed over workers, of what a run's plans came to; None where nothing was measured for it."""
    rates = read_calibration(config, device)
    return None if rates is None else work_seconds(forecast_work(counts), rates)


def calibrate(config: Config, device: str, *, told: Callable[[str], None]) -> Calibration:
    """Run the job's stages on more and more of its items until a round takes 12 s, and measure that one.

    The store that is written to is beside the job's, on the same disk or bucket, and removed at the end. `told` what is
    being done. Raises what a run would raise before its first window.
    """
    config = config.anchored()
    checked = check_unwritten(config, device)
    store = FeatureStore(config.store.path, config.store.local_path).folder
    scratch = f"calibrating-{uuid.uuid4().hex[:12]}"
    own = config.store.model_copy(update={"path": f"{store.url}/{scratch}", "reuse": False, "retention": "keep"})
    config = config.model_copy(update={"store": own})
    try:
        with stage_listing(config) as staged:
            context = StageContext(config=config, run_url=staged.directory, checked=checked, device=device)
            rounds = _Rounds(context, device)
            num_items, number, seconds = _FIRST_ITEMS, 0, 0.0
            while True:
                window = _middle(number, staged.num_items, num_items)
                told(f"{window.stop - window.start} items")
                started = time.perf_counter()
                totals = rounds.run(window)
                seconds = time.perf_counter() - started
                # The first round loads and warms up.
                if number and (seconds >= _ROUND_SECONDS or num_items >= staged.num_items):
                    break
                number, num_items = number + 1, num_items if not number else 2 * num_items
            measured = _measured(context, device, window, totals)
            rounds.close()
        return measured
    finally:
        store.remove(scratch)


def _middle(number: int, listed: int, num_items: int) -> Window:
    taken = min(listed, num_items)
    start = (listed - taken) // 2
    return Window(index=number, start=start, stop=start + taken)


class _Rounds:
    """The stages of a job, made when they are first needed."""

    def __init__(self, context: StageContext, device: str) -> None:
        self.context = context
        self.device = device
        self._made: dict[str, Any] = {}

    def run(self, window: Window) -> Totals:
        """All passes over the window, one stage after another; the sums of its receipts."""
        context = self.context
        row = pa.table({"index": [window.index], "start": [window.start], "stop": [window.stop]})
        receipts: list[Receipt] = []
        if context.checked.verdicts:
            for planned in PlanEncodeWindow(context)(row):
                for decoded in DecodeBatches(context)(planned):
                    receipts += self._through("encode:EncodeBatches", self._device(context.config.encode), decoded)
            finish_encode_window(context, window)
        answering = self._answering()
        if answering is not None:
            plan, stage, section = answering
            for planned in plan(row):
                receipts += self._through(stage, self._device(section), planned)
        return sum_receipts(receipts)

    def _answering(self) -> tuple[Callable[[pa.Table], Iterator[pa.Table]], str, Generate | Text] | None:
        context, config, job = self.context, self.context.config, self.context.config.job
        if job == "score_media":
            return None
        if job == "caption_videos" or context.embeds_prompts:
            stage = "embed_prompts:EmbedPrompts" if context.embeds_prompts else "generate:GenerateBatches"
            return PlanPromptWindow(context), stage, config.generate
        tokens = config.text.max_batch_tokens or TEXT_BATCH_TOKENS[self._device(config.text)]
        if job == "rerank":
            return PlanPairsWindow(context, tokens), "score_pairs:ScorePairs", config.text
        if job == "score_texts":
            return PlanScoresWindow(context, tokens), "score_texts:ScoreTexts", config.text
        return PlanTextWindow(context, tokens), "embed_texts:EmbedTexts", config.text

    def _device(self, section: Encode | Generate | Text) -> str:
        return self.device if section.device == "auto" else section.device

    def _through(self, name: str, device: str, blocks: pa.Table) -> Iterator[Receipt]:
        known, batches = receipts_apart(blocks)
        tables = [known]
        if batches.num_rows:
            if name not in self._made:
                self._made[name] = pkgutil.resolve_name(f"pipeline.stages.{name}")(self.context, device)
            tables += self._made[name](batches)
        for table in tables:
            yield from map(receipt_from_json, table["receipt"].to_pylist())

    def close(self) -> None:
        """Let go of the store."""
        encoder = self._made.get("encode:EncodeBatches")
        if encoder is not None:
            encoder.writer.close()
        self.context.store.close()


def _measured(context: StageContext, device: str, window: Window, totals: Totals) -> Calibration:
    # Not at the top: it imports torch, which the driver of a run, that looks for a calibration, does without.
    from pipeline.stages.computing import accelerator_names

    work, counts = forecast_work(totals.counts), totals.counts
    accelerators = accelerator_names() if device != "cpu" else []
    cpu = describe_environment([])["cpu_model"]

    def seconds(stage: str) -> float:
        return sum(totals.seconds.get(name, 0.0) for name in FORECAST_STAGES[stage])

    steps = _longest_answers(context, window)
    answers = counts.get("answers", 0)
    return Calibration(
        device=device,
        accelerator=accelerators[0] if accelerators else f"a core of {cpu}",
        cpu=cpu,
        cpu_count=os.cpu_count() or 1,
        accelerators=len(accelerators),
        sampled_items=window.stop - window.start,
        decode_ratio=_ratio(seconds("media_decode"), work.decode_core_ms / 1e3),
        encoder_flops_per_second=_ratio(work.encoder_flops, seconds("vision_encode")),
        prefill_flops_per_second=_ratio(work.prefill_flops, seconds("llm_prefill")),
        step_seconds=_ratio(seconds("llm_decode"), sum(steps)),
        batch_steps=_ratio(sum(steps), len(steps)),
        answer_tokens=_ratio(counts.get("generated_tokens", 0), answers),
        text_flops_per_second=_ratio(work.text_flops, seconds("text")),
        store_write_bytes_per_second=_ratio(counts.get("store_bytes", 0), seconds("commit")),
        store_read_bytes_per_second=_ratio(work.feature_bytes_read, seconds("feature_transfer")),
    )


def _longest_answers(context: StageContext, window: Window) -> list[int]:
    """Of each batch of answers, the tokens of its longest."""
    if context.config.job != "caption_videos":
        return []
    tables = read_finished(context.folder, "generate", window.index)
    longest = [pc.max(table["generated_tokens"]).as_py() for table in tables]
    return [tokens for tokens in longest if tokens]


def _ratio(amount: float, by: float) -> float | None:
    return amount / by if amount > 0 and by > 0 else None
