"""The pooling contract: what lies between a model's hidden states and a stored vector or score. Pure.

Six fields, pinned in the configuration and written with every output. A vector answers for its item only beside
vectors of an equal contract (and equal weights), so its digest is a term of their keys.

| field           | says                                                                                              |
| --------------- | ------------------------------------------------------------------------------------------------- |
| `method`        | which hidden states make the vector                                                               |
| `normalisation` | whether vectors are brought to length 1, before or after their dimensions are cut                 |
| `truncation`    | the most tokens a text may have, special tokens and prompt included, and which end goes           |
| `padding`       | on which side, how far, and whether padding takes part in the result                              |
| `output`        | one vector or one a token, scores or scores a token; how many leading dimensions (Matryoshka)     |
| `item_order`    | the order results come in: that of the input                                                      |
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from pipeline.errors import ConfigError
from pipeline.features.identity import canonical_json

Method = Literal["mean", "cls", "last_token", "none", "model"]
Side = Literal["left", "right"]
Shape = Literal["vector", "token_vectors", "scores", "token_scores"]
_PER_TOKEN: tuple[Shape, ...] = ("token_vectors", "token_scores")


def _check(name: str, value: object, allowed: Any) -> None:
    if value not in get_args(allowed):
        raise ValueError(f"{name} is one of {', '.join(map(str, get_args(allowed)))}, got {value!r}")


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is a whole number above 0, got {value!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Normalisation:
    """`l2` divides by the Euclidean norm. Normalised `before` its dimensions are cut, a vector is shorter than 1."""

    kind: Literal["none", "l2"]
    when: Literal["before", "after"] = "after"

    def __post_init__(self) -> None:
        _check("normalisation.kind", self.kind, Literal["none", "l2"])
        _check("normalisation.when", self.when, Literal["before", "after"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Truncation:
    """At most `max_tokens`, cut at `side`; of a pair, the longer text loses tokens first ("longest_first")."""

    side: Side
    max_tokens: int

    def __post_init__(self) -> None:
        _check("truncation.side", self.side, Side)
        _check_count("truncation.max_tokens", self.max_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Padding:
    """Texts of a batch are padded at `side`, to the longest of them or always to `truncation.max_tokens`.

    `excluded` is whether padding stays out of the result; only a family's own pooling may let it in (SigLIP does).
    """

    side: Side
    to: Literal["longest", "max_tokens"] = "longest"
    excluded: bool = True

    def __post_init__(self) -> None:
        _check("padding.side", self.side, Side)
        _check("padding.to", self.to, Literal["longest", "max_tokens"])
        _check("padding.excluded", self.excluded, Literal[True, False])


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """The shape of an item's result, and how many leading dimensions of a vector are kept; None keeps all."""

    shape: Shape
    dimensions: int | None = None

    def __post_init__(self) -> None:
        _check("output.shape", self.shape, Shape)
        if self.dimensions is not None:
            _check_count("output.dimensions", self.dimensions)


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolingContract:
    """The six fields; the module's table says what each is for.

    `method`: `mean` of all tokens, `cls` the first token, `last_token` the last that is not padding, `none` every
    token, `model` the pooled output or head of the model itself. `truncation` and `padding` are None for images.
    """

    method: Method
    normalisation: Normalisation
    truncation: Truncation | None
    padding: Padding | None
    output: Output
    item_order: Literal["input"] = "input"

    def __post_init__(self) -> None:
        _check("method", self.method, Method)
        _check("item_order", self.item_order, Literal["input"])
        if self.method != "model" and (self.method == "none") != (self.output.shape in _PER_TOKEN):
            raise ValueError(f"method {self.method!r} does not give output.shape {self.output.shape!r}")
        if self.method != "model" and self.padding is not None and not self.padding.excluded:
            raise ValueError(f"padding.excluded is true for method {self.method!r}: padding is no part of any text")

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON and YAML hold them; `from_dict` takes them back."""
        return asdict(self)

    def for_texts(self) -> tuple[Truncation, Padding]:
        """Truncation and padding, which a contract for texts has. Raises `ConfigError` where one is None."""
        if self.truncation is None or self.padding is None:
            raise ConfigError("pooling: truncation and padding are needed for texts, and must not be None")
        return self.truncation, self.padding

    def digest(self) -> str:
        """16 hex digits over `as_dict()`."""
        return hashlib.sha256(canonical_json(self.as_dict())).hexdigest()[:16]

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> PoolingContract:
        """Raises `ConfigError` naming the field that is unknown, missing or has a value that is not one of its own."""
        parts = {"normalisation": Normalisation, "truncation": Truncation, "padding": Padding, "output": Output}
        names = [field.name for field in fields(cls)]
        _refuse_others("pooling", raw, names)
        missing = [name for name in names if name not in raw and name != "item_order"]
        if missing:
            raise ConfigError(f"pooling: {', '.join(missing)} must be given")
        values = dict(raw)
        for name, part in parts.items():
            if values[name] is not None or name in ("normalisation", "output"):
                values[name] = _part(f"pooling.{name}", part, values[name])
        try:
            return cls(**values)
        except ValueError as error:
            raise ConfigError(f"pooling: {error}") from error

    def with_given(self, given: Mapping[str, Any]) -> PoolingContract:
        """This contract with the fields that `given` names, whole or in part. Raises `ConfigError` as `from_dict`."""
        merged = self.as_dict()
        for name, value in given.items():
            both = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
            merged[name] = {**merged[name], **value} if both else value
        return self.from_dict(merged)


def _part(where: str, part: Any, raw: object) -> Any:
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{where} is a mapping of {', '.join(f.name for f in fields(part))}, got {raw!r}")
    _refuse_others(where, raw, [field.name for field in fields(part)])
    try:
        return part(**raw)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from error


def _refuse_others(where: str, raw: Mapping[str, Any], names: list[str]) -> None:
    others = [str(name) for name in raw if name not in names]
    if others:
        raise ConfigError(f"{where}: {', '.join(others)} is not one of its fields, which are {', '.join(names)}")
