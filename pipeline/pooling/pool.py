"""Hidden states to vectors, as the pooling contract says."""

from __future__ import annotations

import torch
from torch.nn.functional import normalize

from pipeline.pooling.contract import Method, PoolingContract


def pool(hidden: torch.Tensor, mask: torch.Tensor, contract: PoolingContract) -> torch.Tensor | list[torch.Tensor]:
    """Hidden states (B, T, H) under `mask` (B, T), true where a token takes part, to float32.

    One tensor (B, D); for the method `none` a list of B tensors (t_i, D), t_i tokens of item i. D is H or
    `contract.output.dimensions`.
    """
    if contract.method == "none":
        return [finish(vectors, contract) for vectors in token_vectors(hidden, mask)]
    return finish(pool_tokens(hidden, mask, contract.method), contract)


def pool_tokens(hidden: torch.Tensor, mask: torch.Tensor, method: Method) -> torch.Tensor:
    """Hidden states (B, T, H) under `mask` (B, T) to float32 (B, H). An item without tokens comes out as zeros.

    Equals sentence-transformers' `Pooling` (`sentence_transformer/modules/pooling.py`) with the modes mean, cls and
    lasttoken, but accumulates and answers in float32 where the hidden states are of lower precision.
    """
    mask = mask.bool()
    # Not multiplied by the mask: a NaN at a padded position (fully masked attention rows) would survive it.
    states = hidden.float().masked_fill(~mask[..., None], 0.0)
    if method == "mean":
        return states.sum(dim=1) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    positions = torch.arange(mask.shape[1], device=mask.device)
    if method == "cls":
        chosen = torch.where(mask, positions, mask.shape[1] - 1).amin(dim=1)
    elif method == "last_token":
        chosen = torch.where(mask, positions, 0).amax(dim=1)
    else:
        raise ValueError(f"the method {method!r} does not make one vector of hidden states")
    return states[torch.arange(len(states), device=states.device), chosen]


def token_vectors(hidden: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    """The float32 hidden states (t_i, H) of each item's tokens, in order."""
    return [states[kept] for states, kept in zip(hidden.float(), mask.bool(), strict=True)]


def finish(vectors: torch.Tensor, contract: PoolingContract) -> torch.Tensor:
    """Vectors (…, D) normalised and cut to the contract's dimensions, in its order. A vector of zeros stays one.

    Raises `ValueError` when there are fewer dimensions than are to be kept.
    """
    kept = contract.output.dimensions
    if kept is not None and kept > vectors.shape[-1]:
        raise ValueError(f"output.dimensions is {kept}, the model's vectors have {vectors.shape[-1]}")
    norm = contract.normalisation
    if norm.kind == "l2" and norm.when == "before":
        vectors = normalize(vectors, dim=-1)
    vectors = vectors[..., :kept]
    if norm.kind == "l2" and norm.when == "after":
        vectors = normalize(vectors, dim=-1)
    return vectors
