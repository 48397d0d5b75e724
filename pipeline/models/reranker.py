"""Rerankers, classifiers and reward models: texts or pairs of texts to scores, of the whole or of each token."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from pipeline.errors import ConfigError
from pipeline.features.identity import canonical_json
from pipeline.models.activation import IDENTITY, NAMED, SIGMOID, SOFTMAX, pipeline_activation
from pipeline.models.checkpoint import (
    load_config,
    load_tokenizer,
    load_whole,
    read_json,
    tokenizer_digest,
    weights_digest,
)
from pipeline.models.location import resolve_model
from pipeline.models.padding import first_position, pad_mask, pad_rows, positions
from pipeline.models.sentence_folder import (
    Prompts,
    TransformerModule,
    read_modules,
    read_prompts,
    read_transformer,
    torch_module,
)
from pipeline.models.text import check_max_tokens, read_max_tokens
from pipeline.models.vision_language import resolve_device
from pipeline.pooling.contract import Normalisation, Output, Padding, PoolingContract, Truncation


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizedText:
    """A text or pair ready to be scored; `type_ids` tell the two texts apart where the model is told.

    `spans` are of a text whose tokens are scored: [start, end) of each token's characters, None for special tokens.
    """

    input_ids: list[int]
    type_ids: list[int] | None
    spans: list[tuple[int, int] | None] | None = None


@dataclass(frozen=True, kw_only=True)
class ScorerFacts:
    """Tokenizer, configuration and contract of a model with a classification head; loads no weights.

    `activation` is the dotted name of what is applied to its logits. `labels` are the names of a score's columns.
    """

    model: str
    path: str
    saved: TransformerModule | None
    config: Any
    tokenizer: Any
    contract: PoolingContract
    prompts: Prompts
    activation: str
    labels: tuple[str, ...]

    @classmethod
    def load(
        cls,
        model: str,
        pooling: Mapping[str, Any] | None = None,
        *,
        per_token: bool = False,
        activation: str | None = None,
    ) -> ScorerFacts:
        """A model for sequence classification, or with `per_token` for token classification.

        `pooling` replaces `truncation` and `padding` of the contract, whole or in part. `activation` is applied to the
        logits: none, sigmoid, softmax, or auto, what transformers' pipeline of the task applies; without it a whole
        text's scores are a cross-encoder's and a token's are logits. Raises `ConfigError` for what cannot be read or is
        not supported.
        """
        path, given = resolve_model(model), dict(pooling or {})
        if given.keys() - {"truncation", "padding"}:
            raise ConfigError(f"model {model!r} has a head of its own: only truncation and padding can be given")
        saved = _saved_transformer(path, per_token)
        subfolder = saved.subfolder if saved else ""
        config, tokenizer = load_config(model, path, subfolder), load_tokenizer(model, path, subfolder)
        limit = read_max_tokens(config, tokenizer, saved.max_seq_length if saved else None)
        read = PoolingContract(
            method="model",
            normalisation=Normalisation(kind="none"),
            truncation=Truncation(side=tokenizer.truncation_side, max_tokens=limit),
            padding=Padding(side=tokenizer.padding_side),
            output=Output(shape="token_scores" if per_token else "scores"),
        )
        facts = cls(
            model=model,
            path=path,
            saved=saved,
            config=config,
            tokenizer=tokenizer,
            contract=read.with_given(given),
            prompts=read_prompts(path),
            activation=_given_activation(activation, config, per_token) or _own_activation(path, config, per_token),
            labels=tuple(config.id2label[column] for column in range(config.num_labels)),
        )
        facts._check()
        return facts

    def _check(self) -> None:
        where = f"model {self.model!r}"
        truncation, padding = self.contract.for_texts()
        check_max_tokens(where, self.config, truncation.max_tokens)
        if padding.to != "longest" or not padding.excluded:
            raise ConfigError(f"{where}: padding is to the longest text, and excluded; got {padding}")
        text_config = self.config.get_text_config()
        if text_config.pad_token_id is None:
            if self.tokenizer.pad_token_id is None:
                raise ConfigError(f"{where} has no padding token: its texts cannot be in one batch")
            # A decoder's head scores at the last token that is not its configuration's padding token.
            text_config.pad_token_id = self.tokenizer.pad_token_id
        self.tokenizer.truncation_side, self.tokenizer.padding_side = truncation.side, padding.side
        _activation_module(self.path, self.activation)

    @cached_property
    def processing_digest(self) -> str:
        """16 hex digits over all that the scores depend on besides texts, weights and precision."""
        terms = [self.contract.as_dict(), self.activation, asdict(self.prompts), tokenizer_digest(self.tokenizer)]
        return hashlib.sha256(canonical_json(terms)).hexdigest()[:16]

    def tokenize_pairs(self, pairs: Sequence[tuple[str, str]], prompt_name: str | None = None) -> list[TokenizedText]:
        """(query, document) pairs, the query with its prompt; the longer of the two loses tokens first.

        Raises `ConfigError` for a model whose pairs sentence-transformers would put into a chat template.
        """
        if self.tokenizer.chat_template is not None and self.saved is None:
            raise ConfigError(f"model {self.model!r}: pairs for its chat template are not supported")
        prompt = self.prompts.text(prompt_name)
        return self._tokenize([prompt + query for query, _ in pairs], [document for _, document in pairs])

    def tokenize_texts(self, texts: Sequence[str], prompt_name: str | None = None) -> list[TokenizedText]:
        """Single texts, as classifiers take them, each with its prompt, which models that score tokens do not have."""
        prompt = self.prompts.text(prompt_name)
        per_token = self.contract.output.shape == "token_scores"
        return self._tokenize([prompt + text for text in texts], None, with_spans=per_token)

    def tokenize_chats(self, chats: Sequence[Sequence[Mapping[str, Any]]]) -> list[TokenizedText]:
        """Chats of {"role", "content"} messages in the model's own template, as reward models take them; never cut.

        Raises `ConfigError` for a model without a template, and what a template raises for a chat that it refuses.
        """
        if self.tokenizer.chat_template is None:
            raise ConfigError(f"model {self.model!r} has no chat template")
        texts = [self.tokenizer.apply_chat_template(list(chat), tokenize=False) for chat in chats]
        return self._tokenize(texts, None, truncation=False, add_special_tokens=False)

    def _tokenize(
        self, first: list[str], second: list[str] | None, *, with_spans: bool = False, **options: Any
    ) -> list[TokenizedText]:
        if not first:
            return []
        limit = self.contract.for_texts()[0].max_tokens
        options = {"truncation": "longest_first", "max_length": limit, **options}
        encoded = self.tokenizer(first, second, **options)
        types = encoded.get("token_type_ids") or [None] * len(first)
        spans = map(_spans, encoded.encodings) if with_spans else [None] * len(first)
        return [
            TokenizedText(input_ids=ids, type_ids=type_ids, spans=each)
            for ids, type_ids, each in zip(encoded["input_ids"], types, spans, strict=True)
        ]


def _saved_transformer(path: str, per_token: bool) -> TransformerModule | None:
    """The Transformer module of a folder that `CrossEncoder.save` wrote; None for a plain folder."""
    modules = read_modules(path)
    if modules is None:
        return None
    if [name for name, _ in modules] != ["Transformer"]:
        names = ", ".join(name for name, _ in modules)
        raise ConfigError(
            f"model {path}: its modules are {names}; a reranker is supported as one Transformer with a head for "
            "sequence classification (LogitScore, the yes and no of a language model, is not)"
        )
    transformer = read_transformer(path, modules[0][1])
    if transformer.task != "sequence-classification" or per_token:
        raise ConfigError(f"model {path}: it was saved for {transformer.task}")
    if transformer.do_lower_case:
        raise ConfigError(f"model {path}: do_lower_case is not supported for rerankers")
    return transformer


def _spans(encoding: Any) -> list[tuple[int, int] | None]:
    pairs = zip(encoding.offsets, encoding.sequence_ids, strict=True)
    return [None if sequence is None else span for span, sequence in pairs]


def _given_activation(given: str | None, config: Any, per_token: bool) -> str | None:
    """`auto` is as in transformers' pipelines."""
    if given != "auto":
        return None if given is None else NAMED[given]
    return SOFTMAX if per_token else pipeline_activation(config)


def _activation_module(path: str, name: str) -> nn.Module:
    return nn.Softmax(dim=-1) if name == SOFTMAX else torch_module(path, name)


def _own_activation(path: str, config: Any, per_token: bool) -> str:
    """As `CrossEncoder.get_default_activation_fn` has it: as saved, else sigmoid for one label, nothing for several."""
    if per_token:
        return IDENTITY
    folder = read_json(path, "config_sentence_transformers.json") or {}
    inside = getattr(config, "sentence_transformers", None) or {}
    before_4 = getattr(config, "sbert_ce_default_activation_function", None)
    named = (folder.get("activation_fn") if read_modules(path) else None) or inside.get("activation_fn") or before_4
    return named or (SIGMOID if config.num_labels == 1 else IDENTITY)


class Scorer:
    """A model with a classification head on one device.

    Raises `ConfigError` when weights are missing, and when the head reads padding: BERT's takes what stands first,
    which on the left is padding.
    """

    def __init__(self, facts: ScorerFacts, *, dtype: str, device: str, attention: str | None = None) -> None:
        self.facts = facts
        self.device = torch.device(resolve_device(device))
        per_token = facts.contract.output.shape == "token_scores"
        self.model: Any = load_whole(
            AutoModelForTokenClassification if per_token else AutoModelForSequenceClassification,
            facts.path,
            facts.config,
            dtype=dtype,
            device=str(self.device),
            attention=attention,
            subfolder=facts.saved.subfolder if facts.saved else "",
        )
        self.activation = _activation_module(facts.path, facts.activation)
        self.first_position = first_position(self.model)
        if not per_token:
            self._check_padding()

    def weights_digest(self) -> str:
        """Digest over all weights, at the loaded precision."""
        return weights_digest(self.model)

    @torch.inference_mode()
    def score(self, texts: Sequence[TokenizedText]) -> npt.NDArray[np.float32]:
        """float32 scores in order: (B,) where the model has one label, else (B, labels)."""
        scores = self.activation(self._logits(texts)[0])
        scores = scores.squeeze(-1) if len(self.facts.labels) == 1 else scores
        return np.asarray(scores.cpu().numpy())

    @torch.inference_mode()
    def score_tokens(self, texts: Sequence[TokenizedText]) -> list[npt.NDArray[np.float32]]:
        """float32 scores (t_i, labels) of each text's tokens, special tokens included, in order."""
        logits, mask = self._logits(texts)
        scores = self.activation(logits)
        return [rows[kept].cpu().numpy() for rows, kept in zip(scores, mask.bool(), strict=True)]

    @torch.inference_mode()
    def _check_padding(self) -> None:
        short, long = self.facts.tokenize_texts(["a", "a longer text"])
        alone, beside = self._logits([short])[0][0], self._logits([short, long])[0][0]
        tolerance = 1e-3 if self.model.dtype == torch.float32 else 5e-2  # of logits: half precision rounds by batch
        if not torch.allclose(alone, beside, rtol=tolerance, atol=tolerance):
            side = self.facts.contract.for_texts()[1].side
            raise ConfigError(
                f"model {self.facts.model!r} scores a text otherwise beside a longer one: its head reads the padding, "
                f"which is on the {side}; give pooling.padding.side the other side"
            )

    def _logits(self, texts: Sequence[TokenizedText]) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 logits (B, labels) or (B, T, labels), and the mask (B, T)."""
        side = self.facts.contract.for_texts()[1].side
        pad = self.facts.config.get_text_config().pad_token_id
        rows = [text.input_ids for text in texts]
        mask = pad_mask(rows, side=side)
        inputs = {"input_ids": pad_rows(rows, side=side, value=pad), "attention_mask": mask}
        types = [text.type_ids for text in texts if text.type_ids is not None]
        if types:
            inputs["token_type_ids"] = pad_rows(types, side=side, value=self.facts.tokenizer.pad_token_type_id)
        inputs |= positions(mask, side, self.first_position)
        output = self.model(**{name: tensor.to(self.device) for name, tensor in inputs.items()})
        return output.logits.float(), mask.to(self.device)
