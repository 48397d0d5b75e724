"""Rows that have ended leave the batch, and the tokens of those that stay are those of transformers' own loop."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from transformers import GenerationConfig, StopStringCriteria

from pipeline.language.decoding import ShrinkingBatch
from pipeline.language.sampling import SeededSampler
from tests.language.caches import CONFIGS
from tests.models.families import FAMILIES, tokenizer

PROMPTS = (5, 23, 40, 11, 31)  # tokens
NEW_TOKENS = 14
# Each keeps something else: windows, others' keys, latents, states; positions of text in three axes.
CAUSAL = ("llama", "gemma3", "gemma3n", "deepseek_v3", "qwen3_5", "lfm2")
VISION_LANGUAGE = ("qwen2_5_vl",)


def causal(name: str) -> Any:
    return hf.AutoModelForCausalLM.from_config(CONFIGS[name]())


def vision_language(name: str) -> Any:
    kind, (config, _), _ = FAMILIES[name]()
    return kind(config)


def prompts(vocabulary: int) -> dict[str, torch.Tensor]:
    """Padded on the left."""
    ids = torch.randint(10, vocabulary, (len(PROMPTS), max(PROMPTS)), generator=torch.Generator().manual_seed(3))
    mask = torch.stack([torch.arange(max(PROMPTS)) >= max(PROMPTS) - length for length in PROMPTS]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def greedy(**options: Any) -> GenerationConfig:
    return GenerationConfig(**{"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, **options})


def ends_apart(free: torch.Tensor) -> list[int]:
    """Two tokens that end these answers at as many different steps as can be."""
    pairs = itertools.combinations(sorted(set(free.flatten().tolist()) - {0}), 2)
    return max((list(pair) for pair in pairs), key=lambda ends: len(set(lengths(free, ends))))


def ending(model: Any, inputs: dict[str, torch.Tensor]) -> GenerationConfig:
    """Greedy, with ends that the rows come upon at different steps."""
    return greedy(eos_token_id=ends_apart(answers(model.generate(**inputs, generation_config=greedy()))))


def answers(output: torch.Tensor) -> torch.Tensor:
    return output[:, max(PROMPTS) :]


def lengths(answered: torch.Tensor, ends: list[int]) -> list[int]:
    """Tokens of each answer, its end included."""
    return [next((k + 1 for k, t in enumerate(row) if t in ends), len(row)) for row in answered.tolist()]


@pytest.mark.parametrize(
    ("make", "name"),
    [*((causal, name) for name in CAUSAL), *((vision_language, name) for name in VISION_LANGUAGE)],
)
def test_tokens_are_those_of_generate(make: Callable[[str], Any], name: str) -> None:
    torch.manual_seed(1)
    model = make(name).eval()
    inputs = prompts(60)
    with torch.inference_mode():
        config = ending(model, inputs)
        expected = answers(model.generate(**inputs, generation_config=config))
        batch = ShrinkingBatch()
        found = answers(model.generate(**inputs, generation_config=config, custom_generate=batch))
    made = lengths(expected, config.eos_token_id)
    assert len(set(made)) > 2  # rows that ended together would prove nothing
    assert found.tolist() == expected.tolist()
    assert (batch.slots, batch.idle_slots) == (sum(made) - len(made), 0)  # prefill gives each row's first token


def test_rows_that_cannot_leave_are_counted_as_idle() -> None:
    torch.manual_seed(1)
    model = causal("llama").eval()
    inputs = prompts(60)
    with torch.inference_mode():
        config = ending(model, inputs)
        config.encoder_repetition_penalty = 1.3  # its processor holds the prompts of all rows
        expected = answers(model.generate(**inputs, generation_config=config))
        batch = ShrinkingBatch()
        found = answers(model.generate(**inputs, generation_config=config, custom_generate=batch))
    made = lengths(expected, config.eos_token_id)
    assert found.tolist() == expected.tolist() and len(set(made)) > 2
    assert batch.slots == len(made) * (max(made) - 1)
    assert batch.idle_slots == sum(max(made) - length for length in made) > 0


def test_each_row_keeps_its_own_seed_and_penalties_see_its_own_tokens() -> None:
    torch.manual_seed(1)
    model = causal("gemma3").eval()
    inputs = prompts(60)
    rows = list(range(len(PROMPTS)))

    def sampled(rows: list[int], ends: list[int] | None, **options: Any) -> torch.Tensor:
        output = model.generate(
            **{key: value[rows] for key, value in inputs.items()},
            generation_config=greedy(eos_token_id=ends, repetition_penalty=1.2),
            logits_processor=[SeededSampler([70 + row for row in rows], temperature=0.7, top_p=0.9)],
            **options,
        )
        return answers(output)

    with torch.inference_mode():
        ends = ends_apart(sampled(rows, None))
        batch = ShrinkingBatch()
        together = sampled(rows, ends, custom_generate=batch)
        assert together.tolist() == sampled(rows, ends).tolist()
        made = lengths(together, ends)
        assert batch.slots == sum(made) - len(made) and len(set(made)) > 2
        for row, length in zip(rows, made, strict=True):
            alone = sampled([row], ends)
            assert alone.tolist() == together[row : row + 1, :length].tolist()


def test_strings_that_end_an_answer_are_found_in_the_rows_that_stay() -> None:
    words = tokenizer()
    torch.manual_seed(1)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**{**CONFIGS["llama"]().to_dict(), "vocab_size": len(words)})).eval()
    inputs = prompts(len(words))
    config = greedy()
    with torch.inference_mode():
        free = answers(model.generate(**inputs, generation_config=config))
        stop = [words.decode(row[4 * k + 1]) for k, row in enumerate(free[:4])]
        expected = model.generate(**inputs, generation_config=config, stop_strings=stop, tokenizer=words)
        batch = ShrinkingBatch()
        criteria = [StopStringCriteria(words, stop)]
        found = model.generate(**inputs, generation_config=config, stopping_criteria=criteria, custom_generate=batch)
    assert found.shape == expected.shape and batch.slots < len(PROMPTS) * (answers(expected).shape[1] - 1)
    for row, cut, whole in zip(answers(found), answers(expected), free, strict=True):
        end = next((k for k in range(len(row)) if row[k] != whole[k]), len(row))
        assert row[:end].tolist() == cut[:end].tolist() and not row[end:].any()
