"""What a tower's output holds: the language model's part of it by name, and each item's share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from pipeline.features.codec import Container


class CannotSplitError(Exception):
    """An output of several items does not say which part is whose."""


def feature_fields(output: Any) -> list[tuple[str, Any]]:
    """Projected features and deep-stack levels by name: all that the language model is handed."""
    fields: list[tuple[str, Any]] = [("pooler_output", output.pooler_output)]
    for level, features in enumerate(getattr(output, "deepstack_features", None) or ()):
        fields.append((f"deepstack_features.{level}", features))
    return fields


def one_item(output: Any) -> tuple[Container, dict[str, torch.Tensor]]:
    """The container kind and the tensors of an output that holds one item."""
    tensors = {}
    container: Container = "tensor"
    for name, value in feature_fields(output):
        if isinstance(value, list | tuple):
            container = "tuple"
            [value] = value
        tensors[name] = value
    return container, tensors


def split_items(output: Any, num_tokens: Sequence[int]) -> tuple[Container, list[dict[str, torch.Tensor]]]:
    """`one_item` of each item of an output, whose placeholders have `num_tokens` media tokens; in order.

    A tuple has a tensor an item. Of one tensor (entries, rows of features, hidden) an item has as many entries (tiles,
    frames) as its tokens take. Raises `CannotSplitError` where the numbers do not come out.
    """
    items: list[dict[str, torch.Tensor]] = [{} for _ in num_tokens]
    container: Container = "tensor"
    for name, value in feature_fields(output):
        if isinstance(value, list | tuple):
            container = "tuple"
            pieces = list(value)
        else:
            pieces = _entries(value, num_tokens)
        rows = [math.prod(piece.shape[:-1]) for piece in pieces]
        if rows != list(num_tokens):
            raise CannotSplitError(f"{name} has {rows} rows of features, its items {list(num_tokens)} tokens")
        for item, piece in zip(items, pieces, strict=True):
            item[name] = piece
    return container, items


def split_inputs(inputs: dict[str, torch.Tensor], count: int) -> list[dict[str, torch.Tensor]]:
    """What the language model is told of each of `count` items, of tensors that have one entry an item.

    Raises `CannotSplitError` for a tensor that has not.
    """
    for name, tensor in inputs.items():
        if tensor.ndim == 0 or len(tensor) != count:
            raise CannotSplitError(f"{name} has the shape {tuple(tensor.shape)}, for {count} items")
    return [{name: tensor[k : k + 1] for name, tensor in inputs.items()} for k in range(count)]


def _entries(value: torch.Tensor, num_tokens: Sequence[int]) -> list[torch.Tensor]:
    rows = math.prod(value.shape[1:-1])
    lengths = [tokens // rows for tokens in num_tokens]
    if sum(lengths) != len(value):
        raise CannotSplitError(f"{len(value)} entries of {rows} rows are not those of {list(num_tokens)} tokens")
    return list(torch.split_with_sizes(value, lengths))
