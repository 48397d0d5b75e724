"""Batches of pairs → scores, an outcome file and a receipt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.stages.outcomes import SCORE_OUTCOME
from pipeline.stages.scoring import ScoringBatches, tokenized


class ScorePairs(ScoringBatches):
    """Stage, one an accelerator: batches (`PAIR_SCHEMA`) → rows of `RECEIPT_SCHEMA`."""

    counted = "pairs_scored"
    outcome = SCORE_OUTCOME

    def _work(self, items: Sequence[dict[str, Any]]) -> Sequence[Any]:
        return self.scorer.score(tokenized(items)).tolist()  # type: ignore[no-any-return]

    def _row(self, item: dict[str, Any], result: Any, share_ms: float) -> dict[str, Any]:
        return {"item_index": item["item_index"], "document": item["document"], "score": result}
