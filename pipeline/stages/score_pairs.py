"""Batches of pairs → scores, an outcome file and a receipt."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from pipeline.models.reranker import Scorer, TokenizedText
from pipeline.schema import Receipt
from pipeline.stages.context import StageContext
from pipeline.stages.outcomes import SCORE_OUTCOME, write_outcome
from pipeline.stages.rows import receipt_table


class ScorePairs:
    """Stage, one an accelerator: batches (`PAIR_SCHEMA`) → rows of `RECEIPT_SCHEMA`."""

    def __init__(self, context: StageContext, device: str) -> None:
        section = context.config.text
        if device == "cpu":
            # One thread a worker: workers are sized to the cores, and bits must not move with their number.
            torch.set_num_threads(1)
        self.context = context
        self.scorer = Scorer(context.scorer, dtype=section.dtype, device=device, attention=section.attention)

    def __call__(self, batches: pa.Table) -> Iterator[pa.Table]:
        """One table of one receipt for each row, in order."""
        for batch in batches.to_pylist():
            yield receipt_table(self._score(batch))

    def _score(self, batch: dict[str, Any]) -> Receipt:
        started = time.perf_counter()
        pairs = batch["items"]
        lengths = [len(pair["input_ids"]) for pair in pairs]
        splits = {"oom_splits": 0}
        texts = [TokenizedText(input_ids=pair["input_ids"], type_ids=pair["type_ids"]) for pair in pairs]
        scores = self._splitting(texts, splits)
        seconds = time.perf_counter() - started
        receipt = Receipt(
            stage="pool",
            window=batch["window"],
            batch=batch["batch"],
            digest=batch["digest"],
            counts={
                "pairs_scored": len(pairs),
                "text_tokens": sum(lengths),
                "text_padded_tokens": sum(max(lengths) - length for length in lengths),
                **splits,
            },
            seconds={"score": seconds},
        )
        rows = [
            {"item_index": pair["item_index"], "document": pair["document"], "score": score}
            for pair, score in zip(pairs, scores.tolist(), strict=True)
        ]
        write_outcome(self.context.folder, receipt, rows, SCORE_OUTCOME)
        return receipt

    def _splitting(self, texts: list[TokenizedText], splits: dict[str, int]) -> npt.NDArray[np.float32]:
        """Score a batch, or its halves when the device has no room for it whole."""
        try:
            return self.scorer.score(texts)
        except torch.OutOfMemoryError:
            if len(texts) == 1:
                raise
            splits["oom_splits"] += 1
        torch.cuda.empty_cache()
        half = len(texts) // 2
        return np.concatenate([self._splitting(texts[:half], splits), self._splitting(texts[half:], splits)])
