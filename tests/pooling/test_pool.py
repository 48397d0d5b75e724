"""Pooling against loops over lists of numbers."""

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.pooling.contract import Normalisation, Output, Padding, PoolingContract, Truncation
from pipeline.pooling.pool import finish, pool, pool_tokens


def contract(method: str, kind: Any = "none", when: Any = "after", dimensions: int | None = None) -> PoolingContract:
    return PoolingContract(
        method=method,  # type: ignore[arg-type]
        normalisation=Normalisation(kind=kind, when=when),
        truncation=Truncation(side="right", max_tokens=64),
        padding=Padding(side="right"),
        output=Output(shape="token_vectors" if method == "none" else "vector", dimensions=dimensions),
    )


def by_hand(tokens: list[list[float]], method: str) -> list[float]:
    if method == "mean":
        return [sum(column) / len(tokens) for column in zip(*tokens, strict=True)]
    return tokens[0] if method == "cls" else tokens[-1]


@settings(deadline=None)  # torch's first call takes longer than all others
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.sampled_from(["mean", "cls", "last_token"]),
    st.sampled_from(["left", "right"]),
    st.integers(0, 3),
    st.integers(0, 2**32),
)
def test_padding_on_either_side_takes_no_part(lengths: list[int], method: str, side: str, more: int, seed: int) -> None:
    rng = random.Random(seed)
    width = max(lengths) + more
    texts = [[[rng.gauss(0, 1) for _ in range(3)] for _ in range(length)] for length in lengths]
    hidden = torch.full((len(lengths), width, 3), math.nan)  # as a fully masked attention row may leave it
    mask = torch.zeros(len(lengths), width, dtype=torch.int64)
    for row, tokens in enumerate(texts):
        span = slice(width - len(tokens), width) if side == "left" else slice(0, len(tokens))
        hidden[row, span] = torch.tensor(tokens)
        mask[row, span] = 1
    pooled = pool(hidden, mask, contract(method))
    assert isinstance(pooled, torch.Tensor)
    expected = torch.tensor([by_hand(tokens, method) for tokens in texts])
    torch.testing.assert_close(pooled, expected, atol=1e-6, rtol=1e-5)
    ragged = pool(hidden, mask, contract("none"))
    assert [rows.tolist() for rows in ragged] == [torch.tensor(tokens).tolist() for tokens in texts]


@pytest.mark.parametrize("method", ["mean", "cls", "last_token"])
def test_an_item_without_tokens_is_zeros(method: str) -> None:
    pooled = pool_tokens(torch.ones(2, 3, 4), torch.tensor([[0, 0, 0], [0, 1, 0]]), method)  # type: ignore[arg-type]
    assert pooled.tolist() == [[0.0] * 4, [1.0] * 4]


def test_low_precision_is_summed_in_float32() -> None:
    hidden = torch.full((1, 4096, 1), 1.0, dtype=torch.bfloat16)
    hidden[0, ::2] = 1.0078125  # the next number above 1; the mean lies between them
    pooled = pool_tokens(hidden, torch.ones(1, 4096), "mean")
    assert pooled.dtype == torch.float32 and pooled.item() == 1.00390625


def test_normalising_before_and_after_the_dimensions_are_cut() -> None:
    vectors = torch.tensor([[3.0, 0.0, 4.0], [0.0, 0.0, 0.0]])
    assert finish(vectors, contract("mean", dimensions=2)).tolist() == [[3.0, 0.0], [0.0, 0.0]]
    before = finish(vectors, contract("mean", "l2", "before", 2))
    torch.testing.assert_close(before, torch.tensor([[0.6, 0.0], [0.0, 0.0]]))
    assert finish(vectors, contract("mean", "l2", "after", 2)).tolist() == [[1.0, 0.0], [0.0, 0.0]]
    with pytest.raises(ValueError, match=r"output\.dimensions is 4, the model's vectors have 3"):
        finish(vectors, contract("mean", dimensions=4))


def test_token_vectors_are_normalised_one_by_one() -> None:
    hidden = torch.tensor([[[3.0, 4.0], [0.0, 2.0], [9.0, 9.0]]])
    [rows] = pool(hidden, torch.tensor([[1, 1, 0]]), contract("none", "l2"))
    torch.testing.assert_close(rows, torch.tensor([[0.6, 0.8], [0.0, 1.0]]))


def test_the_models_own_pooling_is_not_done_here() -> None:
    with pytest.raises(ValueError, match="'model' does not make one vector"):
        pool_tokens(torch.ones(1, 1, 1), torch.ones(1, 1), "model")
