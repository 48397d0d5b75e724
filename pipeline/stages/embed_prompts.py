"""Prompt batches and stored features → vectors, an outcome file and a receipt."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from pipeline.models.prompt_embedder import PromptEmbedder, prompt_contract
from pipeline.schema import Receipt
from pipeline.stages.context import StageContext
from pipeline.stages.generate import Fetched, PromptBatches
from pipeline.stages.outcomes import PROMPT_VECTOR_OUTCOME, count_codes, write_outcome


class EmbedPrompts(PromptBatches):
    """Stage, one an accelerator: batches (`PROMPT_SCHEMA`) → rows of `RECEIPT_SCHEMA`."""

    def __init__(self, context: StageContext, device: str) -> None:
        super().__init__(context, device)
        section, contract = context.config.generate, prompt_contract(context.config.pooling.contract())
        self.model = PromptEmbedder(
            context.facts, contract, dtype=section.dtype, device=device, attention=section.attention
        )

    def _done(self, batch: dict[str, Any], fetched: Fetched) -> Callable[[], Receipt]:
        queued = time.time() - batch["prompted_at"]
        seconds = {"feature_transfer": fetched.seconds}
        ready = fetched.ready
        spent: dict[str, int] = {}
        vectors = self._in_room(lambda items: list(self.model.embed(items, seconds)), list(ready.values()), spent)
        self._tell(fetched, seconds)
        lengths = [len(item.input_ids) for item in ready.values()]
        times = {
            "llm_queue_ms": 1e3 * queued,
            "feature_transfer_ms": 1e3 * seconds["feature_transfer"],
            "llm_prefill_ms": 1e3 * seconds.get("llm_prefill", 0.0),
        }
        embedded = [{"item_index": i, "vector": vector, **times} for i, vector in zip(ready, vectors, strict=True)]
        rows, cpu, used = self._spent(fetched, [*fetched.failed, *embedded], seconds)
        receipt = Receipt(
            stage="generate",
            window=batch["window"],
            batch=batch["batch"],
            digest=batch["digest"],
            counts={
                "prompts_embedded": len(ready),
                "prompt_tokens": sum(lengths),
                "prompt_padded_tokens": sum(max(lengths) - length for length in lengths) if lengths else 0,
                **spent,
            },
            seconds=seconds,
            quarantine=count_codes(row.get("code") for row in rows),
            cpu_seconds=cpu,
            accelerator_seconds=used,
        )

        def put_away() -> Receipt:
            write_outcome(self.context.folder, receipt, rows, PROMPT_VECTOR_OUTCOME)
            return receipt

        return put_away
