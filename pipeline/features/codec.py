"""One item's features as bytes: a single `safetensors` blob that any safetensors reader opens. Never pickle.

Written here rather than by `safetensors.serialize`, whose Python signature changed between 0.5 and 0.8; the layout is
that of https://huggingface.co/docs/safetensors: 8 bytes little-endian header length, JSON header padded with spaces to
8 bytes, tensors without gaps, largest alignment first. bfloat16, which numpy lacks, travels as its raw 2-byte words.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from pipeline.features.identity import canonical_json
from pipeline.schema import Geometry, Modality, Placeholder

Container = Literal["tensor", "tuple", "levels"]
Unit = Literal["item", "tile", "frame"]

_CONTAINERS, _UNITS = get_args(Container), get_args(Unit)
_INPUT = "input."
_METADATA = "__metadata__"
_RECORD = "headrace"
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
    tensors = {**record.tensors, **{f"{_INPUT}{name}": view for name, view in record.inputs.items()}}
    order = sorted(tensors, key=lambda name: (-_DTYPES[tensors[name].dtype][1], name))
    header: dict[str, Any] = {_METADATA: {_RECORD: _describe(record)}}
    end = 0
    for name in order:
        start, end = end, end + len(tensors[name].data)
        code = _DTYPES[tensors[name].dtype][0]
        header[name] = {"dtype": code, "shape": list(tensors[name].shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *(tensors[name].data for name in order)])


def decode_record(buffer: memoryview | bytes) -> FeatureRecord:
    """The record in `buffer`; its tensors are views that keep `buffer` alive.

    Raises `ValueError` when `buffer` is not a whole record.
    """
    view = memoryview(buffer)
    try:
        tensors, text = _parse(view)
        facts = json.loads(text)
        geometry = {name: _tupled(value) for name, value in facts["geometry"].items()}
        return FeatureRecord(
            key_terms=facts["key_terms"],
            tensors={name: view for name, view in tensors.items() if not name.startswith(_INPUT)},
            inputs={n.removeprefix(_INPUT): view for n, view in tensors.items() if n.startswith(_INPUT)},
            placeholder=Placeholder(text=facts["placeholder"]["text"], runs=tuple(facts["placeholder"]["runs"])),
            slot=facts["slot"],
            container=facts["container"],
            unit=facts["unit"],
            geometry=Geometry(**geometry),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"not a feature record ({view.nbytes} bytes): {type(error).__name__}: {error}") from error


def _describe(record: FeatureRecord) -> str:
    facts = {
        "key_terms": record.key_terms,
        "container": record.container,
        "unit": record.unit,
        "slot": record.slot,
        "geometry": _plain(record.geometry),
        "placeholder": _plain(record.placeholder),
    }
    return canonical_json(facts).decode()


def _plain(value: Any) -> dict[str, Any]:
    # Not `asdict`, which copies every number of every tuple: a tenth of a millisecond for each record.
    return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _parse(view: memoryview) -> tuple[dict[str, TensorView], str]:
    """Tensors by name, and the record's JSON. Raises what a malformed blob makes its parser raise."""
    body = 8 + int.from_bytes(view[:8], "little")
    if view.nbytes < 8 or body > view.nbytes:
        raise ValueError(f"the header ends at byte {body}")
    header = json.loads(str(view[8:body], "utf-8"))
    text = header.pop(_METADATA)[_RECORD]
    tensors = {}
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: tuple(item[1]["data_offsets"])):
        start, stop = entry["data_offsets"]
        if start != end or stop < start or body + stop > view.nbytes:
            raise ValueError(f"tensor {name!r} lies at bytes {start} to {stop} of {view.nbytes - body}")
        end = stop
        data = view[body + start : body + stop]
        tensors[name] = TensorView(dtype=_NAMES[entry["dtype"]], shape=tuple(entry["shape"]), data=data)
    if body + end != view.nbytes:
        raise ValueError(f"{view.nbytes - body - end} bytes follow the last tensor")
    return tensors, text


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TensorView:
    """A dense, little-endian, row-major tensor in somebody's buffer. Raises `ValueError` when the sizes disagree."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview | bytes

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype is one of {', '.join(_DTYPES)}, got {self.dtype!r}")
        num_bytes, held = math.prod(self.shape) * _DTYPES[self.dtype][1], memoryview(self.data).nbytes
        if num_bytes != held or min(self.shape, default=0) < 0:
            raise ValueError(f"{self.dtype} {self.shape} takes {num_bytes} bytes, got {held}")

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
    every hit.
    """

    key_terms: dict[str, Any]
    tensors: dict[str, TensorView]
    container: Container
    unit: Unit
    geometry: Geometry
    placeholder: Placeholder
    slot: Modality
    inputs: dict[str, TensorView] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.container not in _CONTAINERS or self.unit not in _UNITS:
            raise ValueError(f"unknown container or unit: {self.container = }, {self.unit = }")
        reserved = [name for name in self.tensors if name == _METADATA or name.startswith(_INPUT)]
        if not self.tensors or reserved:
            raise ValueError(f"a record has tensors, none named {_INPUT}*; got {list(self.tensors)}")
