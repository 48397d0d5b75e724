"""Records survive their bytes, and other people's safetensors readers see the same tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import json

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from sample_records import features, keyed_record

from pipeline.features.codec import FeatureRecord, TensorView, decode_record, encode_record, same_terms
from pipeline.schema import Geometry, Placeholder

VIDEO = Geometry(
    grid=(4, 16, 18),
    merge_size=2,
    feature_length=288,
    original_size=(1080, 1920),
    resized_size=(256, 288),
    timestamps=(0.0, 1 / 3, 2.5, 4.0),
)


def record_of(container: str, unit: str, tensors: dict[str, TensorView]) -> FeatureRecord:
    _, plain = keyed_record(1)
    return dataclasses.replace(
        plain,
        tensors=tensors,
        container=container,
        unit=unit,
        geometry=VIDEO,
        placeholder=Placeholder(text="<0.2 seconds><video>, <2.5 seconds><video>", runs=(144, 144)),
        slot="video",
        inputs={"video_grid_thw": TensorView.of(np.array([VIDEO.grid], np.int64))},
    )


def bfloat16(values: np.ndarray) -> TensorView:
    words = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    return TensorView.of(words, "bfloat16")


RECORDS = {
    "tensor": record_of("tensor", "item", {"pooler_output": TensorView.of(features(1))}),
    "half": record_of("tensor", "item", {"pooler_output": TensorView.of(features(2).astype(np.float16))}),
    "bfloat16": record_of("tensor", "item", {"pooler_output": bfloat16(features(3))}),
    "tuple": record_of("tuple", "tile", {f"pooler_output.{i}": TensorView.of(features(i, i + 1)) for i in range(3)}),
    "levels": record_of(
        "levels",
        "frame",
        {
            "pooler_output": bfloat16(features(4)),
            **{f"deepstack_features.{i}": bfloat16(features(i)) for i in range(3)},
        },
    ),
    "odd sizes": record_of(
        "tuple",
        "item",
        {
            "mask": TensorView.of(np.array([True, False, True])),
            "empty": TensorView.of(np.zeros((0, 64), np.float32)),
            "scale": TensorView.of(np.array(2.5)),
            "column": TensorView.of(features(5)[:, ::7]),
        },
    ),
}


@pytest.mark.parametrize("name", RECORDS)
def test_round_trip(name: str) -> None:
    record = RECORDS[name]
    back = decode_record(encode_record(record))
    assert back.key_terms == record.key_terms
    assert (back.container, back.unit, back.geometry) == (record.container, record.unit, record.geometry)
    assert (back.slot, back.placeholder) == ("video", record.placeholder)
    assert back.inputs["video_grid_thw"].numpy().tolist() == [[4, 16, 18]]
    assert back.tensors.keys() == record.tensors.keys()
    for key, tensor in record.tensors.items():
        assert (back.tensors[key].dtype, back.tensors[key].shape) == (tensor.dtype, tensor.shape)
        assert back.tensors[key].numpy().tobytes() == tensor.numpy().tobytes()


@pytest.mark.parametrize("name", RECORDS)
def test_safetensors_reads_the_same(name: str) -> None:
    record = RECORDS[name]
    by_torch = safetensors.torch.load(encode_record(record))
    assert by_torch.pop("input.video_grid_thw").tolist() == [[4, 16, 18]]
    assert by_torch.keys() == record.tensors.keys()
    for key, tensor in record.tensors.items():
        assert str(by_torch[key].dtype) == f"torch.{tensor.dtype}" and tuple(by_torch[key].shape) == tensor.shape
        assert by_torch[key].reshape(-1).view(torch.uint8).numpy().tobytes() == bytes(tensor.data)


@pytest.mark.parametrize("prompt", ["", "a", "ab", "abc"])
def test_tensors_start_at_an_8_byte_boundary(prompt: str) -> None:
    _, record = keyed_record(1)
    data = encode_record(dataclasses.replace(record, key_terms={**record.key_terms, "prompt": prompt}))
    assert int.from_bytes(data[:8], "little") % 8 == 0


def test_numpy_reader_agrees_on_values() -> None:
    assert np.array_equal(safetensors.numpy.load(encode_record(RECORDS["tensor"]))["pooler_output"], features(1))


def test_decoding_copies_nothing_and_tensors_are_aligned() -> None:
    data = np.frombuffer(encode_record(RECORDS["odd sizes"]), np.uint8)
    for tensor in decode_record(data.data).tensors.values():
        array = tensor.numpy()
        assert array.flags.aligned
        assert array.size == 0 or np.shares_memory(array, data)


def test_reads_what_safetensors_wrote() -> None:
    facts = json.loads(encode_record(RECORDS["tensor"])[8:].split(b"\x00")[0].rsplit(b"}", 1)[0] + b"}")["__metadata__"]
    tensors = {"pooler_output": features(6), "input.video_grid_thw": np.array([[1, 2, 3]])}
    back = decode_record(safetensors.numpy.save(tensors, metadata=facts))
    assert np.array_equal(back.tensors["pooler_output"].numpy(), features(6))
    assert back.inputs["video_grid_thw"].numpy().tolist() == [[1, 2, 3]]


def test_malformed_bytes_are_refused() -> None:
    whole = encode_record(RECORDS["levels"])
    header_end = 8 + int.from_bytes(whole[:8], "little")
    for end in [0, 4, 8, 20, header_end - 1, header_end, len(whole) - 1]:
        with pytest.raises(ValueError, match="not a feature record"):
            decode_record(whole[:end])
    assert whole.count(b"[1048,2072]") == 1
    for bad in [
        whole.replace(b"[1048,2072]", b"[24,1048]  "),  # two tensors in one place
        whole + b"\0",
        b"\xff" * 64,
        whole.replace(b'"BF16"', b'"BF61"', 1),
        whole.replace(b"[0,", b"[8,", 1),
        whole.replace(b"[8,64]", b"[8,63]", 1),
        safetensors.numpy.save({"pooler_output": features(1)}),
    ]:
        with pytest.raises(ValueError, match="not a feature record"):
            decode_record(bad)


def test_flipped_header_bytes_never_raise_anything_else() -> None:
    whole = bytearray(encode_record(RECORDS["tensor"]))
    for position in range(8 + int.from_bytes(whole[:8], "little")):
        for flip in (0x01, 0x80):
            whole[position] ^= flip
            with contextlib.suppress(ValueError):
                dict(decode_record(bytes(whole)).key_terms)
            whole[position] ^= flip


@pytest.mark.parametrize(
    "change",
    [
        {"container": "list"},
        {"unit": "video"},
        {"tensors": {}},
        {"tensors": {"input.pooler_output": TensorView.of(features(1))}},
    ],
)
def test_records_check_themselves(change: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        dataclasses.replace(RECORDS["tensor"], **change)


def test_tensor_views_check_themselves_and_print_no_data() -> None:
    with pytest.raises(ValueError, match="takes 24 bytes, got 8"):
        TensorView(dtype="float32", shape=(2, 3), data=bytes(8))
    with pytest.raises(ValueError, match="complex64"):
        TensorView.of(np.zeros(2, np.complex64))
    assert repr(TensorView.of(features(1))) == "TensorView(float32[8, 64])"


def test_what_records_have_in_common_is_told_apart() -> None:
    """Headers are made and read once for records of one shape: what differs in any way has its own."""
    record = RECORDS["tensor"]
    view = record.tensors["pooler_output"]
    others = {
        "slot": dataclasses.replace(record, slot="image"),
        "unit": dataclasses.replace(record, unit="frame"),
        "geometry": dataclasses.replace(record, geometry=dataclasses.replace(record.geometry, duration_seconds=1.25)),
        "placeholder": dataclasses.replace(record, placeholder=Placeholder(text=',"placeholder":{', runs=(4,))),
        "name": dataclasses.replace(record, tensors={"other": view}),
        "shape": dataclasses.replace(
            record, tensors={"pooler_output": dataclasses.replace(view, shape=(1, *view.shape))}
        ),
    }
    for field, other in others.items():
        for each in (record, other, record):
            back = decode_record(encode_record(each))
            assert encode_record(back) == encode_record(each), field
            assert (back.slot, back.unit, back.geometry) == (each.slot, each.unit, each.geometry)
            assert back.placeholder == each.placeholder
            assert {n: t.shape for n, t in back.tensors.items()} == {n: t.shape for n, t in each.tensors.items()}


@pytest.mark.parametrize("seconds", [0.0, 1.5e-6, 0.25, 98765.4])
def test_what_it_took_to_make_changes_neither_length_nor_terms(seconds: float) -> None:
    plain = encode_record(RECORDS["tensor"])
    timed = encode_record(dataclasses.replace(RECORDS["tensor"], made_seconds=seconds))
    assert len(timed) == len(plain)
    back = decode_record(timed)
    assert back.made_seconds == pytest.approx(seconds, rel=1e-3)
    assert same_terms(back.key_terms, RECORDS["tensor"].key_terms)
    facts = json.loads(json.loads(timed[8 : 8 + int.from_bytes(timed[:8], "little")])["__metadata__"]["headrace"])
    assert facts["made_seconds"] == back.made_seconds  # for whoever reads it as JSON


def test_records_of_before_that_was_kept_are_read() -> None:
    header, body = RECORDS["tensor"], encode_record(RECORDS["tensor"])
    length = int.from_bytes(body[:8], "little")
    text = body[8 : 8 + length].replace(rb",\"made_seconds\":0.000e+00", b"")
    text += b" " * (-len(text) % 8)
    back = decode_record(len(text).to_bytes(8, "little") + text + body[8 + length :])
    assert (back.made_seconds, dict(back.key_terms)) == (0.0, dict(header.key_terms))
    assert np.array_equal(back.tensors["pooler_output"].numpy(), features(1))


@pytest.mark.parametrize(
    "text", ['","made_seconds":1', '","placeholder":{', '\\"key_terms\\":', "\\", '"', "é\n\u2028", "}"]
)
def test_terms_of_any_text_come_back(text: str) -> None:
    terms = {"content": text, "placeholder": text, "sampling": [0.5], "resized_size": [4, 8]}
    back = decode_record(encode_record(dataclasses.replace(RECORDS["tensor"], key_terms=terms)))
    assert dict(back.key_terms) == terms and len(back.key_terms) == 4
    assert same_terms(back.key_terms, terms) and not same_terms(back.key_terms, terms | {"content": text + "x"})
