"""Reranking requests, each one query and any number of documents, as pairs and back. Pure.

A pair carries its indices; scores are put where the indices say, never where they happen to arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from pipeline.errors import ItemError
from pipeline.language.batching import plan_text_batches
from pipeline.schema import ItemFailure

# Pairs are sorted by length within this many full batches: enough for near-equal lengths, few enough that a request
# with few documents is done early. Not measured.
_WINDOW_BATCHES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A document of a request, by its index there."""

    request: int
    document: int


def admit_documents(num_documents: int, *, max_documents: int, above: Literal["quarantine", "truncate"]) -> int:
    """How many of a request's documents, from the first, are scored.

    A request above the work limit is cut to it, or raises `ItemError` (stage `rank`, `too_many_documents`).
    """
    if num_documents > max_documents and above == "quarantine":
        raise ItemError(
            "rank", "too_many_documents", f"{num_documents} documents for one query, at most {max_documents} are scored"
        )
    return min(num_documents, max_documents)


def plan_pairs(lengths: Sequence[Sequence[int]], *, max_batch_tokens: int, max_batch_items: int) -> list[list[Pair]]:
    """Every pair in one batch; `lengths[request][document]` is its number of tokens.

    Requests take turns, a document each, so a request of n documents is done after at most the sum of min(n, m) over
    the requests of m documents, to the end of the window that pair is in: a wide query delays nobody by more than
    that, and in no window has it more than its turns. Within a window (8 * `max_batch_items` pairs) batches are
    planned as texts are: similar lengths together, at most `max_batch_items` pairs or `max_batch_tokens` padded tokens.
    """
    turns = sorted(
        (document, request) for request, documents in enumerate(lengths) for document in range(len(documents))
    )
    pairs = [Pair(request=request, document=document) for document, request in turns]
    size = _WINDOW_BATCHES * max_batch_items
    batches = []
    for start in range(0, len(pairs), size):
        window = pairs[start : start + size]
        window_lengths = [lengths[pair.request][pair.document] for pair in window]
        planned = plan_text_batches(window_lengths, max_batch_tokens=max_batch_tokens, max_batch_items=max_batch_items)
        batches += [[window[position] for position in batch] for batch in planned]
    return batches


class ScoreBoard:
    """The scores of requests with `num_documents` documents each, filled in any order, each place once."""

    def __init__(self, num_documents: Sequence[int]) -> None:
        self._scores: list[list[npt.NDArray[np.float32] | None]] = [[None] * count for count in num_documents]
        self._failures: list[dict[int, ItemFailure]] = [{} for _ in num_documents]

    def place(self, pairs: Sequence[Pair], scores: npt.NDArray[np.float32]) -> None:
        """`scores` (n,) or (n, labels) of n pairs. Raises `RuntimeError` when a place is filled already."""
        for pair, score in zip(pairs, scores, strict=True):
            self._check_free(pair)
            self._scores[pair.request][pair.document] = np.asarray(score, dtype=np.float32)

    def fail(self, pair: Pair, failure: ItemFailure) -> None:
        """Says that the pair has no score. Raises `RuntimeError` when its place is filled already."""
        self._check_free(pair)
        self._failures[pair.request][pair.document] = failure

    def _check_free(self, pair: Pair) -> None:
        scores, failures = self._scores[pair.request], self._failures[pair.request]
        if scores[pair.document] is not None or pair.document in failures:
            raise RuntimeError(f"document {pair.document} of request {pair.request} was scored twice")

    def outcomes(self) -> list[npt.NDArray[np.float32] | ItemFailure]:
        """By request: scores (documents,) or (documents, labels), or why its first failed document has none.

        Raises `RuntimeError` when a place was left empty.
        """
        return [self._outcome(request) for request in range(len(self._scores))]

    def _outcome(self, request: int) -> npt.NDArray[np.float32] | ItemFailure:
        scores, failures = self._scores[request], self._failures[request]
        empty = [d for d, score in enumerate(scores) if score is None and d not in failures]
        if empty:
            raise RuntimeError(f"request {request}: no scores came for its documents {empty[:5]}")
        if failures:
            document = min(failures)
            failure = failures[document]
            message = f"document {document}: {failure.message}"
            return ItemFailure(stage=failure.stage, code=failure.code, message=message)
        return np.array(scores, dtype=np.float32)


def ranking(scores: npt.NDArray[np.float32]) -> list[int]:
    """Document indices from the highest of `scores` (documents,) to the lowest; equal scores keep the input's order.

    Raises `ItemError` (stage `rank`) when a score is not a number: it would have no place.
    """
    if scores.ndim != 1:
        raise ValueError(f"documents are ranked by one score each, got scores of shape {scores.shape}")
    if np.isnan(scores).any():
        raise ItemError("rank", "score_not_a_number", f"the score of document {int(np.isnan(scores).argmax())} is NaN")
    return [int(document) for document in np.argsort(-scores, kind="stable")]
