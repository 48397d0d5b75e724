"""What a request's key-value cache takes, from the numbers of a model's configuration. Pure.

A layer that attends to every token keeps 2 * n_kv * d_h * b bytes of each: keys and values, key-value heads, head size,
bytes a number. Of L such layers and N tokens: 2 * L * N * n_kv * d_h * b (Pope et al., arXiv:2211.05102, section 3.3;
Ainslie et al., arXiv:2305.13245, for fewer key-value heads than queries). Layers differ:

- a sliding window of w tokens keeps w - 1 between steps, since the next token is itself one of the w (Beltagy et al.,
  arXiv:2004.05150; transformers, `cache_utils.py`, `DynamicSlidingWindowLayer`);
- a layer that uses another's keys and values keeps none (Brandon et al., arXiv:2405.12981);
- multi-head latent attention keeps one latent and one rotary key a token (DeepSeek-V2, arXiv:2405.04434, section 2.1);
- linear attention and convolutions keep a state of one size (Yang et al., arXiv:2412.06464).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCache:
    """What one layer keeps: `token_bytes` of each token within its `window` (None: of all), and `state_bytes`."""

    token_bytes: int = 0
    window: int | None = None
    state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class KvCache:
    """The layers' caches together. `windows` has (tokens kept between steps, bytes a token); `state_bytes` is fixed."""

    full_token_bytes: int
    windows: tuple[tuple[int, int], ...] = ()
    state_bytes: int = 0

    @classmethod
    def of_layers(cls, layers: Iterable[LayerCache]) -> KvCache:
        """Layers of one window counted together."""
        full, state = 0, 0
        windows: dict[int, int] = defaultdict(int)
        for layer in layers:
            state += layer.state_bytes
            if layer.window is None:
                full += layer.token_bytes
            else:
                windows[layer.window - 1] += layer.token_bytes
        return cls(full, tuple(sorted(windows.items())), state)

    @property
    def token_bytes(self) -> int:
        """Of one token that is within every window."""
        return self.full_token_bytes + sum(token_bytes for _, token_bytes in self.windows)

    def kept_bytes(self, num_tokens: int) -> int:
        """Of a request of `num_tokens` tokens, prompt and answer, between two steps."""
        windowed = sum(min(num_tokens, kept) * token_bytes for kept, token_bytes in self.windows)
        return self.state_bytes + num_tokens * self.full_token_bytes + windowed

    def most_bytes(self, prompt_tokens: int, new_tokens: int) -> int:
        """The most that a request takes, its answer as long as it may become.

        Prefill computes keys and values of the whole prompt, and windows are cut out of them as views: until the first
        step after it, every layer holds the whole prompt (measured, transformers 5.24: Gemma 3, 50 tokens, window 16).
        """
        prefill = self.state_bytes + prompt_tokens * self.token_bytes
        return max(prefill, self.kept_bytes(prompt_tokens + new_tokens))


def attention_bytes(*, num_heads: int, key_size: int, value_size: int, number_bytes: int) -> int:
    """Of a token in one layer: keys and values of `num_heads` key-value heads."""
    return num_heads * (key_size + value_size) * number_bytes
