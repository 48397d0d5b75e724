"""Whether a job's model does here what it does elsewhere: each field of the pooling contract against the library that
the model was made for: sentence-transformers, or transformers' own whole model with its processor.

Agreement is a cosine of 0.99999 (of scores, a difference of 1e-4), in the job's precision.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.language.batching import in_input_order, plan_text_batches
from pipeline.models.dual_encoder import DualEncoderFacts
from pipeline.models.embedder import TextSide, embed_texts
from pipeline.models.image_classifier import ImageClassifierFacts
from pipeline.models.reference import (
    dual_encoder_images,
    dual_encoder_texts,
    image_scores,
    pair_scores,
    sentence_vectors,
    text_scores,
    truncated_tokens,
)
from pipeline.models.reranker import Scorer, ScorerFacts, TokenizedText

Vectors = npt.NDArray[np.float32]
_COSINE = 0.99999
_SCORE_GAP = 1e-4
_TEXTS = (
    "A headrace carries water to the mill wheel.",
    "water",
    "Der Mühlgraben führt Wasser zum Rad, und das Rad dreht den Stein.",
    "query: how many stones does the mill have? 3",
    "Été à la plage: 42 coquillages, 7 étoiles de mer et un seau.",
    "the mill the mill the mill",
    "1, 2, 3, 4 and 5.",
)
_LONG = "The wheel turns while the water runs, and the stone grinds what the miller pours. " * 400


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One field of the contract: what it says here, whether the other library agrees, and what was measured."""

    field: str
    says: str
    agrees: bool
    measured: str


def conform(config: Config) -> list[tuple[str, list[Verdict]]]:
    """(what was checked, its six verdicts), of each model of the job.

    Raises `ConfigError` for jobs without a pooling contract, and when sentence-transformers is needed and missing.
    """
    if config.job in ("rerank", "score_texts"):
        return [(f"scores, {config.model}", _check_scores(config))]
    if config.job == "score_media":
        return [(f"scores of images, {config.model}", _check_image_scores(config))]
    if config.job not in ("embed_backfill", "index_documents"):
        raise ConfigError(f"headrace conform is for jobs that embed, rank or score, not for {config.job}")
    side = TextSide.load(config.text_model, config.text_pooling(), config.text.prompt_name)
    checked = [(f"texts, {config.text_model}", _check_texts(config, side))]
    if config.text.model is not None or isinstance(side.facts, DualEncoderFacts):
        facts = DualEncoderFacts.load(config.model, config.pooling.contract())
        checked.append((f"images, {config.model}", _check_images(config, facts)))
    return checked


def _check_texts(config: Config, side: TextSide) -> list[Verdict]:
    section = config.text
    model = side.load_model(dtype=section.dtype, device="cpu", attention=section.attention)

    def ours(texts: Sequence[str]) -> Vectors:
        ids = side.tokenize(texts)
        batches = plan_text_batches([len(each) for each in ids], max_batch_tokens=4096, max_batch_items=4)
        vectors = [list(embed_texts(model, [ids[i] for i in batch], side.prompt_name)) for batch in batches]
        return np.stack(in_input_order(batches, vectors))

    if isinstance(side.facts, DualEncoderFacts):
        theirs: Callable[[Sequence[str]], Vectors] = dual_encoder_texts(side.facts, section.dtype)
    else:
        theirs = sentence_vectors(side.facts, side.prompt_name, section.dtype)
    contract = side.contract
    limit, padding = contract.for_texts()
    found, expected = ours(_TEXTS), theirs(_TEXTS)
    long_found, long_expected = ours([_LONG]), theirs([_LONG])
    num_tokens = truncated_tokens(side, _LONG)
    alone = np.concatenate([ours([text]) for text in _TEXTS])
    beside = ours([*_TEXTS, _LONG])[: len(_TEXTS)]
    return [
        _agreement("method", contract.method, found, expected),
        _norms(
            "normalisation",
            f"{contract.normalisation.kind}, {contract.normalisation.when} dimensions are cut",
            found,
            expected,
        ),
        _agreement(
            "truncation",
            f"{limit.max_tokens} tokens, cut on the {limit.side}",
            long_found,
            long_expected,
            also=num_tokens == limit.max_tokens,
            note=f"of a long text {num_tokens} tokens are kept",
        ),
        _agreement(
            "padding",
            f"on the {padding.side}, to {padding.to}, {'excluded' if padding.excluded else 'seen by the model'}",
            alone,
            beside,
            note="each text alone, and beside a long one",
        ),
        _shapes("output", found, expected),
        _order("item order", ours, found),
    ]


def _check_images(config: Config, facts: DualEncoderFacts) -> list[Verdict]:
    section = config.encode
    ours, theirs, images = dual_encoder_images(facts, section.dtype)
    found, expected = ours(images), theirs(images)
    contract = facts.image_contract
    alone = np.concatenate([ours([image]) for image in images])
    return [
        _agreement("method", contract.method, found, expected),
        _norms(
            "normalisation",
            f"{contract.normalisation.kind}, {contract.normalisation.when} dimensions are cut",
            found,
            expected,
        ),
        Verdict(field="truncation", says="of texts only", agrees=True, measured="images are resized, not truncated"),
        _agreement(
            "padding", "patches that are padding are masked", alone, found, note="each image alone, and in a batch"
        ),
        _shapes("output", found, expected),
        _order("item order", ours, found, images),
    ]


def _check_scores(config: Config) -> list[Verdict]:
    section = config.text
    facts = ScorerFacts.load(config.model, config.pooling.contract(), **config.scorer_options())
    scorer = Scorer(facts, dtype=section.dtype, device="cpu", attention=section.attention)
    if config.job == "rerank":
        tokenize: Callable[[Any, str | None], list[TokenizedText]] = facts.tokenize_pairs
        theirs = pair_scores(facts, section.query_prompt_name, section.dtype)
        items: list[Any] = [(_TEXTS[0], text) for text in _TEXTS]
        long: Any = (_TEXTS[0], _LONG)
    else:
        tokenize, theirs, items, long = facts.tokenize_texts, text_scores(facts, section.dtype), list(_TEXTS), _LONG
    prompt_name = section.query_prompt_name if config.job == "rerank" else section.prompt_name

    def ours(given: Sequence[Any]) -> list[Vectors]:
        tokenized = tokenize(given, prompt_name)
        batches = plan_text_batches([len(t.input_ids) for t in tokenized], max_batch_tokens=4096, max_batch_items=4)
        scored = [_scores_of(scorer, [tokenized[i] for i in batch]) for batch in batches]
        return in_input_order(batches, scored)

    limit, padding = facts.contract.for_texts()
    found, expected = ours(items), theirs(items)
    [cut] = tokenize([long], prompt_name)
    of = "a token" if facts.contract.output.shape == "token_scores" else "a text"
    return [
        _closeness("method", "the model's own head", found, expected),
        _closeness("normalisation", f"{facts.activation.rpartition('.')[2]} over the head's logits", found, expected),
        _closeness(
            "truncation",
            f"{limit.max_tokens} tokens, cut on the {limit.side}",
            ours([long]),
            theirs([long]),
            also=len(cut.input_ids) == limit.max_tokens,
            note=f"of a long text {len(cut.input_ids)} tokens are kept",
        ),
        _closeness(
            "padding",
            f"on the {padding.side}, to {padding.to}, excluded",
            [ours([item])[0] for item in items],
            ours([*items, long])[: len(items)],
            note="each text alone, and beside a long one",
        ),
        *_scores_in_order(facts.labels, of, ours, items, found, expected),
    ]


def _check_image_scores(config: Config) -> list[Verdict]:
    facts = ImageClassifierFacts.load(config.model)
    activation = facts.activation(config.score.activation)
    ours, theirs, images = image_scores(facts, activation, config.encode.dtype)
    found, expected = ours(images), theirs(images)
    return [
        _closeness("method", "the model's own head", found, expected),
        _closeness("normalisation", f"{activation.rpartition('.')[2]} over the head's logits", found, expected),
        Verdict(field="truncation", says="of texts only", agrees=True, measured="images are resized, not truncated"),
        _closeness(
            "padding",
            "none, or patches that are masked",
            [ours([image])[0] for image in images],
            found,
            note="each image alone, and in a batch",
        ),
        *_scores_in_order(facts.labels, "an image", ours, images, found, expected),
    ]


def _scores_in_order(
    names: Sequence[str],
    of: str,
    ours: Callable[[Sequence[Any]], list[Vectors]],
    items: Sequence[Any],
    found: Sequence[Vectors],
    expected: Sequence[Vectors],
) -> list[Verdict]:
    """The verdicts on output and item order."""
    turned = [*range(len(items))][::-1]
    labels = f"{len(names)} scores" if len(names) > 1 else "one score"
    return [
        _closeness("output", f"{labels} of {of}: {', '.join(names)}", found, expected),
        _closeness(
            "item order",
            "that of the input",
            ours([items[i] for i in turned]),
            [found[i] for i in turned],
            note="in another order, each with itself",
        ),
    ]


def _scores_of(scorer: Scorer, texts: Sequence[TokenizedText]) -> list[Vectors]:
    if scorer.facts.contract.output.shape == "token_scores":
        return scorer.score_tokens(texts)
    return [np.atleast_1d(scores) for scores in scorer.score(texts)]


def _closeness(
    field: str, says: str, found: Sequence[Vectors], expected: Sequence[Vectors], *, also: bool = True, note: str = ""
) -> Verdict:
    same_shapes = [each.shape for each in found] == [each.shape for each in expected]
    gaps = [float(np.abs(a - b).max()) for a, b in zip(found, expected, strict=True)] if same_shapes else [np.inf]
    measured = f"largest difference {max(gaps):.1e}" + (f"; {note}" if note else "")
    return Verdict(field=field, says=says, agrees=max(gaps) <= _SCORE_GAP and also, measured=measured)


def _agreement(
    field: str, says: str, found: Vectors, expected: Vectors, *, also: bool = True, note: str = ""
) -> Verdict:
    cosines = _cosines(found, expected)
    measured = f"lowest cosine {cosines.min():.7f}" + (f"; {note}" if note else "")
    return Verdict(field=field, says=says, agrees=bool(cosines.min() >= _COSINE and also), measured=measured)


def _cosines(found: Vectors, expected: Vectors) -> npt.NDArray[np.float64]:
    if found.shape != expected.shape:
        return np.zeros(1)
    a, b = found.astype(np.float64), expected.astype(np.float64)
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return np.asarray((a * b).sum(axis=1) / np.maximum(lengths, 1e-12))


def _norms(field: str, says: str, found: Vectors, expected: Vectors) -> Verdict:
    ours, theirs = np.linalg.norm(found, axis=1), np.linalg.norm(expected, axis=1)
    agrees = bool(ours.shape == theirs.shape and np.allclose(ours, theirs, rtol=1e-4))
    measured = f"lengths {ours.min():.4f} to {ours.max():.4f}, theirs {theirs.min():.4f} to {theirs.max():.4f}"
    return Verdict(field=field, says=says, agrees=agrees, measured=measured)


def _shapes(field: str, found: Vectors, expected: Vectors) -> Verdict:
    says = f"a vector of {found.shape[1]} numbers"
    measured = f"theirs has {expected.shape[1]}"
    return Verdict(field=field, says=says, agrees=found.shape == expected.shape, measured=measured)


def _order(field: str, ours: Callable[[Any], Vectors], found: Vectors, items: Sequence[Any] = _TEXTS) -> Verdict:
    turned = [*range(len(items))][::-1]
    turned = list(itertools.chain(turned[1::2], turned[::2]))
    again = ours([items[i] for i in turned])
    cosines = _cosines(again, found[turned])
    measured = f"in another order, lowest cosine of each with itself {cosines.min():.7f}"
    return Verdict(field=field, says="that of the input", agrees=bool(cosines.min() >= _COSINE), measured=measured)
