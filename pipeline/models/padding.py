"""Ragged token ids to the padded tensors a text model takes."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from pipeline.pooling.contract import Side


def pad_rows(rows: Sequence[Sequence[int]], *, side: Side, value: int, length: int = 0) -> torch.Tensor:
    """int64 (B, T) with `value` at the padded `side`; T is the longest row's length or `length`, if that is more."""
    longest = max(length, *(len(row) for row in rows))
    padded = torch.full((len(rows), longest), value)
    for target, row in zip(padded, rows, strict=True):
        target[_span(row, longest, side)] = torch.tensor(row)
    return padded


def pad_mask(rows: Sequence[Sequence[int]], *, side: Side, length: int = 0) -> torch.Tensor:
    """int64 (B, T) as `pad_rows`, 1 where a row has a token and 0 where it is padded."""
    return pad_rows([[1] * len(row) for row in rows], side=side, value=0, length=length)


def _span(row: Sequence[int], longest: int, side: Side) -> slice:
    return slice(longest - len(row), longest) if side == "left" else slice(0, len(row))


def first_position(model: Any) -> int | None:
    """The number that `model` counts positions from; None when it takes no `position_ids`.

    Embeddings of the RoBERTa kind have a `padding_idx` beside their table of positions and count from the next number.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return None
    for module in model.modules():
        padding_idx = getattr(module, "padding_idx", None)
        if isinstance(padding_idx, int) and isinstance(
            getattr(module, "position_embeddings", None), torch.nn.Embedding
        ):
            return padding_idx + 1
    return 0


def positions(mask: torch.Tensor, side: Side, first: int | None) -> dict[str, torch.Tensor]:
    """`position_ids` (B, T) for rows padded on the left: every row counts from its own start.

    Models with absolute positions would otherwise count the padding too, and what is made of a text would depend on the
    longest text of its batch. Nothing for rows padded on the right, which are counted rightly anyway.
    """
    if side == "right" or first is None:
        return {}
    return {"position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0) + first}
