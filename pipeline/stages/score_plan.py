"""Turn one window's texts and chats into token ids and batches of them, and write the plan down."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from jinja2 import TemplateError

from pipeline.errors import ItemError
from pipeline.language.batching import plan_text_batches
from pipeline.planning.windows import Window
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

SCORED_TEXT_SCHEMA = batches_schema(
    [
        ("item_index", pa.int64()),
        ("input_ids", pa.list_(pa.int32())),
        ("type_ids", pa.list_(pa.int8())),
        ("spans", pa.list_(pa.list_(pa.int32()))),  # null for a token that is not of the text, and for chats
    ],
)


@dataclass(frozen=True)
class PlanScoresWindow:
    """Stage: window rows (`index, start, stop`) → batches of texts still to be done, and receipts of finished ones."""

    context: StageContext
    max_batch_tokens: int

    def __call__(self, windows: pa.Table) -> Iterator[pa.Table]:
        """One table (`SCORED_TEXT_SCHEMA`) a window."""
        for row in windows.to_pylist():
            with self.context.logging(window=row["index"]):
                planned = self._rows(Window(**row))
            yield planned

    def _rows(self, window: Window) -> pa.Table:
        spending = Spending()
        tokenized, failures = self.texts(window)
        folder, name = self.context.folder, pool_plan_name(window.index)
        if not folder.exists(name):
            folder.write_json(name, self._plan(window, tokenized, failures, spending))
        plan = folder.read_json(name)
        work = rows_to_do(
            window,
            plan,
            pool_batch_receipts(folder, window.index),
            lambda batch: {"items": [_text_row(index, tokenized[index]) for index in batch["items"]]},
        )
        return pa.Table.from_pylist(list(work), SCORED_TEXT_SCHEMA)

    def texts(self, window: Window) -> tuple[dict[int, TokenizedText], list[dict[str, Any]]]:
        """What can be scored, by item, and failure rows of the others."""
        texts: dict[int, str] = {}
        tokenized: dict[int, TokenizedText] = {}
        failures: list[dict[str, Any]] = []
        for request in read_range(self.context.folder, window.start, window.stop):
            try:
                content = _content_of(request)
                if isinstance(content, str):
                    texts[request.item_index] = content
                else:
                    tokenized[request.item_index] = self._tokenized_chat(content)
            except ItemError as error:
                failures.append(failure_row(request.item_index, None, error))
        prompt_name = self.context.config.text.prompt_name
        # All at once: one by one they cost several times as much.
        tokenized.update(zip(texts, self.context.scorer.tokenize_texts(list(texts.values()), prompt_name), strict=True))
        return dict(sorted(tokenized.items())), failures

    def _tokenized_chat(self, messages: Sequence[dict[str, Any]]) -> TokenizedText:
        scorer = self.context.scorer
        if scorer.tokenizer.chat_template is None:
            raise ItemError("tokenize", "no_chat_template", f"model {scorer.model!r} takes no chats")
        try:
            [tokenized] = scorer.tokenize_chats([messages])
        except TemplateError as error:
            raise ItemError("tokenize", "chat_refused", f"the model's chat template says: {error}") from error
        limit = scorer.contract.for_texts()[0].max_tokens
        if len(tokenized.input_ids) > limit:
            # Cut, it would be scored without its end, which is what is judged.
            raise ItemError("tokenize", "chat_too_long", f"{len(tokenized.input_ids):,} tokens, at most {limit:,}")
        return tokenized

    def _plan(
        self,
        window: Window,
        tokenized: dict[int, TokenizedText],
        failures: list[dict[str, Any]],
        spending: Spending,
    ) -> dict[str, Any]:
        section, indices = self.context.config.text, list(tokenized)
        batches = plan_text_batches(
            [len(text.input_ids) for text in tokenized.values()],
            max_batch_tokens=self.max_batch_tokens,
            max_batch_items=section.max_batch_items,
        )
        lengths = [[len(tokenized[indices[p]].input_ids) for p in batch] for batch in batches]
        work = planned_text_work(self.context, lengths)
        planned: list[dict[str, Any]] = []
        for number, positions in enumerate(batches):
            items = [indices[position] for position in positions]
            terms = [[index, tokenized[index].input_ids] for index in items]
            planned.append({"digest": batch_digest(window, number, terms), "items": items})
        spent = spending.spent()
        receipt = plan_receipt(
            "tokenize",
            window,
            [batch["digest"] for batch in planned],
            counts={"items": window.stop - window.start, **forecast_counts(work)},
            spent=spent,
            failures=failures,
        )
        return {"batches": planned, "failures": failures, "spent": spent, "receipt": receipt_to_json(receipt)}


def _content_of(request: Request) -> str | list[dict[str, Any]]:
    """The text or chat of an item. Raises `ItemError` when it is not one of the two."""
    if request.media:
        raise ItemError("tokenize", "modality_not_supported", "texts and chats are scored, the item has media")
    if (request.text is None) == (request.messages is None):
        found = "neither" if request.text is None else "both"
        raise ItemError("tokenize", "not_one_text", f"an item is a text or a chat (messages), it has {found}")
    if request.messages is not None:
        return [{**message, "content": _text_of(message)} for message in request.messages]
    assert request.text is not None
    if not request.text.strip():
        raise ItemError("tokenize", "empty_text", "there is nothing to score: the text is empty")
    return request.text


def _text_of(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = list(content or [])
    if any(part.get("type") != "text" for part in parts):
        raise ItemError("tokenize", "modality_not_supported", "texts and chats are scored, the chat shows media")
    return "".join(part["text"] for part in parts)


def _text_row(item_index: int, text: TokenizedText) -> dict[str, Any]:
    return {"item_index": item_index, "input_ids": text.input_ids, "type_ids": text.type_ids, "spans": text.spans}
