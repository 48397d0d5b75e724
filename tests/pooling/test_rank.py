"""Every score in its place, whatever the schedule; no request waits for a wide one longer than its turn."""

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import ItemError
from pipeline.pooling.rank import Pair, ScoreBoard, admit_documents, plan_pairs, ranking
from pipeline.schema import ItemFailure

REQUESTS = st.lists(st.lists(st.integers(0, 60), max_size=25), max_size=25)
FAILURE = ItemFailure(stage="rank", code="empty_text", message="no tokens")


def true_score(request: int, document: int) -> float:
    return request * 1000.0 + document


@given(REQUESTS, st.integers(1, 200), st.integers(1, 9))
def test_every_pair_once_within_the_budget(lengths: list[list[int]], most_tokens: int, most_items: int) -> None:
    batches = plan_pairs(lengths, max_batch_tokens=most_tokens, max_batch_items=most_items)
    pairs = Counter((pair.request, pair.document) for batch in batches for pair in batch)
    assert pairs == Counter((r, d) for r, documents in enumerate(lengths) for d in range(len(documents)))
    for batch in batches:
        longest = max(lengths[pair.request][pair.document] for pair in batch)
        assert len(batch) <= most_items
        assert len(batch) == 1 or len(batch) * longest <= most_tokens
    assert batches == plan_pairs(lengths, max_batch_tokens=most_tokens, max_batch_items=most_items)


@given(REQUESTS, st.integers(1, 9))
def test_a_request_is_done_when_its_turns_are(lengths: list[list[int]], most_items: int) -> None:
    batches = plan_pairs(lengths, max_batch_tokens=10**6, max_batch_items=most_items)
    scored = [pair for batch in batches for pair in batch]
    window = 8 * most_items
    for request, documents in enumerate(lengths):
        if documents:
            last = max(place for place, pair in enumerate(scored) if pair.request == request)
            turns = sum(min(len(documents), len(others)) for others in lengths)
            assert last < -(-turns // window) * window


def test_a_wide_query_neither_blocks_nor_dominates() -> None:
    lengths = [[30] * 10_000, *([30] * 10 for _ in range(50))]
    batches = plan_pairs(lengths, max_batch_tokens=30 * 16, max_batch_items=16)
    scored = [pair.request for batch in batches for pair in batch]
    assert max(place for place, request in enumerate(scored) if request != 0) < 51 * 10 + 8 * 16
    shares = Counter(scored[:510])
    assert shares[0] == 10 and len(shares) == 51


@given(REQUESTS, st.integers(1, 4), st.randoms(use_true_random=False))
def test_scores_come_back_to_their_places(lengths: list[list[int]], num_labels: int, rng: random.Random) -> None:
    batches = plan_pairs(lengths, max_batch_tokens=100, max_batch_items=5)
    rng.shuffle(batches)
    board = ScoreBoard([len(documents) for documents in lengths])
    failed: dict[int, int] = {}
    for batch in batches:
        rng.shuffle(batch)
        lost = [pair for pair in batch if rng.random() < 0.1]
        kept = [pair for pair in batch if pair not in lost]
        for pair in lost:
            board.fail(pair, FAILURE)
            failed[pair.request] = min(pair.document, failed.get(pair.request, pair.document))
        scores = np.array([true_score(pair.request, pair.document) for pair in kept], dtype=np.float32)
        if num_labels > 1:
            scores = np.stack([scores + label for label in range(num_labels)], axis=1)
        board.place(kept, scores)
    for request, outcome in enumerate(board.outcomes()):
        if request in failed:
            assert isinstance(outcome, ItemFailure)
            assert (outcome.stage, outcome.code) == ("rank", "empty_text")
            assert outcome.message == f"document {failed[request]}: no tokens"
        else:
            assert isinstance(outcome, np.ndarray) and outcome.dtype == np.float32
            first = [true_score(request, document) for document in range(len(lengths[request]))]
            columns = outcome if num_labels == 1 or not first else outcome[:, -1] - (num_labels - 1)
            assert columns.tolist() == first


@pytest.mark.parametrize("again", ["place", "fail"])
@pytest.mark.parametrize("before", ["place", "fail"])
def test_a_place_is_filled_once(before: str, again: str) -> None:
    board = ScoreBoard([1, 2])
    pair = Pair(request=1, document=1)

    def fill(how: str) -> None:
        if how == "place":
            board.place([pair], np.zeros(1, np.float32))
        else:
            board.fail(pair, FAILURE)

    fill(before)
    with pytest.raises(RuntimeError, match="document 1 of request 1 was scored twice"):
        fill(again)


def test_a_place_left_empty_is_found() -> None:
    board = ScoreBoard([0, 2])
    board.place([Pair(request=1, document=0)], np.zeros(1, np.float32))
    with pytest.raises(RuntimeError, match=r"request 1: no scores came for its documents \[1\]"):
        board.outcomes()


def test_scores_and_pairs_are_as_many() -> None:
    with pytest.raises(ValueError, match="zip"):
        ScoreBoard([2]).place([Pair(request=0, document=0)], np.zeros(2, np.float32))


def test_too_many_documents_are_cut_or_quarantined() -> None:
    assert admit_documents(5, max_documents=5, above="quarantine") == 5
    assert admit_documents(6, max_documents=5, above="truncate") == 5
    with pytest.raises(ItemError, match="rank: too_many_documents: 6 documents for one query, at most 5 are scored"):
        admit_documents(6, max_documents=5, above="quarantine")


@given(st.lists(st.integers(-3, 3)))
def test_ranking_is_descending_and_stable(scores: list[int]) -> None:
    ranked = ranking(np.array(scores, dtype=np.float32))
    assert ranked == sorted(range(len(scores)), key=lambda document: (-scores[document], document))


def test_a_score_that_is_not_a_number_has_no_place() -> None:
    assert ranking(np.array([0.0, np.inf, -np.inf], dtype=np.float32)) == [1, 0, 2]
    with pytest.raises(ItemError, match="score_not_a_number: the score of document 1 is NaN"):
        ranking(np.array([0.0, np.nan], dtype=np.float32))
    with pytest.raises(ValueError, match="one score each"):
        ranking(np.zeros((2, 2), dtype=np.float32))
