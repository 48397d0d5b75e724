"""What makes two encodings of an item the same: the terms of a feature key; and two decodings: those of a frame key.

| term             | changes the numbers because                                                                  |
| ---------------- | -------------------------------------------------------------------------------------------- |
| `tenant`         | it does not; it keeps one tenant's features from answering for another's                     |
| `content`        | other media                                                                                  |
| `sampling`       | other frames: the requested presentation times in seconds; empty for images                  |
| `decode_backend` | decoders differ in rounding, colour conversion and chroma upsampling; with its version;      |
|                  | of a page, also the size at which it is drawn before it is resized; of an image, the         |
|                  | background and the rule for truncated files where they are not the default                   |
| `decode_rules`   | what headrace makes of the libraries' pixels; raised when that changes                       |
| `resize_backend` | PIL and torchvision differ by up to 2 levels a pixel; with its version; for JPEGs whether    |
|                  | their decoder has scaled them before                                                         |
| `resized_size`   | other pixels, other grid: (height, width)                                                    |
| `processor`      | digest of the processor's configuration: mean, std, patch and merge size, rescale factor     |
| `weights`        | digest of tower *and* projector with their adapters, not of the language model               |
| `precision`      | the dtype the tower computed in                                                              |
| `placeholder`    | layout of the placeholder ids that are stored beside the features                            |
| `prompt`         | the text a prompt-conditioned encoder read; empty for every other encoder                    |

The key of decoded frames has `tenant`, `content`, `sampling`, `decode_backend`, `decode_rules`, `resize_backend` and
`resized_size` of these, and a term more. Nothing else is in it: any model that is shown frames of one size shares them.

| term             | changes the pixels because                                                                   |
| ---------------- | -------------------------------------------------------------------------------------------- |
| `cropped_size`   | only the middle is kept: (height, width), where the model's processor crops; else None       |

Pure: standard library only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KEY_DIGITS = 40


def canonical_json(value: Any) -> bytes:
    """One spelling for equal values: sorted keys, no spaces, tuples as lists, floats by `repr`.

    Raises `ValueError` for NaN and infinities, `TypeError` for what JSON cannot hold.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def key_of(terms: Mapping[str, Any]) -> str:
    """The key of a record with these terms: the first 40 hex digits of SHA-256 over `canonical_json(terms)`."""
    return hashlib.sha256(canonical_json(terms)).hexdigest()[:KEY_DIGITS]


class _KeyTerms:
    """What terms have in common: how they are spelled, and the digest that is the key. Fields are the subclass's."""

    __slots__: tuple[str, ...] = ()

    content: str
    sampling: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.content:
            raise ValueError("a key needs the content it stands for, such as 'sha256:<hex>'; got ''")

    def as_dict(self) -> dict[str, Any]:
        """The terms as JSON gives them back from a record; 1 and 1.0 seconds are one time."""
        terms = {name: getattr(self, name) for name in self.__slots__}  # asdict copies deeply: ten times the time
        lists = {name: list(value) for name, value in terms.items() if isinstance(value, tuple)}
        return terms | lists | {"sampling": [float(t) for t in self.sampling]}

    def digest(self) -> str:
        """The key, as `key_of(as_dict())` gives it."""
        return key_of(self.as_dict())


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureKeyTerms(_KeyTerms):
    """The terms of the key of one item's features; the module's table says what each is for."""

    tenant: str
    content: str
    sampling: tuple[float, ...]
    decode_backend: str
    decode_rules: int
    resize_backend: str
    resized_size: tuple[int, int]
    processor: str
    weights: str
    precision: str
    placeholder: str
    prompt: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameKeyTerms(_KeyTerms):
    """The terms of the key of one item's decoded frames: what changes their pixels, whatever model sees them."""

    tenant: str
    content: str
    sampling: tuple[float, ...]
    decode_backend: str
    decode_rules: int
    resize_backend: str
    resized_size: tuple[int, int]
    cropped_size: tuple[int, int] | None
