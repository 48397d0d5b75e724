"""Batches in which the questions about one item share its media.

The tower, and the language model's pass over the media, are most of the cost of a step. So each example becomes one
sequence, prefix + question 1 + answer 1 + question 2 + …, under a mask that lets a question see the prefix and itself
only, with positions as if it came right after the prefix. The logits equal those of separate sequences (to 1e-6).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Qwen3VLForConditionalGeneration, Qwen3VLProcessor

from pipeline.demo import scenes
from pipeline.demo.scenes import Kind, Scene
from scripts.demo_models.captioner_build import MERGE, PATCH, TEMPORAL_PATCH
from scripts.demo_models.captioner_data import Example, prompt

IGNORED = -100
OUTLINE_CELLS = 4  # a side of a patch, for the share of object pixels


@dataclass(frozen=True, kw_only=True, slots=True)
class QuestionedItem:
    """An example with its questions: `ids`, `labels`, `branch` `(tokens,)`, `positions` `(3, tokens)`.

    `branch` is 0 in the prefix and k + 1 in question k and its answer; `labels` are `IGNORED` outside answers.
    `outline` is `(merged tokens, 64)`: the share of object pixels in each 4 x 4 px cell, as the processor orders them.
    """

    scene: Scene
    ids: torch.Tensor
    labels: torch.Tensor
    branch: torch.Tensor
    positions: torch.Tensor
    grid: torch.Tensor
    patches: torch.Tensor
    outline: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """Logits `(labels, vocabulary)` at each label, with the label, its row and its question; and the model's output."""

    logits: torch.Tensor
    labels: torch.Tensor
    rows: torch.Tensor
    questions: torch.Tensor
    output: Any


def question_ids(processor: Qwen3VLProcessor, kind: Kind) -> list[torch.Tensor]:
    """The tokens between the media and the answer, for each question about `kind`."""
    media_end = {"image": "<|vision_end|>", "video": "<|video_pad|>"}[kind]
    tails = [prompt(processor, kind, question).rpartition(media_end)[2] for question in scenes.QUESTIONS[kind]]
    return [torch.tensor(processor.tokenizer(tail)["input_ids"]) for tail in tails]


def prepare(
    processor: Qwen3VLProcessor, model: Qwen3VLForConditionalGeneration, examples: Sequence[Example]
) -> list[QuestionedItem]:
    """The examples (of one kind) with all their questions and answers."""
    tails = question_ids(processor, examples[0].scene.kind)
    return [_sequence(processor.tokenizer, model, example, tails) for example in examples]


def _sequence(
    tokenizer: Any, model: Qwen3VLForConditionalGeneration, example: Example, tails: list[torch.Tensor]
) -> QuestionedItem:
    scene, prefix = example.scene, example.prefix
    grids = {f"{scene.kind}_grid_thw": example.grid}
    start = model.model.get_rope_index(prefix[None], example.token_types[None], **grids)[0][:, 0]
    ids, positions = [prefix], [start]
    labels, branch = [torch.full_like(prefix, IGNORED)], [torch.zeros_like(prefix)]
    for k, (question, tail) in enumerate(zip(scenes.QUESTIONS[scene.kind], tails, strict=True)):
        answer = scenes.answer(scene, question)
        target = torch.tensor([*tokenizer(answer)["input_ids"], tokenizer.eos_token_id])
        length = len(tail) + len(target)
        ids += [tail, target]
        labels += [torch.full_like(tail, IGNORED), target]
        branch.append(torch.full((length,), k + 1))
        positions.append((start[:, -1:] + 1 + torch.arange(length)).expand(3, length))
    return QuestionedItem(
        scene=scene,
        ids=torch.cat(ids),
        labels=torch.cat(labels),
        branch=torch.cat(branch),
        positions=torch.cat(positions, dim=1),
        grid=example.grid,
        patches=example.patches,
        outline=_outline(example.patches),
    )


def _outline(patches: torch.Tensor) -> torch.Tensor:
    """Object pixels are those that differ from the median (the background) by more than 32 levels in a channel."""
    pixels = patches.view(-1, 3, TEMPORAL_PATCH * PATCH**2).float()
    background = pixels.transpose(1, 2).reshape(-1, 3)[::7].median(dim=0).values
    is_object = ((pixels - background[:, None]).abs().amax(dim=1) > 32).float()
    cell = PATCH // OUTLINE_CELLS
    cells = is_object.view(-1, MERGE**2, TEMPORAL_PATCH, OUTLINE_CELLS, cell, OUTLINE_CELLS, cell)
    return cells.mean(dim=(2, 4, 6)).flatten(1)


def media_inputs(batch: Sequence[QuestionedItem]) -> tuple[torch.Tensor, torch.Tensor]:
    """(normalised patches, grids) of a batch of one kind."""
    patches = torch.cat([item.patches for item in batch]).float().div_(127.5).sub_(1)
    return patches, torch.cat([item.grid for item in batch])


def score(model: Qwen3VLForConditionalGeneration, batch: Sequence[QuestionedItem], pad_token_id: int) -> Scored:
    """One forward pass over a batch of one kind, all questions at once."""
    ids = _padded([item.ids for item in batch], pad_token_id)
    branch = _padded([item.branch for item in batch], -1)
    labels = _padded([item.labels for item in batch], IGNORED)
    length = ids.shape[1]
    positions = torch.zeros(3, len(batch), length, dtype=torch.long)
    for row, item in enumerate(batch):
        positions[:, row, : item.positions.shape[1]] = item.positions
    names = ("pixel_values", "image_grid_thw")
    if batch[0].scene.kind == "video":
        names = ("pixel_values_videos", "video_grid_thw")
    output = model.model(
        input_ids=ids,
        attention_mask=_branch_mask(branch),
        position_ids=positions,
        use_cache=False,
        **dict(zip(names, media_inputs(batch), strict=True)),
    )
    is_label = labels[:, 1:] != IGNORED
    return Scored(
        logits=model.lm_head(output[0][:, :-1][is_label]),
        labels=labels[:, 1:][is_label],
        rows=torch.arange(len(batch))[:, None].expand(-1, length - 1)[is_label],
        questions=branch[:, 1:][is_label] - 1,
        output=output,
    )


def _padded(rows: list[torch.Tensor], value: int) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


def _branch_mask(branch: torch.Tensor) -> torch.Tensor:
    """`bool (batch, 1, tokens, tokens)`: earlier tokens of the prefix and of the own branch; padding sees itself."""
    length = branch.shape[1]
    key, query = branch[:, None, :], branch[:, :, None]
    seen = ((key == 0) | (key == query)) & (key >= 0)
    seen &= torch.ones(length, length, dtype=torch.bool).tril()
    seen |= torch.eye(length, dtype=torch.bool)
    return seen[:, None]


@torch.no_grad()
def teacher_forced_accuracy(
    model: Qwen3VLForConditionalGeneration, items: Sequence[QuestionedItem], pad_token_id: int
) -> list[float]:
    """The share of items answered exactly, a question each; equals greedy generation, at a fraction of its cost."""
    model.eval()
    right = torch.ones(len(items), len(scenes.QUESTIONS[items[0].scene.kind]), dtype=torch.bool)
    for first in range(0, len(items), 32):
        scored = score(model, items[first : first + 32], pad_token_id)
        wrong = scored.logits.argmax(dim=-1) != scored.labels
        right[first + scored.rows[wrong], scored.questions[wrong]] = False
    model.train()
    return right.float().mean(dim=0).tolist()
