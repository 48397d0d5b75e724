import json
from typing import Any

import pytest
import yaml

from pipeline.errors import ConfigError
from pipeline.pooling.contract import Normalisation, Output, Padding, PoolingContract, Truncation

CONTRACT = PoolingContract(
    method="mean",
    normalisation=Normalisation(kind="l2", when="before"),
    truncation=Truncation(side="right", max_tokens=256),
    padding=Padding(side="right"),
    output=Output(shape="vector", dimensions=128),
)
SPELT_OUT: dict[str, Any] = {
    "method": "mean",
    "normalisation": {"kind": "l2", "when": "before"},
    "truncation": {"side": "right", "max_tokens": 256},
    "padding": {"side": "right", "to": "longest", "excluded": True},
    "output": {"shape": "vector", "dimensions": 128},
    "item_order": "input",
}


def test_a_contract_is_six_fields_that_json_and_yaml_hold() -> None:
    assert CONTRACT.as_dict() == SPELT_OUT
    for text in (json.dumps(SPELT_OUT), yaml.safe_dump(SPELT_OUT)):
        assert PoolingContract.from_dict(yaml.safe_load(text)) == CONTRACT


def test_images_have_neither_truncation_nor_padding() -> None:
    raw = SPELT_OUT | {"method": "model", "truncation": None, "padding": None}
    assert PoolingContract.from_dict(raw).as_dict() == raw


@pytest.mark.parametrize(
    "change",
    [
        {"method": "cls"},
        {"normalisation": {"when": "after"}},
        {"normalisation": {"kind": "none"}},
        {"truncation": {"side": "left"}},
        {"truncation": {"max_tokens": 255}},
        {"padding": {"side": "left"}},
        {"output": {"dimensions": None}},
        {"output": {"dimensions": 64}},
    ],
)
def test_every_field_is_part_of_the_digest(change: dict[str, Any]) -> None:
    changed = CONTRACT.with_given(change)
    assert changed.digest() != CONTRACT.digest()
    assert PoolingContract.from_dict(changed.as_dict()).digest() == changed.digest()


def test_given_fields_replace_whole_or_in_part() -> None:
    given = {"method": "cls", "output": {"dimensions": 7}, "padding": None}
    assert CONTRACT.with_given(given).as_dict() == SPELT_OUT | {
        "method": "cls",
        "output": {"shape": "vector", "dimensions": 7},
        "padding": None,
    }
    assert CONTRACT.with_given({}) == CONTRACT


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "average"}, "method is one of mean, cls, last_token, none, model, got 'average'"),
        ({"item_order": "any"}, "item_order is one of input, got 'any'"),
        ({"pool": "mean"}, "pool is not one of its fields, which are method, normalisation"),
        ({"normalisation": "l2"}, "pooling.normalisation is a mapping of kind, when, got 'l2'"),
        ({"normalisation": None}, "pooling.normalisation is a mapping"),
        ({"normalisation": {"kind": "l1"}}, "normalisation.kind is one of none, l2, got 'l1'"),
        ({"normalisation": {"when": "before"}}, "pooling.normalisation: .*'kind'"),
        ({"truncation": {"side": "right", "max_tokens": 0}}, "truncation.max_tokens is a whole number above 0, got 0"),
        ({"truncation": {"side": "right", "max_tokens": True}}, "max_tokens is a whole number above 0, got True"),
        ({"truncation": {"side": "top", "max_tokens": 3}}, "truncation.side is one of left, right, got 'top'"),
        ({"padding": {"side": "right", "until": 3}}, "pooling.padding: until is not one of its fields"),
        ({"padding": {"side": "right", "excluded": False}}, "padding.excluded is true for method 'mean'"),
        ({"output": {"shape": "vector", "dimensions": 1.5}}, "output.dimensions is a whole number above 0, got 1.5"),
        ({"output": {"shape": "token_vectors"}}, "method 'mean' does not give output.shape 'token_vectors'"),
        ({"method": "none"}, "method 'none' does not give output.shape 'vector'"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PoolingContract.from_dict(SPELT_OUT | change)


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match="pooling: truncation, padding, output must be given"):
        PoolingContract.from_dict({"method": "mean", "normalisation": {"kind": "l2"}})
