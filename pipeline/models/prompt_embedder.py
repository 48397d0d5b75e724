"""Vectors by a vision-language model: the last token's hidden state of a prompt with media, texts, or both."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from pipeline.models.checkpoint import load_config, weights_digest
from pipeline.models.language_model import LanguageModel, PromptedItem
from pipeline.models.location import resolve_model
from pipeline.models.vision_language import VisionLanguageFacts
from pipeline.pooling.contract import Normalisation, Output, Padding, PoolingContract
from pipeline.pooling.pool import finish


def is_vision_language(model: str) -> bool:
    """Whether the checkpoint is a language model that sees. Raises `ConfigError` as `load_config` does."""
    mapping: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return type(load_config(model, resolve_model(model))) in mapping


def prompt_contract(given: Mapping[str, Any]) -> PoolingContract:
    """Of vectors by the last token, with the fields that are given. Prompts are refused when too long, never cut."""
    contract = PoolingContract(
        method="last_token",
        normalisation=Normalisation(kind="l2", when="after"),
        truncation=None,
        padding=Padding(side="left"),
        output=Output(shape="vector"),
    )
    return contract.with_given(given)


def hidden_size(facts: VisionLanguageFacts) -> int:
    """Dimensions of a vector before any are cut."""
    return int(facts.config.get_text_config().hidden_size)


class PromptEmbedder(LanguageModel):
    """The language model of a checkpoint on one device, for what it holds at the end of a prompt."""

    def __init__(
        self,
        facts: VisionLanguageFacts,
        contract: PoolingContract,
        *,
        dtype: str,
        device: str,
        attention: str | None = None,
    ) -> None:
        super().__init__(facts, dtype=dtype, device=device, attention=attention)
        self.contract = contract

    def weights_digest(self) -> str:
        """Digest over the language model's weights, at the loaded precision."""
        return weights_digest(self.model)

    @torch.inference_mode()
    def embed(self, items: Sequence[PromptedItem], seconds: dict[str, float]) -> npt.NDArray[np.float32]:
        """float32 vectors (B, D) in order; adds `feature_transfer` and `llm_prefill` seconds.

        Prompts are padded on the left, so that the last token of each is at the end. Raises `torch.OutOfMemoryError` as
        it comes.
        """
        started = time.perf_counter()
        inputs = self._inputs(items)
        moved = time.perf_counter()
        output = self.model.base_model(**inputs, use_cache=False)
        vectors = finish(output.last_hidden_state[:, -1].float(), self.contract).cpu().numpy()
        for name, value in (("feature_transfer", moved - started), ("llm_prefill", time.perf_counter() - moved)):
            seconds[name] = seconds.get(name, 0.0) + value
        return np.asarray(vectors)
