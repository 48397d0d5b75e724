"""Decoding of a batch whose rows end at different times: those that have ended leave it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    DynamicCache,
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from pipeline.language.sampling import SeededSampler

# What `generate` carries from step to step that has a row for each sequence, besides the cache.
_BY_ROW = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
# They remember something of each row that they were made with.
_WHOLE_BATCH = (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)


class ShrinkingBatch:
    """The loop of transformers' `generate` without sampling and beams, for its argument `custom_generate`.

    It gives the tokens that `GenerationMixin._sample` gives (transformers 5.24), except that a row that has ended is
    taken out of the batch before the next step and costs nothing from then on. `steps` counts those after prefill,
    `slots` the rows computed in them, `idle_slots` those of rows that had ended. Of one batch; make another for the
    next.
    """

    def __init__(self) -> None:
        self.steps = self.slots = self.idle_slots = 0

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> torch.Tensor:
        """int64 (B, prompt and the longest answer), shorter answers padded on the right."""
        num_rows, prompt_length = input_ids.shape
        length = prompt_length
        tokens = input_ids.new_full((num_rows, generation_config.max_length), generation_config.pad_token_id)
        tokens[:, :length] = input_ids
        rows = torch.arange(num_rows, device=input_ids.device)  # that are computed
        ended = torch.zeros(num_rows, dtype=torch.bool, device=input_ids.device)
        can_shrink = not any(isinstance(each, _WHOLE_BATCH) for each in logits_processor)
        inputs = model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **model_kwargs)
        outputs = model(**inputs, return_dict=True)
        with model._optimize_model_for_decode():
            while True:
                model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs)
                # A copy, so that the logits of a whole prompt are freed where a model makes those.
                logits = outputs.logits[:, -1].to(copy=True, dtype=torch.float32)
                del outputs
                chosen = logits_processor(tokens[rows, :length], logits).argmax(dim=-1)
                tokens[rows, length] = chosen.masked_fill(ended, generation_config.pad_token_id)
                length += 1
                ended |= stopping_criteria(tokens[rows, :length], None)
                num_ended = int(ended.sum())
                if num_ended == len(rows):
                    return tokens[:, :length]
                if num_ended and can_shrink and isinstance(model_kwargs.get("cache"), DynamicCache):
                    kept = (~ended).nonzero()[:, 0]
                    model_kwargs = _shrunk(model_kwargs, kept, len(rows))
                    _shrink_processors(logits_processor, kept)
                    rows, ended, num_ended = rows[kept], ended[kept], 0
                self.steps += 1
                self.slots += len(rows)
                self.idle_slots += num_ended
                step = 1 if model_kwargs["use_cache"] else None
                ids = tokens[rows, :length]
                inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=step, **model_kwargs)
                outputs = model(**inputs, return_dict=True)


def _shrunk(model_kwargs: dict[str, Any], kept: torch.Tensor, num_rows: int) -> dict[str, Any]:
    """Only the `kept` of `num_rows` rows. The cache a layer at a time: memory holds one layer twice at most."""
    model_kwargs["cache"].reorder_cache(kept)
    shrunk = dict(model_kwargs)
    for name in _BY_ROW:
        value = model_kwargs.get(name)
        if value is not None:
            axis = value.ndim - 2  # positions of rotary embeddings in several axes have those before the rows
            shrunk[name] = value.index_select(axis, kept) if value.shape[axis] == num_rows else value
    return shrunk


def _shrink_processors(processors: Any, kept: torch.Tensor) -> None:
    """Those that know something of each row, and can part with it: a row's seed, and how much of it is padding."""
    for each in processors:
        if isinstance(each, SeededSampler):
            each.keep(kept.tolist())
        elif isinstance(each, RepetitionPenaltyLogitsProcessor) and isinstance(each.prompt_ignore_length, torch.Tensor):
            each.prompt_ignore_length = each.prompt_ignore_length[kept.to(each.prompt_ignore_length.device)]
