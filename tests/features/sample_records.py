"""Records that any process can make again from a number, to compare with what a store gives back."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from pipeline.features.codec import FeatureRecord, TensorView
from pipeline.features.identity import FeatureKeyTerms
from pipeline.schema import Geometry, Placeholder

# For the processes that tests start, wherever the tests themselves found the package.
CHILD_ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


def terms(number: int) -> FeatureKeyTerms:
    return FeatureKeyTerms(
        tenant="acme",
        content=f"sha256:{number:064x}",
        sampling=(),
        decode_backend="pillow 13",
        decode_rules=1,
        resize_backend="pil",
        resized_size=(32, 64),
        processor="p0",
        weights="w0",
        precision="float32",
        placeholder="layout0",
    )


def features(number: int, num_tokens: int = 8) -> np.ndarray:
    return np.random.default_rng(number).standard_normal((num_tokens, 64), np.float32)


def keyed_record(number: int, num_tokens: int = 8) -> tuple[str, FeatureRecord]:
    record = FeatureRecord(
        key_terms=terms(number).as_dict(),
        tensors={"pooler_output": TensorView.of(features(number, num_tokens))},
        container="tensor",
        unit="item",
        geometry=Geometry(
            grid=(1, 2, 4), merge_size=1, feature_length=num_tokens, original_size=(480, 640), resized_size=(32, 64)
        ),
        placeholder=Placeholder(text="<image>", runs=(num_tokens,)),
        slot="image",
    )
    return terms(number).digest(), record
