"""Stored tensors as callers get them."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path

import numpy as np
import pytest

from pipeline.api import FeatureReader
from pipeline.features.codec import TensorView
from pipeline.features.store import FeatureStore
from tests.features.sample_records import features, keyed_record


def test_tensors_by_name_in_a_copy_that_was_sent_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    key, record = keyed_record(1, num_tokens=5)
    # 1, -2, the largest finite value, infinity and a quiet NaN, by the bits of a bfloat16.
    words = np.array([0x3F80, 0xC000, 0x7F7F, 0x7F80, 0x7FC0], np.uint16)
    levels = {"deepstack_features.0": TensorView.of(words, "bfloat16")}
    record = dataclasses.replace(record, tensors={**record.tensors, **levels})
    writer = FeatureStore("store").writer()
    shard = writer.put([(key, record)])
    writer.seal()

    sent = pickle.dumps(FeatureReader("store"))
    monkeypatch.chdir("/")
    tensors = pickle.loads(sent).read(shard, key)
    assert tensors.keys() == {"pooler_output", "deepstack_features.0"}
    np.testing.assert_array_equal(tensors["pooler_output"], features(1, 5))
    level = tensors["deepstack_features.0"]
    assert level.dtype == np.float32
    np.testing.assert_array_equal(level, np.float32([1, -2, 3.3895313892515355e38, np.inf, np.nan]))


def test_what_the_store_does_not_have_is_said(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match=rf"{tmp_path}: no features some-key in shard some-shard"):
        FeatureReader(str(tmp_path)).read("some-shard", "some-key")
