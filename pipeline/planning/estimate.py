"""What a run will do, added up from its plans before anything is decoded. Pure.

Of a transformer, a token's forward pass takes 2 N + 4 L n d floating-point operations (FLOPs): N parameters, L layers,
n positions that it attends to, d the width of all heads together. That is a third of the 6 N + 12 L H Q T which "PaLM"
(arXiv:2204.02311, appendix B) counts for forward and backward. A position of a prompt attends to those before it: half
of them on average.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pipeline.language.kv_cache import KvCache

# Stages of an item's time that a second question does without, by the names that timings have. Where features are in
# the store, what made them of frames; where decoded frames or features stand for the media, what made those of files.
ENCODING_STAGES = frozenset({"frame_transfer", "encoder_queue", "mm_processor", "vision_encode", "commit"})
DECODING_STAGES = frozenset({"media_fetch", "media_decode"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """As much of a network as its operations follow from. `layers` and `width` are 0 where attention is not counted."""

    parameters: int
    layers: int = 0
    width: int = 0

    def forward_flops(self, length: int, *, causal: bool = False) -> int:
        """Of one sequence of `length` tokens, all at once."""
        attention = 4 * self.layers * length**2 * self.width
        return 2 * self.parameters * length + (attention // 2 if causal else attention)

    def answer_flops(self, prompt: int, answer: int) -> int:
        """Of `answer` tokens, one after another, behind a prompt that has been read."""
        attended = answer * prompt + answer * (answer + 1) // 2
        return 2 * self.parameters * answer + 4 * self.layers * self.width * attended


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedMedia:
    """One media item that will be encoded: its grid (t, h, w) in patches, and what becomes of it.

    `frame_bytes` are those of its resized frames; `decode_seconds` are of the reference core.
    """

    grid: tuple[int, int, int]
    feature_length: int
    frame_bytes: int
    store_bytes: int
    decode_seconds: float

    @property
    def patches(self) -> int:
        """That the tower works on, without padding."""
        t, h, w = self.grid
        return t * h * w


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What is to be done, in sums: `Work()` is nothing, and `+` does both. Times are of the reference core."""

    encodes: int = 0
    encode_batches: int = 0
    feature_tokens: int = 0
    patches: int = 0
    computed_tokens: int = 0
    frame_bytes: int = 0
    store_bytes: int = 0
    decode_core_ms: int = 0
    encoder_flops: int = 0
    prompts: int = 0
    prompt_batches: int = 0
    prompt_tokens: int = 0
    prompt_padded_tokens: int = 0
    most_answer_tokens: int = 0
    kv_bytes: int = 0
    feature_bytes_read: int = 0
    prefill_flops: int = 0
    answer_flops: int = 0
    texts: int = 0
    text_batches: int = 0
    text_tokens: int = 0
    text_padded_tokens: int = 0
    text_flops: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(**{name: value + getattr(other, name) for name, value in self.as_dict().items()})

    def scaled(self, factor: float) -> Work:
        """So many times as much."""
        return Work(**{name: round(value * factor) for name, value in self.as_dict().items()})

    def as_dict(self) -> dict[str, int]:
        """By name."""
        return dataclasses.asdict(self)

    @classmethod
    def from_counts(cls, counts: Mapping[str, int]) -> Work:
        """The inverse of `as_dict`; absent names are 0, others are ignored."""
        return cls(**{name: counts[name] for name in cls.__slots__ if name in counts})


def encode_work(batches: Sequence[tuple[int, Sequence[EncodedMedia]]], network: Network) -> Work:
    """Of encoder batches: the tokens that each computes, padding included, and its items.

    Each of the t parts of an item (frames, temporal patches, tiles) attends to itself only. The operations are those of
    what is computed: with its padding, a batch does as many more as it has more tokens.
    """
    total = Work()
    for computed, items in batches:
        patches = sum(item.patches for item in items)
        flops = sum(item.grid[0] * network.forward_flops(item.grid[1] * item.grid[2]) for item in items)
        total += Work(
            encodes=len(items),
            encode_batches=1,
            feature_tokens=sum(item.feature_length for item in items),
            patches=patches,
            computed_tokens=computed,
            frame_bytes=sum(item.frame_bytes for item in items),
            store_bytes=sum(item.store_bytes for item in items),
            decode_core_ms=round(1e3 * sum(item.decode_seconds for item in items)),
            encoder_flops=flops * computed // max(1, patches),
        )
    return total


def prompt_work(batches: Sequence[Sequence[int]], network: Network, *, max_new_tokens: int, kv_cache: KvCache) -> Work:
    """Of batches of prompts, given by their lengths. Answers are counted as long as they may become."""
    total = Work()
    for lengths in batches:
        longest = max(lengths)
        total += Work(
            prompts=len(lengths),
            prompt_batches=1,
            prompt_tokens=sum(lengths),
            prompt_padded_tokens=sum(longest - length for length in lengths),
            most_answer_tokens=len(lengths) * max_new_tokens,
            kv_bytes=len(lengths) * kv_cache.most_bytes(longest, max_new_tokens),
            prefill_flops=len(lengths) * network.forward_flops(longest, causal=True),
            answer_flops=len(lengths) * network.answer_flops(longest, max_new_tokens),
        )
    return total


def text_work(batches: Sequence[Sequence[int]], network: Network) -> Work:
    """Of batches of texts or pairs, given by the lengths of runs that are padded to their longest."""
    total = Work()
    for lengths in batches:
        longest = max(lengths)
        total += Work(
            texts=len(lengths),
            text_batches=1,
            text_tokens=sum(lengths),
            text_padded_tokens=sum(longest - length for length in lengths),
            text_flops=len(lengths) * network.forward_flops(longest),
        )
    return total


def second_question(stages_ms: Mapping[str, float]) -> dict[str, float]:
    """What an item takes whose first question took `stages_ms`: asked `first`, again where its features are in the
    store but its media are read and decoded anew (`features_reused`), and where those are not touched, either
    (`media_reused`)."""

    def without(*gone: Iterable[str]) -> float:
        left = stages_ms.keys() - frozenset().union(*gone)
        return sum(stages_ms[name] for name in left)

    return {
        "first": without(),
        "features_reused": without(ENCODING_STAGES),
        "media_reused": without(ENCODING_STAGES, DECODING_STAGES),
    }


def break_even_months(num_bytes: int, recompute_cost: float, price_gb_month: float) -> float | None:
    """How long features may be held for what computing them once more costs; GB of 10^9 bytes. None: for ever."""
    held = num_bytes / 1e9 * price_gb_month
    return recompute_cost / held if held else None
