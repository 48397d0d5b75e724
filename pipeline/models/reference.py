"""The same vectors by the libraries that models are made for; for checking, never for work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModel

from pipeline.errors import ConfigError
from pipeline.media.resize import resize_frames
from pipeline.models.dual_encoder import DualEncoderFacts, ImageTower
from pipeline.models.embedder import TextSide
from pipeline.models.text import TextFacts
from pipeline.pooling.contract import PoolingContract

Vectors = npt.NDArray[np.float32]
_SIZES = ((48, 80), (90, 33), (200, 201), (64, 64), (31, 47))  # (height, width)


def sentence_vectors(facts: TextFacts, prompt_name: str | None, dtype: str) -> Callable[[Sequence[str]], Vectors]:
    """`encode` of sentence-transformers: as the folder says, or with the contract's pooling where it says nothing.

    Raises `ConfigError` when the library is not installed.
    """
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise ConfigError(
            "headrace conform compares with sentence-transformers, which is not installed: "
            "pip install 'headrace[conform]'"
        ) from error
    options: dict[str, Any] = {"device": "cpu", "model_kwargs": {"dtype": getattr(torch, dtype)}}
    if facts.folder is not None:
        model = SentenceTransformer(facts.path, **options)
    else:
        model = SentenceTransformer(modules=_modules(facts), device="cpu")
    kept = facts.contract.output.dimensions

    def encode(texts: Sequence[str]) -> Vectors:
        return np.asarray(model.encode(list(texts), prompt_name=prompt_name, truncate_dim=kept), np.float32)

    return encode


def _modules(facts: TextFacts) -> list[Any]:
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

    contract = facts.contract
    transformer = Transformer(facts.path, max_seq_length=contract.for_texts()[0].max_tokens)
    transformer.tokenizer.truncation_side = contract.for_texts()[0].side
    transformer.tokenizer.padding_side = contract.for_texts()[1].side
    mode = {"last_token": "lasttoken"}.get(contract.method, contract.method)
    modules = [transformer, Pooling(facts.vector_size, pooling_mode=mode)]
    return [*modules, Normalize()] if contract.normalisation.kind == "l2" else modules


def truncated_tokens(side: TextSide, text: str) -> int:
    """How many tokens of a long text are embedded."""
    [ids] = side.tokenize([text])
    return len(ids)


def dual_encoder_texts(facts: DualEncoderFacts, dtype: str) -> Callable[[Sequence[str]], Vectors]:
    """`get_text_features` of the whole model, texts padded as the family was trained."""
    model: Any = AutoModel.from_pretrained(facts.path, dtype=getattr(torch, dtype)).eval()
    limit, padding = facts.text_contract.for_texts()
    options: dict[str, Any] = {"padding": True if padding.to == "longest" else "max_length"}

    @torch.inference_mode()
    def encode(texts: Sequence[str]) -> Vectors:
        inputs = facts.tokenizer(
            list(texts), truncation=True, max_length=limit.max_tokens, return_tensors="pt", **options
        )
        return _finished(model.get_text_features(**inputs).pooler_output, facts.text_contract)

    return encode


def dual_encoder_images(
    facts: DualEncoderFacts, dtype: str
) -> tuple[Callable[[Sequence[Any]], Vectors], Callable[[Sequence[Any]], Vectors], list[Any]]:
    """What our tower and the whole model with its own processor make of images, and images to try: noise, in sizes."""
    model: Any = AutoModel.from_pretrained(facts.path, dtype=getattr(torch, dtype)).eval()
    tower = ImageTower(facts, dtype=dtype, device="cpu")
    rng = np.random.default_rng(2)
    images = [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in _SIZES]

    def ours(pictures: Sequence[Any]) -> Vectors:
        sized = [
            resize_frames(p[None], facts.image_geometry(*p.shape[:2]).resized_size, facts.resample)[0] for p in pictures
        ]
        return tower.embed_images(sized)

    @torch.inference_mode()
    def theirs(pictures: Sequence[Any]) -> Vectors:
        inputs = facts.image_processor(images=list(pictures), return_tensors="pt")
        inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
        return _finished(model.get_image_features(**inputs).pooler_output, facts.image_contract)

    return ours, theirs, images


def _finished(vectors: torch.Tensor, contract: PoolingContract) -> Vectors:
    """As the contract says, in numpy: cut and brought to length 1."""
    found = vectors.float().numpy()
    if contract.normalisation.kind == "l2" and contract.normalisation.when == "before":
        found = found / np.linalg.norm(found, axis=1, keepdims=True)
    found = found[:, : contract.output.dimensions]
    if contract.normalisation.kind == "l2" and contract.normalisation.when == "after":
        found = found / np.linalg.norm(found, axis=1, keepdims=True)
    return np.ascontiguousarray(found)
