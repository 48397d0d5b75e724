"""The language model of a checkpoint: token ids and feature records in, answers out."""

from __future__ import annotations

import copy
import functools
import inspect
import time
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import StopStringCriteria
from transformers.utils.generic import ModelOutput

from pipeline.features.codec import FeatureRecord, TensorView
from pipeline.language.decoding import ShrinkingBatch
from pipeline.language.sampling import SeededSampler, StepClock
from pipeline.models.halves import load_half
from pipeline.models.location import resolve_model
from pipeline.models.vision_language import VisionLanguageFacts, resolve_device


def tensor_of(view: TensorView, device: torch.device) -> torch.Tensor:
    """The stored tensor on `device`; on the CPU it shares the record's memory and must not be written to."""
    _take_read_only_warning()
    return torch.frombuffer(view.data, dtype=getattr(torch, view.dtype)).reshape(view.shape).to(device)


@functools.cache
def _take_read_only_warning() -> None:
    """torch warns of read-only memory once a process. The records' memory map is, and nothing here writes to it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        torch.frombuffer(bytes(1), dtype=torch.uint8)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptedItem:
    """One request ready to be answered: token ids with placeholders expanded, its media's records in their order."""

    input_ids: Sequence[int]
    media: tuple[FeatureRecord, ...]
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationOptions:
    """Limits and sampling. Greedy when `temperature` is 0."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratedText:
    """One answer. `token_ids` includes the end-of-sequence token when there is one."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str


def _joined(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tiles or frames of all items along the first dimension; as rows of one tile where their lengths differ."""
    if len({piece.shape[1:] for piece in pieces}) == 1:
        return torch.cat(list(pieces))
    return torch.cat([piece.reshape(-1, piece.shape[-1]) for piece in pieces])[None]


class LanguageModel:
    """The language model of a checkpoint on one device."""

    def __init__(self, facts: VisionLanguageFacts, *, dtype: str, device: str, attention: str | None = None) -> None:
        self.facts = facts
        self.device = torch.device(resolve_device(device))
        path = resolve_model(facts.model)
        self.model: Any = load_half(path, "language", dtype=dtype, device=str(self.device), attention=attention)
        ends = self.model.generation_config.eos_token_id
        self.accepted = set(inspect.signature(self.model.forward).parameters)
        self.end_ids = set(ends if isinstance(ends, list) else [ends])

    @torch.inference_mode()
    def generate(
        self,
        items: Sequence[PromptedItem],
        options: GenerationOptions,
        seconds: dict[str, float],
        counts: dict[str, int] | None = None,
    ) -> list[GeneratedText]:
        """Answers in order; adds `feature_transfer`, `llm_prefill` and `llm_decode` seconds.

        To `counts` it adds `decode_steps` after prefill, `decode_slots`, the tokens that were computed in them (rows
        times steps), and `idle_decode_slots`, those of rows that had their answer already.

        Lengths must have been checked: a placeholder count that differs from the records' is an error of the batch.
        """
        started = time.perf_counter()
        inputs = self._inputs(items)
        moved = time.perf_counter()
        clock = StepClock(self.device)
        steps: list[Any] = [clock]
        if options.temperature > 0:
            seeds = [item.seed for item in items]
            steps.append(SeededSampler(seeds, temperature=options.temperature, top_p=options.top_p))
        batch = ShrinkingBatch()
        output = self.model.generate(
            **inputs,
            generation_config=self._generation_config(options),
            logits_processor=steps,
            stopping_criteria=self._stopping(options),
            custom_generate=batch,
        )
        ended = time.perf_counter()
        prompt_length = inputs["input_ids"].shape[1]
        answers = [self._answer(row, options) for row in output[:, prompt_length:].tolist()]
        for name, value in (
            ("feature_transfer", moved - started),
            ("llm_prefill", clock.first - moved),
            ("llm_decode", ended - clock.first),
        ):
            seconds[name] = seconds.get(name, 0.0) + value
        if counts is not None:
            for name, count in (
                ("decode_steps", batch.steps),
                ("decode_slots", batch.slots),
                ("idle_decode_slots", batch.idle_slots),
            ):
                counts[name] = counts.get(name, 0) + count
        return answers

    def _inputs(self, items: Sequence[PromptedItem]) -> dict[str, Any]:
        longest = max(len(item.input_ids) for item in items)
        pad = self.facts.processor.tokenizer.pad_token_id
        ids = torch.full((len(items), longest), pad if pad is not None else 0)
        mask = torch.zeros_like(ids)
        for row, item in enumerate(items):
            ids[row, longest - len(item.input_ids) :] = torch.tensor(item.input_ids)
            mask[row, longest - len(item.input_ids) :] = 1
        inputs: dict[str, torch.Tensor] = {"input_ids": ids, "attention_mask": mask}
        if self.facts.token_types is not None:
            types = torch.tensor(self.facts.processor.create_mm_token_type_ids(ids.tolist()))
            inputs[self.facts.token_types] = types * mask
        records = [record for item in items for record in item.media]
        inputs.update(self._described(records))
        moved: dict[str, Any] = {name: tensor.to(self.device) for name, tensor in inputs.items()}
        slots = {record.slot for record in records}
        if slots:
            moved["mm_encoder_outputs"] = {
                slot: self._rebuild([r for r in records if r.slot == slot]) for slot in slots
            }
        return moved

    def _described(self, records: Sequence[FeatureRecord]) -> dict[str, torch.Tensor]:
        """Grids, sizes and the like of all items in order, as far as the model asks for them."""
        gathered: dict[str, list[torch.Tensor]] = defaultdict(list)
        for record in records:
            for name, view in record.inputs.items():
                if name in self.accepted:
                    gathered[name].append(tensor_of(view, torch.device("cpu")))
        return {name: torch.cat(tensors) for name, tensors in gathered.items()}

    def _rebuild(self, records: Sequence[FeatureRecord]) -> ModelOutput:
        """The encoder's output as it would have been for all these items at once."""
        fields: dict[str, Any] = {}
        for name in records[0].tensors:
            pieces = tuple(tensor_of(record.tensors[name], self.device) for record in records)
            base, _, level = name.partition(".")
            value = pieces if records[0].container == "tuple" else _joined(pieces)
            if level:
                fields.setdefault(base, []).append(value)
            else:
                fields[base] = value
        return ModelOutput(**fields)  # type: ignore[no-untyped-call]

    def _generation_config(self, options: GenerationOptions) -> Any:
        config = copy.deepcopy(self.model.generation_config)
        # Sampling, when asked for, is done by SeededSampler on top of a greedy choice.
        config.update(do_sample=False, temperature=None, top_p=None, top_k=None, num_beams=1)
        # Rows that have ended leave a cache that grows; one of fixed shape would keep them.
        config.update(max_new_tokens=options.max_new_tokens, max_length=None, cache_implementation=None)
        if config.pad_token_id is None:
            config.pad_token_id = min(self.end_ids)
        return config

    def _stopping(self, options: GenerationOptions) -> list[StopStringCriteria]:
        return [StopStringCriteria(self.facts.processor.tokenizer, list(options.stop))] if options.stop else []

    def _answer(self, row: list[int], options: GenerationOptions) -> GeneratedText:
        tokenizer = self.facts.processor.tokenizer
        end = next((i for i, token in enumerate(row) if token in self.end_ids), None)
        kept = row if end is None else row[: end + 1]
        text = tokenizer.decode(kept, skip_special_tokens=True)
        cuts = [at for at in (text.find(stop) for stop in options.stop) if at >= 0]
        if cuts:
            text = text[: min(cuts)]
            kept = [token for token in kept if token != tokenizer.pad_token_id]
        reason = "stop" if end is not None or cuts else "length"
        return GeneratedText(text=text, token_ids=tuple(kept), finish_reason=reason)
