"""Text batches → vectors, an outcome file and a receipt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.models.embedder import embed_texts
from pipeline.stages.computing import TextBatches
from pipeline.stages.context import StageContext
from pipeline.stages.outcomes import VECTOR_OUTCOME


class EmbedTexts(TextBatches):
    """Stage, one an accelerator: batches (`TEXT_SCHEMA`) → rows of `RECEIPT_SCHEMA`."""

    counted = "texts_embedded"
    timed = "text_embed"
    outcome = VECTOR_OUTCOME

    def __init__(self, context: StageContext, device: str) -> None:
        super().__init__(context, device)
        section = context.config.text
        self.model = context.text_side.load_model(dtype=section.dtype, device=device, attention=section.attention)

    def _work(self, items: Sequence[dict[str, Any]]) -> Sequence[Any]:
        token_ids = [item["input_ids"] for item in items]
        return list(embed_texts(self.model, token_ids, self.context.config.text.prompt_name))

    def _row(self, item: dict[str, Any], result: Any, share_ms: float) -> dict[str, Any]:
        return {
            "item_index": item["item_index"],
            "part": item["part"],
            "vector": result,
            "text_embed_ms": share_ms,
        }
