"""Batches of texts → scores of texts or of their tokens, an outcome file and a receipt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.stages.outcomes import TEXT_SCORE_OUTCOME
from pipeline.stages.scoring import ScoringBatches, tokenized


class ScoreTexts(ScoringBatches):
    """Stage, one an accelerator: batches (`SCORED_TEXT_SCHEMA`) → rows of `RECEIPT_SCHEMA`."""

    counted = "texts_scored"
    outcome = TEXT_SCORE_OUTCOME

    def _work(self, items: Sequence[dict[str, Any]]) -> Sequence[Any]:
        if self.context.config.score.per_token:
            return self.scorer.score_tokens(tokenized(items))
        return [scores.reshape(-1) for scores in self.scorer.score(tokenized(items))]

    def _row(self, item: dict[str, Any], result: Any, share_ms: float) -> dict[str, Any]:
        row = {"item_index": item["item_index"], "scores": None, "tokens": None, "text_score_ms": share_ms}
        if self.context.config.score.per_token:
            spans = item["spans"] or [None] * len(result)
            return {**row, "tokens": [_token(*each) for each in zip(item["input_ids"], spans, result, strict=True)]}
        return {**row, "scores": result}


def _token(token_id: int, span: Sequence[int] | None, scores: Any) -> dict[str, Any]:
    start, end = span or (None, None)
    return {"token_id": token_id, "start_char": start, "end_char": end, "scores": scores}
