"""Texts to vectors: sentence-transformers folders as they say, any encoder or language model by a given contract."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from tokenizers.normalizers import Lowercase
from tokenizers.normalizers import Sequence as NormalizerSequence
from torch import nn
from transformers import AutoModel, AutoModelForTextEncoding
from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING

from pipeline.errors import ConfigError
from pipeline.features.identity import canonical_json
from pipeline.models.checkpoint import (
    checkpoint_file,
    load_config,
    load_tokenizer,
    load_whole,
    tokenizer_digest,
    weights_digest,
)
from pipeline.models.location import resolve_model
from pipeline.models.padding import first_position, pad_mask, pad_rows, positions
from pipeline.models.sentence_folder import (
    DenseLayer,
    Prompts,
    SentenceFolder,
    read_prompts,
    read_sentence_folder,
    torch_module,
)
from pipeline.models.vision_language import resolve_device
from pipeline.pooling.contract import Normalisation, Output, Padding, PoolingContract, Truncation
from pipeline.pooling.pool import finish, pool_tokens, token_vectors

# What a tokenizer without a limit says is larger (transformers' VERY_LARGE_INTEGER, 1e30).
_NO_LIMIT = 10**9


@dataclass(frozen=True, kw_only=True)
class TextFacts:
    """Tokenizer, configuration and pooling contract of a text embedding model; loads no weights."""

    model: str
    path: str
    config: Any
    tokenizer: Any
    contract: PoolingContract
    prompts: Prompts
    folder: SentenceFolder | None

    @classmethod
    def load(cls, model: str, pooling: Mapping[str, Any] | None = None) -> TextFacts:
        """A sentence-transformers folder, or any other with its contract given.

        `pooling` names fields of the contract, whole or in part, and replaces what the folder says. A folder that says
        nothing needs all of them. Raises `ConfigError` for what is missing, contradictory or not supported.
        """
        path = resolve_model(model)
        folder = read_sentence_folder(path)
        subfolder = folder.transformer.subfolder if folder else ""
        config, tokenizer = load_config(model, path, subfolder), load_tokenizer(model, path, subfolder)
        if hasattr(config, "vision_config"):
            raise ConfigError(
                f"model {model!r}: {config.model_type!r} embeds images and texts in one; not supported yet"
            )
        if folder is None:
            contract = PoolingContract.from_dict(pooling or {})
        else:
            contract = _read_contract(folder, config, tokenizer).with_given(pooling or {})
            if folder.transformer.do_lower_case:
                _lower_case(tokenizer.backend_tokenizer)
        facts = cls(
            model=model,
            path=path,
            config=config,
            tokenizer=tokenizer,
            contract=contract,
            prompts=read_prompts(path),
            folder=folder,
        )
        facts._check()
        return facts

    def _check(self) -> None:
        contract, where = self.contract, f"model {self.model!r}"
        truncation, padding = contract.for_texts()
        if contract.method == "model":
            raise ConfigError(f"{where}: method 'model' is for models with a head that pools")
        if contract.method == "none" and self.folder is not None and self.folder.dense:
            raise ConfigError(f"{where}: its dense layers work on pooled vectors, not on token vectors")
        check_max_tokens(where, self.config, truncation.max_tokens)
        kept = contract.output.dimensions
        if kept is not None and kept > self.vector_size:
            raise ConfigError(f"{where}: output.dimensions is {kept}, its vectors have {self.vector_size}")
        if padding.to != "longest":
            raise ConfigError(f"{where}: padding.to {padding.to!r} is of no use where padding is excluded")
        self.tokenizer.truncation_side, self.tokenizer.padding_side = truncation.side, padding.side
        if any(self.tokenizer("a b").get("token_type_ids", [])):
            raise ConfigError(f"{where}: its tokenizer gives single texts segments, which is not supported")

    @cached_property
    def processing_digest(self) -> str:
        """16 hex digits over all that the vectors depend on besides texts, weights and precision."""
        folder = None if self.folder is None else asdict(self.folder)
        terms = [self.contract.as_dict(), folder, asdict(self.prompts), tokenizer_digest(self.tokenizer)]
        return hashlib.sha256(canonical_json(terms)).hexdigest()[:16]

    @property
    def vector_size(self) -> int:
        """Dimensions of a vector before any are cut."""
        return _vector_size(self.folder, self.config)

    @property
    def dimensions(self) -> int:
        """Dimensions of a vector as it comes out."""
        return self.contract.output.dimensions or self.vector_size

    def tokenize(self, texts: Sequence[str], prompt_name: str | None = None) -> list[list[int]]:
        """Token ids of each text with its prompt and special tokens, truncated as the contract says.

        A text of nothing may have no tokens at all; it cannot be embedded. Raises `ConfigError` for an unknown prompt.
        """
        if not texts:
            return []
        prompt = self.prompts.text(prompt_name)
        truncation, _ = self.contract.for_texts()
        prompted = [prompt + text for text in texts]
        ids: list[list[int]] = self.tokenizer(prompted, truncation=True, max_length=truncation.max_tokens)["input_ids"]
        return ids

    def num_prompt_tokens(self, prompt_name: str | None = None) -> int:
        """Tokens that are left out of the pool because they are the prompt's; 0 where the model pools them too."""
        prompt = self.prompts.text(prompt_name)
        if self.folder is None or self.folder.include_prompt or not prompt:
            return 0
        ids = self.tokenizer(prompt)["input_ids"]
        # As sentence-transformers counts (`Transformer._get_prompt_length`): a closing special token is the text's.
        return len(ids) - (ids[-1] in self.tokenizer.all_special_ids)


def read_max_tokens(config: Any, tokenizer: Any, saved: int | None) -> int:
    """The model's own limit: the one it was saved with, else the smaller of its tokenizer's and its positions."""
    if saved is not None:
        return saved
    positions = getattr(config, "max_position_embeddings", -1)
    limit = int(tokenizer.model_max_length)
    return limit if positions == -1 else min(limit, positions)


def check_max_tokens(where: str, config: Any, max_tokens: int) -> None:
    """Raise `ConfigError` when no limit is known, or a text may have more tokens than the model has positions."""
    if max_tokens > _NO_LIMIT:
        raise ConfigError(f"{where} says nowhere how long a text may be: give pooling.truncation.max_tokens")
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and 0 < positions < max_tokens:
        raise ConfigError(f"{where} has {positions} positions: truncation.max_tokens is {max_tokens}")


def _vector_size(folder: SentenceFolder | None, config: Any) -> int:
    if folder is not None and folder.dense:
        return folder.dense[-1].out_features
    return int(config.get_text_config().hidden_size)


def _read_contract(folder: SentenceFolder, config: Any, tokenizer: Any) -> PoolingContract:
    limit = read_max_tokens(config, tokenizer, folder.transformer.max_seq_length)
    # More than there are keep all, as a slice does.
    kept = folder.dimensions if folder.dimensions and folder.dimensions < _vector_size(folder, config) else None
    # Its Normalize module comes before sentence-transformers cuts dimensions (`SentenceTransformer._inference`).
    normalisation = Normalisation(kind="l2", when="before") if folder.normalised else Normalisation(kind="none")
    return PoolingContract(
        method=folder.method,
        normalisation=normalisation,
        truncation=Truncation(side=tokenizer.truncation_side, max_tokens=limit),
        padding=Padding(side=tokenizer.padding_side),
        output=Output(shape="vector", dimensions=kept),
    )


def _lower_case(backend: Any) -> None:
    before = [backend.normalizer] if backend.normalizer is not None else []
    backend.normalizer = NormalizerSequence([Lowercase(), *before])


def _model_class(config: Any) -> Any:
    """Of encoder and decoder only the encoder: T5's, saved alone, no longer says that it had a decoder."""
    encoders: Any = MODEL_FOR_TEXT_ENCODING_MAPPING
    return AutoModelForTextEncoding if config.is_encoder_decoder or type(config) in encoders else AutoModel


class TextEmbedder:
    """A text embedding model on one device."""

    def __init__(self, facts: TextFacts, *, dtype: str, device: str, attention: str | None = None) -> None:
        self.facts = facts
        self.device = torch.device(resolve_device(device))
        folder = facts.folder
        self.model: Any = load_whole(
            _model_class(facts.config),
            facts.path,
            facts.config,
            dtype=dtype,
            device=str(self.device),
            attention=attention,
            unused=("pooler.",),  # BERT's own, which no pooling of ours reads
            subfolder=folder.transformer.subfolder if folder else "",
        )
        self.first_position = first_position(self.model)
        layers = [_load_dense(facts.path, layer) for layer in folder.dense] if folder else []
        self.dense = nn.Sequential(*layers).to(self.device, torch.float32).eval()

    def weights_digest(self) -> str:
        """Digest over all weights that make the vectors, at the loaded precision."""
        return weights_digest(self.model, self.dense)

    @torch.inference_mode()
    def embed(self, token_ids: Sequence[Sequence[int]], prompt_name: str | None = None) -> npt.NDArray[np.float32]:
        """float32 vectors (B, D) of B texts, in order; `prompt_name` is the one they were tokenized with.

        Raises `ValueError` when a text has no tokens or the contract's method is `none`.
        """
        hidden, mask = self._hidden(token_ids, prompt_name)
        vectors = self.dense(pool_tokens(hidden, mask, self.facts.contract.method))
        return np.asarray(finish(vectors, self.facts.contract).cpu().numpy())

    @torch.inference_mode()
    def embed_tokens(
        self, token_ids: Sequence[Sequence[int]], prompt_name: str | None = None
    ) -> list[npt.NDArray[np.float32]]:
        """float32 token vectors (t_i, D) of each text, in order, for the method `none`."""
        hidden, mask = self._hidden(token_ids, prompt_name)
        return [finish(rows, self.facts.contract).cpu().numpy() for rows in token_vectors(hidden, mask)]

    def _hidden(self, token_ids: Sequence[Sequence[int]], prompt_name: str | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states (B, T, H), and which of them (B, T) are pooled."""
        if not all(token_ids):
            empty = next(row for row, ids in enumerate(token_ids) if not ids)
            raise ValueError(f"text {empty} of the batch has no tokens")
        side = self.facts.contract.for_texts()[1].side
        pad = self.facts.tokenizer.pad_token_id or 0
        ids = pad_rows(token_ids, side=side, value=pad).to(self.device)
        mask = pad_mask(token_ids, side=side).to(self.device)
        counted = positions(mask, side, self.first_position)
        hidden = self.model(input_ids=ids, attention_mask=mask, **counted).last_hidden_state
        return hidden, mask * (mask.cumsum(dim=1) > self.facts.num_prompt_tokens(prompt_name))


def _load_dense(path: str, layer: DenseLayer) -> nn.Module:
    weights = checkpoint_file(path, "model.safetensors", layer.subfolder)
    if weights is None:
        raise ConfigError(f"model {path}: {layer.subfolder} has no model.safetensors (pickled weights are not read)")
    linear = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias)
    linear.load_state_dict({name.removeprefix("linear."): tensor for name, tensor in load_file(weights).items()})
    return nn.Sequential(linear, torch_module(path, layer.activation))
