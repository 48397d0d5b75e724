"""Turn one window's requests into token ids and batches of them, and write the plan down."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from pipeline.errors import ItemError
from pipeline.language.batching import plan_language_batches
from pipeline.language.prompt import item_seed
from pipeline.planning.estimate import Work
from pipeline.planning.windows import Window
from pipeline.runs.base import Place
from pipeline.runs.manifest import read_range
from pipeline.runs.receipts import receipt_to_json
from pipeline.schema import Request
from pipeline.stages.context import StageContext
from pipeline.stages.encode_finish import read_encoded
from pipeline.stages.forecast import forecast_counts, planned_prompt_work
from pipeline.stages.identity import request_source
from pipeline.stages.outcomes import failure_row, generate_batch_receipts
from pipeline.stages.planned import batch_digest, batches_schema, plan_receipt, rows_to_do
from pipeline.stages.request_prompts import RequestPrompts
from pipeline.stages.spending import Spending
from pipeline.stages.window_plan import WindowPlan, load_plan

PROMPT_SCHEMA = batches_schema(
    [
        ("item_index", pa.int64()),
        ("input_ids", pa.list_(pa.int32())),
        ("seed", pa.int64()),
        ("media", pa.list_(pa.struct([("key", pa.string()), ("shard", pa.string())]))),
    ],
    ("prompted_at", pa.float64()),  # seconds since the epoch
)


def prompt_plan_name(window: int) -> str:
    """The written plan of a window's generate pass."""
    return f"_run/plans/generate-{window:06d}.json"


@dataclass(frozen=True)
class PlanPromptWindow:
    """Stage: window rows (`index, start, stop`) → prompt batches still to be done, and receipts of finished ones."""

    context: StageContext

    def __call__(self, windows: pa.Table) -> Iterator[pa.Table]:
        """One table (`PROMPT_SCHEMA`) a window."""
        for row in windows.to_pylist():
            with self.context.logging(window=row["index"]):
                planned = self._rows(Window(**row))
            # This process outlives its pass: a shard that it kept mapped would keep its disk space when it is deleted.
            self.context.store.close()
            yield planned

    def _rows(self, window: Window) -> pa.Table:
        spending = Spending()
        requests = read_range(self.context.folder, window.start, window.stop)
        folder, name = self.context.folder, prompt_plan_name(window.index)
        is_planned = folder.exists(name)
        encode_plan = None
        if self.context.base_url is not None or not is_planned:
            encode_plan = load_plan(self.context, window, requests)
        carried = self._carried(encode_plan, requests)
        prompts = RequestPrompts(self.context)
        asked = [request for request in requests if request.item_index not in carried]
        items, failures = self._prompts(window, prompts, asked)
        if not is_planned:
            forecast = self._forecast(encode_plan, prompts, asked)
            folder.write_json(name, self._plan(window, items, failures, carried, forecast, spending))
        plan = folder.read_json(name)
        work = rows_to_do(
            window,
            plan,
            generate_batch_receipts(folder, window.index),
            lambda batch: {"items": [items[index] for index in batch["items"]], "prompted_at": time.time()},
        )
        return pa.Table.from_pylist(list(work), PROMPT_SCHEMA)

    def _carried(self, encode_plan: WindowPlan | None, requests: list[Request]) -> dict[int, Place]:
        """Unchanged since the run that this one goes on from: with media as the encode pass found it, here of texts."""
        if self.context.base_url is None:
            return {}
        texts = [request for request in requests if not request.media]
        own = {r.item_index: (r.tenant, r.id, request_source(r, ())) for r in texts}
        return {**(encode_plan.carried if encode_plan else {}), **self.context.unchanged(own)}

    def _forecast(self, encode_plan: WindowPlan | None, prompts: RequestPrompts, requests: list[Request]) -> Work:
        """What the prompts would have been by the plan of the encode pass, before anything was decoded."""
        if encode_plan is None:
            return Work()
        out = {failure["item_index"] for failure in encode_plan.failures}
        lengths, _ = prompts.planned_lengths([r for r in requests if r.item_index not in out], encode_plan.media)
        return planned_prompt_work(self.context, list(lengths.values()), encode_plan.media)

    def _prompts(
        self, window: Window, prompts: RequestPrompts, requests: list[Request]
    ) -> tuple[dict[int, dict[str, Any]], list[dict[str, Any]]]:
        """`items` by index, and failure rows of what cannot be asked."""
        encoded: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for row in read_encoded(self.context, window).to_pylist():
            encoded[row["item_index"]].append(row)
        items: dict[int, dict[str, Any]] = {}
        failures: list[dict[str, Any]] = []
        for request in requests:
            media = encoded[request.item_index]
            if any(row["code"] for row in media):
                continue
            try:
                ordered = sorted(media, key=lambda row: row["media_index"])
                items[request.item_index] = self._prompt(prompts, request, ordered)
            except ItemError as error:
                failures.append(failure_row(request.item_index, None, error))
        return items, failures

    def _prompt(self, prompts: RequestPrompts, request: Request, media: list[dict[str, Any]]) -> dict[str, Any]:
        records = self.context.store.fetch([(row["shard"], row["key"]) for row in media])
        parts = []
        for row, record in zip(media, records, strict=True):
            if record is None:
                raise RuntimeError(
                    f"item {request.id}: features {row['key']} are not in shard {row['shard']} any more; "
                    "the store was changed under a running job"
                )
            parts.append((row["modality"], record.placeholder))
        return {
            "item_index": request.item_index,
            "input_ids": prompts.token_ids(request, parts),
            "seed": item_seed(self.context.config.generate.seed, request.id),
            "media": [{name: row[name] for name in ("key", "shard")} for row in media],
        }

    def _plan(
        self,
        window: Window,
        items: dict[int, dict[str, Any]],
        failures: list[dict[str, Any]],
        carried: dict[int, Place],
        forecast: Work,
        spending: Spending,
    ) -> dict[str, Any]:
        generate = self.context.config.generate
        order = sorted(items)
        batches = plan_language_batches(
            [len(items[index]["input_ids"]) for index in order],
            max_new_tokens=self.context.answer_tokens,
            kv_bytes_per_token=self.context.facts.kv_cache(generate.dtype),
            max_batch_bytes=generate.max_batch_bytes,
            max_batch_items=generate.max_batch_items,
        )
        planned: list[dict[str, Any]] = []
        for number, positions in enumerate(batches):
            chosen = [order[position] for position in positions]
            terms = [[index, items[index]["input_ids"]] for index in chosen]
            planned.append({"digest": batch_digest(window, number, terms), "items": chosen})
        spent = spending.spent()
        receipt = plan_receipt(
            "prompt",
            window,
            [batch["digest"] for batch in planned],
            counts={
                "items": len(items) + len(failures) + len(carried),
                "items_carried": len(carried),
                **forecast_counts(forecast),
            },
            spent=spent,
            failures=failures,
        )
        return {
            "batches": planned,
            "failures": failures,
            "carried": {str(item): [place.window, place.row] for item, place in carried.items()},
            "spent": spent,
            "receipt": receipt_to_json(receipt),
        }
