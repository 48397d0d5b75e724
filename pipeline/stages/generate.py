"""Prompt batches and stored features → answers, an outcome file and a receipt."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import pyarrow as pa

from pipeline.models.language_model import GeneratedText, GenerationOptions, LanguageModel, PromptedItem
from pipeline.schema import ItemFailure, Receipt
from pipeline.stages.computing import Room, compute_alone, in_halves, tell_memory, tell_stages, tell_taken
from pipeline.stages.context import StageContext
from pipeline.stages.outcomes import GENERATE_OUTCOME, count_codes, write_outcome
from pipeline.stages.rows import receipt_table
from pipeline.stages.spending import CpuClock, batch_spent, on_accelerator

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """A batch's items by index, rows of those that failed already, and how long reading took from when on (seconds
    since the epoch)."""

    ready: dict[int, PromptedItem]
    failed: list[dict[str, Any]]
    seconds: float
    started_at: float


class PromptBatches(ABC):
    """What stages have in common that take prompt batches: features read for a batch, its results put away."""

    def __init__(self, context: StageContext, device: str) -> None:
        compute_alone(device)
        self.context = context
        self.device = device
        self.clock = CpuClock()
        self.room = Room()
        self.media_token_ids = set(context.facts.media_token_ids)
        # Only what waits for the network runs beside the model: a thread that computes takes the interpreter from it.
        # Measured on local disk: records read and answers put away in threads 1.16 times a bare loop, in turn 1.00.
        self.bringer = None if context.store.is_local else ThreadPoolExecutor(1, thread_name_prefix="shards")
        self.writer = None if context.folder.is_local else ThreadPoolExecutor(1, thread_name_prefix="outcomes")

    def __call__(self, batches: pa.Table) -> Iterator[pa.Table]:
        """One table of one receipt for each row, in order.

        While a batch is worked on, the shards of those after it come from a remote store, and the results of
        the one before it go to a remote output.
        """
        rows = batches.to_pylist()
        self.clock.take()
        if self.bringer is not None:
            shards = {media["shard"]: None for row in rows for item in row["items"] for media in item["media"]}
            self.bringer.submit(self.context.store.bring, list(shards))
        writing: Future[Receipt] | None = None
        for batch in rows:
            tell_taken(self.context, "generate", batch["prompted_at"])
            with self.context.logging(window=batch["window"], batch=batch["batch"]):
                put_away = self._done(batch, self._fetch(batch))
            if self.writer is None:
                yield receipt_table(put_away())
                continue
            if writing is not None:
                yield receipt_table(writing.result())
            writing = self.writer.submit(put_away)
        if writing is not None:
            yield receipt_table(writing.result())

    @abstractmethod
    def _done(self, batch: dict[str, Any], fetched: Fetched) -> Callable[[], Receipt]:
        """The batch's work, done; what is returned puts it away."""

    def _fetch(self, batch: dict[str, Any]) -> Fetched:
        """Items with their records, and rows of those whose placeholders and features do not match."""
        started_at, started = time.time(), time.perf_counter()
        ready: dict[int, PromptedItem] = {}
        failed: list[dict[str, Any]] = []
        locations = [(media["shard"], media["key"]) for item in batch["items"] for media in item["media"]]
        records = iter(self.context.store.fetch(locations))
        for item in batch["items"]:
            media = tuple(record for record in itertools.islice(records, len(item["media"])) if record is not None)
            if len(media) != len(item["media"]):
                shards = sorted({each["shard"] for each in item["media"]})
                conditions = {shard: self.context.store.condition(shard) for shard in shards}
                raise RuntimeError(
                    f"item_index {item['item_index']}: its features left the store under a running job: {conditions}"
                )
            prompted = PromptedItem(input_ids=item["input_ids"], media=media, seed=item["seed"])
            failure = self._mismatch(prompted)
            if failure is None:
                ready[item["item_index"]] = prompted
            else:
                failed.append({"item_index": item["item_index"], **dataclasses.asdict(failure)})
        seconds = time.perf_counter() - started
        return Fetched(ready=ready, failed=failed, seconds=seconds, started_at=started_at)

    def _spent(
        self, fetched: Fetched, rows: list[dict[str, Any]], seconds: dict[str, float]
    ) -> tuple[list[dict[str, Any]], dict[str, float], dict[str, float]]:
        """`rows` with what was spent on each, by tokens; the receipt's `cpu_seconds` and `accelerator_seconds`.

        To be asked once the work is done.
        """
        cpu = self.clock.take()
        used = on_accelerator(self.device, *(seconds.get(name, 0.0) for name in ("llm_prefill", "llm_decode")))
        tokens = [(row.get("generated_tokens") or 0) + self._prompt_tokens(fetched, row) for row in rows]
        spent = batch_spent(fetched.started_at, cpu, used, tokens)
        told = [{**row, **own} for row, own in zip(rows, spent, strict=True)]
        return told, {"generate": cpu}, {"generate": used} if used else {}

    def _prompt_tokens(self, fetched: Fetched, row: dict[str, Any]) -> int:
        item = fetched.ready.get(row["item_index"])
        return 0 if item is None else len(item.input_ids)

    def _tell(self, fetched: Fetched, seconds: dict[str, float]) -> None:
        """The meter; prompts of one batch may have media of several kinds."""
        kinds: set[str] = {record.slot for item in fetched.ready.values() for record in item.media}
        tell_stages(self.context, seconds, "mixed" if len(kinds) > 1 else kinds.pop() if kinds else "text")
        tell_memory(self.context, "generate")

    def _in_room(
        self,
        work: Callable[[Sequence[PromptedItem]], Sequence[Result]],
        items: Sequence[PromptedItem],
        counts: dict[str, int],
    ) -> list[Result]:
        """`work` of a batch's items, in parts where there was no room for one as large; counts `oom_splits`."""
        if not items:
            return []

        def tokens(part: Sequence[PromptedItem]) -> int:
            return max(len(item.input_ids) for item in part) + self.context.answer_tokens

        def tried(part: Sequence[PromptedItem]) -> Sequence[Result]:
            with self.room.trying(len(part) * tokens(part)):
                return work(part)

        runs = self.room.runs([tokens(items)] * len(items))
        counts["oom_splits"] = counts.get("oom_splits", 0) + len(runs) - 1
        return [result for run in runs for result in in_halves(tried, items[run], counts)]

    def _mismatch(self, item: PromptedItem) -> ItemFailure | None:
        """Found before the forward pass, a wrong length is one item's fault and not its batch's."""
        held = sum(math.prod(record.tensors["pooler_output"].shape[:-1]) for record in item.media)
        shown = sum(item.input_ids.count(token_id) for token_id in self.media_token_ids)
        if shown == held:
            return None
        message = f"{shown} placeholders, {held} rows of features"
        return ItemFailure(stage="generate", code="feature_length_mismatch", message=message)


class GenerateBatches(PromptBatches):
    """Stage, one an accelerator: batches (`PROMPT_SCHEMA`) → rows of `RECEIPT_SCHEMA`."""

    def __init__(self, context: StageContext, device: str) -> None:
        super().__init__(context, device)
        section = context.config.generate
        self.options = GenerationOptions(
            max_new_tokens=section.max_new_tokens,
            temperature=section.temperature,
            top_p=section.top_p,
            stop=section.stop,
        )
        self.model = LanguageModel(context.facts, dtype=section.dtype, device=device, attention=section.attention)

    def _done(self, batch: dict[str, Any], fetched: Fetched) -> Callable[[], Receipt]:
        queued = time.time() - batch["prompted_at"]
        seconds = {"feature_transfer": fetched.seconds}
        ready = fetched.ready
        spent: dict[str, int] = {}
        answers = self._answers(ready, seconds, spent)
        self._tell(fetched, seconds)
        counts = {**_counts(ready, answers), **spent}
        times = _times(seconds, queued, len(ready), counts["generated_tokens"])
        answered = [_row(index, item, text, times) for (index, item), text in zip(ready.items(), answers, strict=True)]
        rows, cpu, used = self._spent(fetched, [*fetched.failed, *answered], seconds)
        receipt = Receipt(
            stage="generate",
            window=batch["window"],
            batch=batch["batch"],
            digest=batch["digest"],
            counts=counts,
            seconds=seconds,
            quarantine=count_codes(row.get("code") for row in rows),
            cpu_seconds=cpu,
            accelerator_seconds=used,
        )

        def put_away() -> Receipt:
            write_outcome(self.context.folder, receipt, rows, GENERATE_OUTCOME)
            return receipt

        return put_away

    def _answers(
        self, ready: dict[int, PromptedItem], seconds: dict[str, float], counts: dict[str, int]
    ) -> list[GeneratedText]:
        work = functools.partial(self.model.generate, options=self.options, seconds=seconds, counts=counts)
        return self._in_room(work, list(ready.values()), counts)


def _counts(ready: dict[int, PromptedItem], answers: list[GeneratedText]) -> dict[str, int]:
    lengths = [len(item.input_ids) for item in ready.values()]
    return {
        "answers": len(answers),
        "prompt_tokens": sum(lengths),
        "prompt_padded_tokens": sum(max(lengths) - length for length in lengths) if lengths else 0,
        "generated_tokens": sum(len(answer.token_ids) for answer in answers),
    }


def _times(seconds: dict[str, float], queued: float, num_items: int, num_tokens: int) -> dict[str, float]:
    steps = num_tokens / num_items - 1 if num_items else 0
    return {
        "llm_queue_ms": 1e3 * queued,
        "feature_transfer_ms": 1e3 * seconds["feature_transfer"],
        "llm_prefill_ms": 1e3 * seconds.get("llm_prefill", 0.0),
        "tpot_ms": 1e3 * seconds.get("llm_decode", 0.0) / steps if steps > 0 else 0.0,
    }


def _row(index: int, item: PromptedItem, answer: GeneratedText, times: dict[str, float]) -> dict[str, Any]:
    return {
        "item_index": index,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "prompt_tokens": len(item.input_ids),
        "generated_tokens": len(answer.token_ids),
        **times,
    }
