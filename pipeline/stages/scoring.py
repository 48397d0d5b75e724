"""What stages have in common that score texts or pairs of texts with a model of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.models.reranker import Scorer, TokenizedText
from pipeline.stages.computing import TextBatches
from pipeline.stages.context import StageContext


class ScoringBatches(TextBatches):
    """Batches whose items have `input_ids` and `type_ids`."""

    timed = "score"

    def __init__(self, context: StageContext, device: str) -> None:
        super().__init__(context, device)
        section = context.config.text
        self.scorer = Scorer(context.scorer, dtype=section.dtype, device=device, attention=section.attention)


def tokenized(items: Sequence[dict[str, Any]]) -> list[TokenizedText]:
    """What the scorer takes."""
    return [TokenizedText(input_ids=item["input_ids"], type_ids=item["type_ids"]) for item in items]
