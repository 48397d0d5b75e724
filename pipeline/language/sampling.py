"""Sampling that depends on the item alone, not on which batch it is in."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from transformers import LogitsProcessor, TemperatureLogitsWarper, TopPLogitsWarper


class SeededSampler(LogitsProcessor):
    """Turns the greedy choice that follows it into a sample, each row from a generator of its own.

    The largest of log-probabilities plus Gumbel noise is a sample of the distribution (Gumbel 1954; "Gumbel-max").
    """

    def __init__(self, seeds: Sequence[int], *, temperature: float, top_p: float) -> None:
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(temperature)]
        if top_p < 1:
            self.warpers.append(TopPLogitsWarper(top_p))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """`scores` (rows, vocabulary), noise added."""
        for warper in self.warpers:
            scores = warper(input_ids, scores)
        uniform = torch.stack([torch.rand(scores.shape[1], generator=g) for g in self.generators])
        tiny = torch.finfo(uniform.dtype).tiny
        exponential = (-torch.log(uniform.clamp_min(tiny))).clamp_min(tiny)
        noise = -torch.log(exponential)
        return scores + noise.to(scores.device, scores.dtype)

    def keep(self, rows: Sequence[int]) -> None:
        """From now on there are these of the rows only, in this order."""
        self.generators = [self.generators[row] for row in rows]


class StepClock(LogitsProcessor):
    """Notes when the first logits exist, that is, when prefill ended (`time.perf_counter` seconds)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.first = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """`scores` unchanged."""
        if not self.first:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.first = time.perf_counter()
        return scores
