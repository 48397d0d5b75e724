"""The same vectors and scores by the libraries that models are made for; for checking, never for work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    pipeline,
)

from pipeline.errors import ConfigError
from pipeline.models.dual_encoder import DualEncoderFacts, ImageTower
from pipeline.models.embedder import TextSide
from pipeline.models.image_classifier import ImageClassifier, ImageClassifierFacts
from pipeline.models.reranker import ScorerFacts
from pipeline.models.text import TextFacts, read_max_tokens
from pipeline.pooling.contract import PoolingContract
from pipeline.pooling.scores import activate

Vectors = npt.NDArray[np.float32]
_SIZES = ((48, 80), (90, 33), (200, 201), (64, 64), (31, 47))  # (height, width)


def sentence_vectors(facts: TextFacts, prompt_name: str | None, dtype: str) -> Callable[[Sequence[str]], Vectors]:
    """`encode` of sentence-transformers: as the folder says, or with the contract's pooling where it says nothing.

    Raises `ConfigError` when the library is not installed.
    """
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise _not_installed() from error
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


def pair_scores(facts: ScorerFacts, prompt_name: str | None, dtype: str) -> Callable[[Sequence[Any]], list[Vectors]]:
    """`CrossEncoder.predict` of (query, document) pairs, (1,) each. Raises `ConfigError` as `sentence_vectors`."""
    try:
        from sentence_transformers import CrossEncoder
    except ImportError as error:
        raise _not_installed() from error
    model = CrossEncoder(facts.path, device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})

    def score(pairs: Sequence[Any]) -> list[Vectors]:
        return [np.atleast_1d(each) for each in model.predict(list(pairs), prompt_name=prompt_name)]

    return score


def text_scores(facts: ScorerFacts, dtype: str) -> Callable[[Sequence[Any]], list[Vectors]]:
    """transformers' text classification pipeline, (labels,) a text; of tokens (tokens, labels), the model alone."""
    tokenizer = AutoTokenizer.from_pretrained(facts.path)
    options: dict[str, Any] = {"truncation": True, "max_length": read_max_tokens(facts.config, tokenizer, None)}
    applied = _applied(facts.activation)
    if facts.contract.output.shape == "token_scores":
        model: Any = AutoModelForTokenClassification.from_pretrained(facts.path, dtype=getattr(torch, dtype)).eval()
        activation = {"none": torch.nn.Identity(), "sigmoid": torch.nn.Sigmoid(), "softmax": torch.nn.Softmax(-1)}

        @torch.inference_mode()
        def score_tokens(texts: Sequence[Any]) -> list[Vectors]:
            inputs = [tokenizer(text, return_tensors="pt", **options) for text in texts]
            return [activation[applied](model(**each).logits[0].float()).numpy() for each in inputs]

        return score_tokens
    classify = pipeline(
        "text-classification",
        model=AutoModelForSequenceClassification.from_pretrained(facts.path, dtype=getattr(torch, dtype)),
        tokenizer=tokenizer,
        device="cpu",
    )

    def score(texts: Sequence[Any]) -> list[Vectors]:
        found = [classify(text, top_k=None, function_to_apply=applied, **options) for text in texts]
        return _in_order(found, facts.labels)

    return score


def image_scores(
    facts: ImageClassifierFacts, activation: str, dtype: str
) -> tuple[Callable[[Sequence[Any]], list[Vectors]], Callable[[Sequence[Any]], list[Vectors]], list[Any]]:
    """What our classifier makes of images in a batch, and transformers' pipeline of each, (labels,); and images to try:
    noise, in sizes.
    """
    classifier = ImageClassifier(facts, dtype=dtype, device="cpu")
    classify = pipeline("image-classification", model=facts.path, device="cpu", dtype=getattr(torch, dtype))

    def ours(pictures: Sequence[Any]) -> list[Vectors]:
        return list(activate(classifier.logits([facts.sizing.apply(picture) for picture in pictures]), activation))

    def theirs(pictures: Sequence[Any]) -> list[Vectors]:
        options: dict[str, Any] = {"top_k": len(facts.labels), "function_to_apply": _applied(activation)}
        return _in_order([classify(picture, **options) for picture in pictures], facts.labels)

    return ours, theirs, _noise()


def _applied(activation: str) -> str:
    """A dotted name as transformers' pipelines have it."""
    return activation.rpartition(".")[2].lower().replace("identity", "none")


def _in_order(found: Sequence[Sequence[dict[str, Any]]], labels: Sequence[str]) -> list[Vectors]:
    scores = [{each["label"]: each["score"] for each in one} for one in found]
    return [np.array([each[label] for label in labels], np.float32) for each in scores]


def _noise() -> list[Any]:
    rng = np.random.default_rng(2)
    return [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in _SIZES]


def _not_installed() -> ConfigError:
    return ConfigError(
        "headrace conform compares with sentence-transformers, which is not installed: pip install 'headrace[conform]'"
    )


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

    def ours(pictures: Sequence[Any]) -> Vectors:
        return tower.embed_images([facts.sizing.apply(picture) for picture in pictures])

    @torch.inference_mode()
    def theirs(pictures: Sequence[Any]) -> Vectors:
        inputs = facts.image_processor(images=list(pictures), return_tensors="pt")
        inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
        return _finished(model.get_image_features(**inputs).pooler_output, facts.image_contract)

    return ours, theirs, _noise()


def _finished(vectors: torch.Tensor, contract: PoolingContract) -> Vectors:
    """As the contract says, in numpy: cut and brought to length 1."""
    found = vectors.float().numpy()
    if contract.normalisation.kind == "l2" and contract.normalisation.when == "before":
        found = found / np.linalg.norm(found, axis=1, keepdims=True)
    found = found[:, : contract.output.dimensions]
    if contract.normalisation.kind == "l2" and contract.normalisation.when == "after":
        found = found / np.linalg.norm(found, axis=1, keepdims=True)
    return np.ascontiguousarray(found)
