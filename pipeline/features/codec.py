"""One item's features as bytes: a single `safetensors` blob that any safetensors reader opens. Never pickle.

Written here rather than by `safetensors.serialize`, whose Python signature changed between 0.5 and 0.8; the layout is
that of https://huggingface.co/docs/safetensors: 8 bytes little-endian header length, JSON header padded with spaces to
8 bytes, tensors without gaps, largest alignment first. bfloat16, which numpy lacks, travels as its raw 2-byte words.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from pipeline.features.identity import canonical_json
from pipeline.schema import Geometry, Modality, Placeholder

Container = Literal["tensor", "tuple", "levels"]
Unit = Literal["item", "tile", "frame"]
Buffer = bytes | memoryview
_Place = tuple[str, str, tuple[int, ...], int, int]  # a tensor's name, dtype, shape, first byte and end

_CONTAINERS, _UNITS = get_args(Container), get_args(Unit)
_INPUT = "input."
_METADATA = "__metadata__"
_RECORD = "headrace"
_BEFORE_TERMS, _AFTER_TERMS = rb"\"key_terms\":", rb",\"placeholder\":{"
_MADE = rb",\"made_seconds\":"
# dtype → (its name in safetensors, bytes an element, the numpy dtype that carries it)
_DTYPES: dict[str, tuple[str, int, str]] = {
    "float64": ("F64", 8, "<f8"),
    "float32": ("F32", 4, "<f4"),
    "float16": ("F16", 2, "<f2"),
    "bfloat16": ("BF16", 2, "<u2"),
    "int64": ("I64", 8, "<i8"),
    "int32": ("I32", 4, "<i4"),
    "int16": ("I16", 2, "<i2"),
    "int8": ("I8", 1, "i1"),
    "uint8": ("U8", 1, "u1"),
    "bool": ("BOOL", 1, "?"),
}
_NAMES = {code: name for name, (code, _, _) in _DTYPES.items()}


def encode_record(record: FeatureRecord) -> bytes:
    """`record` as one safetensors blob: tensors, `inputs` behind a prefix, all else as JSON in the metadata."""
    return b"".join(encode_parts(record))


def encode_parts(record: FeatureRecord) -> list[Buffer]:
    """What `encode_record` puts together; the tensors' own bytes are not copied."""
    tensors = {**record.tensors, **{f"{_INPUT}{name}": view for name, view in record.inputs.items()}}
    order = sorted(tensors, key=lambda name: (-_DTYPES[tensors[name].dtype][1], name))
    shapes = tuple((name, tensors[name].dtype, tensors[name].shape) for name in order)
    before, after = _header_around_terms(
        record.container, record.unit, record.slot, record.geometry, record.placeholder, shapes
    )
    terms = json.dumps(_terms_text(record.key_terms))[1:-1].encode()
    text = b"".join((before, terms, _MADE, b"%.3e" % record.made_seconds, after))  # of one length, whatever it took
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, *(tensors[name].data for name in order)]


def decode_record(buffer: Buffer) -> FeatureRecord:
    """The record in `buffer`; its tensors are views that keep `buffer` alive, its key terms are parsed when asked for.

    Raises `ValueError` when `buffer` is not a whole record.
    """
    view = memoryview(buffer)
    body = 8 + int.from_bytes(view[:8], "little")
    try:
        if view.nbytes < 8 or body > view.nbytes:
            raise ValueError(f"the header ends at byte {body}")
        before, own, after = _split(bytes(view[8:body]))
        terms, _, made = own.rpartition(_MADE) if not own.endswith(b"}") else (own, b"", b"0")
        if terms[:1] != b"{" or terms[-1:] != b"}":
            raise ValueError(f"its key terms are {terms[:80]!r}")
        layout, made_seconds = _layout(before, after), float(made)
        if body + layout.num_bytes != view.nbytes:
            raise ValueError(f"the last tensor ends at byte {body + layout.num_bytes}")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"not a feature record ({view.nbytes} bytes): {type(error).__name__}: {error}") from error
    return layout.record(KeptTerms(terms), made_seconds, view[body:])


def same_terms(terms: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """True when both are written alike; only then do they have one key."""
    return _terms_text(terms) == _terms_text(others)


def _terms_text(terms: Mapping[str, Any]) -> str:
    return terms.text if isinstance(terms, KeptTerms) else canonical_json(dict(terms)).decode()


# Headers of records of one shape are alike but for their key terms: made once, read once. Measured on a busy machine:
# 20 µs instead of 56 to make a record's, 5 instead of 28 to read it.
_ALIKE = 1024


@functools.lru_cache(_ALIKE)
def _header_around_terms(
    container: str,
    unit: str,
    slot: str,
    geometry: Geometry,
    placeholder: Placeholder,
    shapes: tuple[tuple[str, str, tuple[int, ...]], ...],
) -> tuple[bytes, bytes]:
    """What stands before a record's key terms in its header, and what after them; unpadded."""
    facts = {
        "key_terms": {},
        "container": container,
        "unit": unit,
        "slot": slot,
        "geometry": dataclasses.asdict(geometry),
        "placeholder": dataclasses.asdict(placeholder),
    }
    header: dict[str, Any] = {_METADATA: {_RECORD: canonical_json(facts).decode()}}
    end = 0
    for name, dtype, shape in shapes:
        code, item_bytes, _ = _DTYPES[dtype]
        start, end = end, end + math.prod(shape) * item_bytes
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [start, end]}
    before, _, after = _split(json.dumps(header, separators=(",", ":")).encode())
    return before, after


def _split(header: bytes) -> tuple[bytes, bytes, bytes]:
    """What stands before the key terms, they themselves with the time that follows them, and what stands after that;
    without padding.

    The marks are quoted once, as nothing is that lies within a string of the record's JSON.
    """
    start = header.index(_BEFORE_TERMS) + len(_BEFORE_TERMS)
    stop = header.rindex(_AFTER_TERMS)
    return header[:start], header[start:stop], header[stop:].rstrip(b" ")


@functools.lru_cache(_ALIKE)
def _layout(before: bytes, after: bytes) -> _Layout:
    """What records have in common whose headers are these around their key terms. Raises what a parser raises."""
    header = json.loads(before + b"{}" + after)
    facts = json.loads(header.pop(_METADATA)[_RECORD])
    tensors = []
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: tuple(item[1]["data_offsets"])):
        start, stop = entry["data_offsets"]
        if start != end or stop < start:
            raise ValueError(f"tensor {name!r} lies at bytes {start} to {stop}")
        end = stop
        dtype, shape = _NAMES[entry["dtype"]], tuple(entry["shape"])
        _check_size(dtype, shape, stop - start)
        tensors.append((name, dtype, shape, start, stop))
    layout = _Layout(
        container=facts["container"],
        unit=facts["unit"],
        slot=facts["slot"],
        geometry=Geometry(**{name: _tupled(value) for name, value in facts["geometry"].items()}),
        placeholder=Placeholder(text=facts["placeholder"]["text"], runs=tuple(facts["placeholder"]["runs"])),
        tensors=tuple(each for each in tensors if not each[0].startswith(_INPUT)),
        inputs=tuple((n.removeprefix(_INPUT), d, s, a, b) for n, d, s, a, b in tensors if n.startswith(_INPUT)),
        num_bytes=end,
    )
    _check_record(layout.container, layout.unit, [name for name, *_ in layout.tensors])
    return layout


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _check_size(dtype: str, shape: tuple[int, ...], held: int) -> None:
    if dtype not in _DTYPES:
        raise ValueError(f"dtype is one of {', '.join(_DTYPES)}, got {dtype!r}")
    num_bytes = math.prod(shape) * _DTYPES[dtype][1]
    if num_bytes != held or min(shape, default=0) < 0:
        raise ValueError(f"{dtype} {shape} takes {num_bytes} bytes, got {held}")


def _check_record(container: str, unit: str, names: Sequence[str]) -> None:
    if container not in _CONTAINERS or unit not in _UNITS:
        raise ValueError(f"unknown container or unit: {container = }, {unit = }")
    reserved = [name for name in names if name == _METADATA or name.startswith(_INPUT)]
    if not names or reserved:
        raise ValueError(f"a record has tensors, none named {_INPUT}*; got {list(names)}")


class KeptTerms(Mapping[str, Any]):
    """Key terms as they stand in a record's header, parsed when they are first asked for."""

    __slots__ = ("_escaped", "_parsed", "_text")

    def __init__(self, escaped: bytes) -> None:
        self._escaped = escaped
        self._text: str | None = None
        self._parsed: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        """Their JSON, as it was written: `canonical_json` of what they were."""
        if self._text is None:
            self._text = json.loads(b'"' + self._escaped + b'"')
        return self._text

    def as_dict(self) -> dict[str, Any]:
        """The terms as they were put."""
        if self._parsed is None:
            self._parsed = json.loads(self.text)
        return self._parsed

    def __getitem__(self, name: str) -> Any:
        return self.as_dict()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.as_dict())

    def __len__(self) -> int:
        return len(self.as_dict())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Layout:
    """What records have in common that differ in key terms and numbers only; sizes are checked."""

    container: Container
    unit: Unit
    slot: Modality
    geometry: Geometry
    placeholder: Placeholder
    tensors: tuple[_Place, ...]
    inputs: tuple[_Place, ...]
    num_bytes: int

    def record(self, key_terms: KeptTerms, made_seconds: float, body: memoryview) -> FeatureRecord:
        record = _new(FeatureRecord)
        _set(record, "made_seconds", made_seconds)
        _set(record, "key_terms", key_terms)
        _set(record, "tensors", {each[0]: _view(each, body) for each in self.tensors})
        _set(record, "inputs", {each[0]: _view(each, body) for each in self.inputs})
        _set(record, "container", self.container)
        _set(record, "unit", self.unit)
        _set(record, "slot", self.slot)
        _set(record, "geometry", self.geometry)
        _set(record, "placeholder", self.placeholder)
        return record


# Records and views of a layout that was checked are made without checking each again: 2 µs instead of 5.
_new = object.__new__
_set = object.__setattr__


def _view(place: _Place, body: memoryview) -> TensorView:
    _, dtype, shape, start, stop = place
    view = _new(TensorView)
    _set(view, "dtype", dtype)
    _set(view, "shape", shape)
    _set(view, "data", body[start:stop])
    return view


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TensorView:
    """A dense, little-endian, row-major tensor in somebody's buffer. Raises `ValueError` when the sizes disagree."""

    dtype: str
    shape: tuple[int, ...]
    data: Buffer

    def __post_init__(self) -> None:
        _check_size(self.dtype, self.shape, memoryview(self.data).nbytes)

    def __repr__(self) -> str:
        return f"TensorView({self.dtype}{list(self.shape)})"

    @classmethod
    def of(cls, array: npt.NDArray[Any], dtype: str | None = None) -> TensorView:
        """A view of `array` (copied when not contiguous); `dtype="bfloat16"` says that uint16 words are bfloat16."""
        dense = np.ascontiguousarray(array).reshape(array.shape)
        return cls(dtype=dtype or str(array.dtype), shape=array.shape, data=dense.reshape(-1).view(np.uint8).data)

    def numpy(self) -> npt.NDArray[Any]:
        """The tensor without a copy; bfloat16 comes as uint16 words of the same shape."""
        return np.frombuffer(self.data, dtype=_DTYPES[self.dtype][2]).reshape(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FeatureRecord:
    """What an encoder said about one item, with everything needed to use it again without its pixels.

    `container` is how the model returns its features (one tensor; a tuple, one tensor an item; levels, each split by
    item) and `unit` what one tensor covers. `slot` is which of the model's encoders made them, `inputs` what the
    language model is told of the item besides (grid, size). `key_terms` is `FeatureKeyTerms.as_dict()`, compared on
    every hit. `made_seconds` is the time of workers that it took to make it, from its media on; 0 where nobody knows.
    """

    key_terms: Mapping[str, Any]
    tensors: dict[str, TensorView]
    container: Container
    unit: Unit
    geometry: Geometry
    placeholder: Placeholder
    slot: Modality
    inputs: dict[str, TensorView] = field(default_factory=dict)
    made_seconds: float = 0.0

    def __post_init__(self) -> None:
        _check_record(self.container, self.unit, list(self.tensors))
