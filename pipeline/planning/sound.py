"""Feature lengths of sound, from its number of samples. Pure.

Formulas: transformers' `WhisperFeatureExtractor` and the convolutions of `WhisperEncoder` and `Qwen2AudioEncoder`.
"""

from __future__ import annotations

from dataclasses import dataclass

WINDOW_SECONDS = 30  # what these encoders see at once; shorter sound is padded to it


@dataclass(frozen=True, kw_only=True, slots=True)
class Stride:
    """One step that shortens a sequence: a convolution, or a pooling."""

    kernel: int
    step: int
    padding: int = 0

    def length(self, of: int) -> int:
        """Of what comes out, at least 0 (torch.nn.Conv1d, `L_out`)."""
        return max(0, (of + 2 * self.padding - self.kernel) // self.step + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class SoundRule:
    """From samples at `rate_hz` to frames of a spectrogram, one every `hop_samples`, and through `strides`."""

    rate_hz: int
    hop_samples: int
    strides: tuple[Stride, ...]
    pads_to_window: bool

    def frames(self, num_samples: int) -> int:
        """Of the spectrogram, of sound alone; what lies behind the window is not seen."""
        return -(-min(num_samples, WINDOW_SECONDS * self.rate_hz) // self.hop_samples)

    def feature_length(self, num_samples: int) -> int:
        """Rows that the encoder makes of a sound of `num_samples` > 0."""
        length = self.frames(WINDOW_SECONDS * self.rate_hz if self.pads_to_window else num_samples)
        for stride in self.strides:
            length = stride.length(length)
        return length


_WHISPER_STRIDES = (Stride(kernel=3, step=1, padding=1), Stride(kernel=3, step=2, padding=1))
# 30 s are 3,000 frames and 1,500 rows, however short the sound.
WHISPER = SoundRule(rate_hz=16_000, hop_samples=160, strides=_WHISPER_STRIDES, pads_to_window=True)
# The same, of which only the sound's own rows are kept, and pairs of them averaged: 40 ms each.
QWEN2_AUDIO = SoundRule(
    rate_hz=16_000, hop_samples=160, strides=(*_WHISPER_STRIDES, Stride(kernel=2, step=2)), pads_to_window=False
)
