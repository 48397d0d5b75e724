"""Turn one window's queries and documents into batches of pairs, and write the plan down."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from pipeline.errors import ItemError
from pipeline.planning.windows import Window
from pipeline.pooling.rank import admit_documents, plan_pairs
from pipeline.runs.manifest import read_range
from pipeline.runs.receipts import receipt_to_json
from pipeline.schema import Request
from pipeline.stages.context import StageContext
from pipeline.stages.forecast import forecast_counts, planned_text_work
from pipeline.stages.outcomes import failure_row, pool_batch_receipts
from pipeline.stages.planned import batch_digest, batches_schema, plan_receipt, rows_to_do
from pipeline.stages.pool_plan import pool_plan_name
from pipeline.stages.spending import Spending

if TYPE_CHECKING:
    from pipeline.models.reranker import TokenizedText

PAIR_SCHEMA = batches_schema(
    [
        ("item_index", pa.int64()),
        ("document", pa.int32()),
        ("input_ids", pa.list_(pa.int32())),
        ("type_ids", pa.list_(pa.int8())),
    ],
)


@dataclass(frozen=True)
class PlanPairsWindow:
    """Stage: window rows (`index, start, stop`) → batches of pairs still to be done, and receipts of finished ones.

    Requests of a window take turns, so that a wide one neither blocks nor dominates the others.
    """

    context: StageContext
    max_batch_tokens: int

    def __call__(self, windows: pa.Table) -> Iterator[pa.Table]:
        """Tables (`PAIR_SCHEMA`) of one row: the plan's receipt and then a batch each, a window after another."""
        for row in windows.to_pylist():
            for batch in self._rows(Window(**row)):
                yield pa.Table.from_pylist([batch], PAIR_SCHEMA)

    def _rows(self, window: Window) -> Iterator[dict[str, Any]]:
        spending = Spending()
        requests, tokenized, failures = self.pairs(window)
        folder, name = self.context.folder, pool_plan_name(window.index)
        if not folder.exists(name):
            folder.write_json(name, self._plan(window, requests, tokenized, failures, spending))
        plan = folder.read_json(name)
        by_index = dict(zip(requests, tokenized, strict=True))
        return rows_to_do(
            window,
            plan,
            pool_batch_receipts(folder, window.index),
            lambda batch: {"items": [_pair_row(i, d, by_index[i][d]) for i, d in batch["pairs"]]},
        )

    def pairs(self, window: Window) -> tuple[list[int], list[list[TokenizedText]], list[dict[str, Any]]]:
        """Indices of the requests that can be ranked, their pairs, and failure rows of the others."""
        indices: list[int] = []
        tokenized: list[list[TokenizedText]] = []
        failures: list[dict[str, Any]] = []
        for request in read_range(self.context.folder, window.start, window.stop):
            try:
                tokenized.append(self._tokenized(request))
                indices.append(request.item_index)
            except ItemError as error:
                failures.append(failure_row(request.item_index, None, error))
        return indices, tokenized, failures

    def _tokenized(self, request: Request) -> list[TokenizedText]:
        rank, section = self.context.config.rank, self.context.config.text
        if request.query is None or request.documents is None:
            missing = "query" if request.query is None else "documents"
            raise ItemError(
                "rank", "not_a_request", f"a request to rank has a query and documents, {missing} is missing"
            )
        kept = admit_documents(len(request.documents), max_documents=rank.max_documents, above=rank.above)
        pairs = [(request.query, document) for document in request.documents[:kept]]
        return self.context.scorer.tokenize_pairs(pairs, section.query_prompt_name)

    def _plan(
        self,
        window: Window,
        indices: list[int],
        tokenized: list[list[TokenizedText]],
        failures: list[dict[str, Any]],
        spending: Spending,
    ) -> dict[str, Any]:
        section = self.context.config.text
        batches = plan_pairs(
            [[len(text.input_ids) for text in texts] for texts in tokenized],
            max_batch_tokens=self.max_batch_tokens,
            max_batch_items=section.max_batch_items,
        )
        lengths = [[len(tokenized[pair.request][pair.document].input_ids) for pair in batch] for batch in batches]
        work = planned_text_work(self.context, lengths)
        planned: list[dict[str, Any]] = []
        for number, pairs in enumerate(batches):
            places = [[indices[pair.request], pair.document] for pair in pairs]
            terms = [
                [*place, tokenized[p.request][p.document].input_ids] for place, p in zip(places, pairs, strict=True)
            ]
            planned.append({"digest": batch_digest(window, number, terms), "pairs": places})
        spent = spending.spent()
        receipt = plan_receipt(
            "tokenize",
            window,
            [batch["digest"] for batch in planned],
            counts={"items": window.stop - window.start, **forecast_counts(work)},
            spent=spent,
            failures=failures,
        )
        scored = {str(index): len(texts) for index, texts in zip(indices, tokenized, strict=True)}
        return {
            "batches": planned,
            "num_documents": scored,
            "failures": failures,
            "spent": spent,
            "receipt": receipt_to_json(receipt),
        }


def _pair_row(item_index: int, document: int, text: TokenizedText) -> dict[str, Any]:
    return {
        "item_index": item_index,
        "document": document,
        "input_ids": text.input_ids,
        "type_ids": text.type_ids,
    }
