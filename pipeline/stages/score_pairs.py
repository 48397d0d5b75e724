"""Batches of pairs → scores, an outcome file and a receipt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.models.reranker import Scorer, TokenizedText
from pipeline.stages.computing import TextBatches
from pipeline.stages.context import StageContext
from pipeline.stages.outcomes import SCORE_OUTCOME


class ScorePairs(TextBatches):
    """Stage, one an accelerator: batches (`PAIR_SCHEMA`) → rows of `RECEIPT_SCHEMA`."""

    counted = "pairs_scored"
    timed = "score"
    outcome = SCORE_OUTCOME

    def __init__(self, context: StageContext, device: str) -> None:
        super().__init__(context, device)
        section = context.config.text
        self.scorer = Scorer(context.scorer, dtype=section.dtype, device=device, attention=section.attention)

    def _work(self, items: Sequence[dict[str, Any]]) -> Sequence[Any]:
        texts = [TokenizedText(input_ids=item["input_ids"], type_ids=item["type_ids"]) for item in items]
        return self.scorer.score(texts).tolist()  # type: ignore[no-any-return]

    def _row(self, item: dict[str, Any], result: Any, share_ms: float) -> dict[str, Any]:
        return {"item_index": item["item_index"], "document": item["document"], "score": result}
