"""A key changes with every term that changes the numbers, and with nothing else."""

from __future__ import annotations

import dataclasses
import hashlib
import math

import pytest
from sample_records import terms

from pipeline.features.identity import FeatureKeyTerms, FrameKeyTerms, canonical_json

FRAME_TERMS = FrameKeyTerms(
    tenant="acme",
    content="sha256:00",
    sampling=(0.0, 1.0),
    decode_backend="pillow 13",
    resize_backend="pil",
    resized_size=(32, 64),
    cropped_size=None,
    decode_rules=1,
)
OTHER = {
    "tenant": "globex",
    "content": "sha256:ff",
    "sampling": (0.0, 0.5),
    "decode_backend": "pillow 14",
    "resize_backend": "torchvision",
    "resized_size": (64, 32),
    "processor": "p1",
    "weights": "w1",
    "precision": "bfloat16",
    "placeholder": "layout1",
    "prompt": "what is this?",
    "cropped_size": (32, 32),
    "decode_rules": 2,
}


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(FeatureKeyTerms)])
def test_each_term_alone_moves_the_key(name: str) -> None:
    changed = dataclasses.replace(terms(0), **{name: OTHER[name]})
    assert changed.digest() != terms(0).digest()


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(FrameKeyTerms)])
def test_each_term_alone_moves_the_key_of_frames(name: str) -> None:
    assert dataclasses.replace(FRAME_TERMS, **{name: OTHER[name]}).digest() != FRAME_TERMS.digest()


def test_the_key_of_frames_is_sha256_over_the_spelled_out_terms() -> None:
    spelled = (
        '{"content":"sha256:00","cropped_size":null,"decode_backend":"pillow 13","decode_rules":1,'
        '"resize_backend":"pil","resized_size":[32,64],"sampling":[0.0,1.0],"tenant":"acme"}'
    )
    assert FRAME_TERMS.digest() == hashlib.sha256(spelled.encode()).hexdigest()[:40]


def test_times_that_differ_in_the_last_bit_differ() -> None:
    first, second = (dataclasses.replace(terms(0), sampling=(t,)) for t in (0.1, math.nextafter(0.1, 1)))
    assert first.digest() != second.digest()


def test_whole_seconds_are_one_time_however_they_are_typed() -> None:
    first, second = (dataclasses.replace(terms(0), sampling=(t,)) for t in (2, 2.0))
    assert first.digest() == second.digest()


def test_the_key_is_sha256_over_the_spelled_out_terms() -> None:
    spelled = (
        '{"content":"sha256:' + "0" * 64 + '","decode_backend":"pillow 13","decode_rules":1,"placeholder":"layout0",'
        '"precision":"float32","processor":"p0","prompt":"","resize_backend":"pil","resized_size":[32,64],'
        '"sampling":[],"tenant":"acme","weights":"w0"}'
    )
    assert terms(0).digest() == hashlib.sha256(spelled.encode()).hexdigest()[:40]


def test_canonical_json_has_one_spelling() -> None:
    assert canonical_json({"b": (1, 2.5), "a": "é"}) == '{"a":"é","b":[1,2.5]}'.encode()
    with pytest.raises(ValueError, match="JSON"):
        canonical_json({"a": math.nan})


def test_content_is_required() -> None:
    for each in (terms(0), FRAME_TERMS):
        with pytest.raises(ValueError, match="content"):
            dataclasses.replace(each, content="")
