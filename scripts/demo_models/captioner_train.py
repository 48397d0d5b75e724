"""The captioner's training stages, on one CPU thread.

Caption loss alone stays on a plateau: the tower never learns where to look. So the tower learns first, through
throw-away linear heads on its merged tokens that read the outline and the attributes; then everything learns the
answers while the heads' loss fades out. What is saved is a plain Qwen3-VL checkpoint. (700 more steps at 8e-4, tried
once, took captions of held-out clips from 0.985 to 0.963; the answers' loss was near 0.001 by then.)
"""

import math
import random
import time
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import Qwen3VLForConditionalGeneration, Qwen3VLProcessor

from pipeline.demo import scenes
from pipeline.demo.scenes import Kind, Scene
from scripts.demo_models.captioner_batch import (
    OUTLINE_CELLS,
    QuestionedItem,
    media_inputs,
    score,
    teacher_forced_accuracy,
)
from scripts.demo_models.captioner_build import MERGE

Pool = dict[str, list[QuestionedItem]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One stage: warm-up, `flat` of the steps at the full `rate`, then a cosine down to 3 % of it.

    `answers` false trains the tower and the heads alone. `heads` is the heads' first weight; it reaches zero at 60 % of
    an answering stage.
    """

    name: str
    steps: int
    rate: float
    answers: bool
    clips_per_image: int
    images_per_batch: int
    clips_per_batch: int
    flat: float
    heads: float

    def rate_at(self, step: int) -> float:
        done = step / self.steps
        fall = 0.0 if done < self.flat else (done - self.flat) / (1 - self.flat)
        return self.rate * min(1.0, (step + 1) / 75) * (0.03 + 0.97 * (1 + math.cos(math.pi * fall)) / 2)

    def heads_at(self, step: int) -> float:
        return self.heads * max(0.0, 1 - step / (0.6 * self.steps)) if self.answers else self.heads


STAGES = (
    Stage(
        name="look",
        steps=2600,
        rate=1.5e-3,
        answers=False,
        clips_per_image=1,
        images_per_batch=48,
        clips_per_batch=20,
        flat=0.3,
        heads=1.0,
    ),
    Stage(
        name="answer",
        steps=2200,
        rate=1.5e-3,
        answers=True,
        clips_per_image=2,
        images_per_batch=32,
        clips_per_batch=16,
        flat=0.5,
        heads=1.0,
    ),
)


class Heads(torch.nn.Module):
    """Linear read-outs of the tower's merged tokens; thrown away after training."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words: dict[str, list[str]] = {
            "shape": list(scenes.SHAPES),
            "colour": list(scenes.COLOURS),
            "size": list(scenes.SIZES),
            "background": list(scenes.BACKGROUNDS),
            "image": list(scenes.POSITIONS),
            "video": list(scenes.MOTIONS),
        }
        self.outline = torch.nn.Linear(width, MERGE**2 * OUTLINE_CELLS**2)
        self.attributes = torch.nn.ModuleDict(
            {
                name: torch.nn.Linear(2 * width if name == "video" else width, len(words))
                for name, words in self.words.items()
            }
        )

    def forward(self, batch: Sequence[QuestionedItem], features: Iterable[torch.Tensor]) -> torch.Tensor:
        """The loss for `features`, one `(merged tokens, width)` tensor an item."""
        features = list(features)
        on_object = [item.outline.mean(dim=1) for item in batch]
        target = torch.cat([item.outline for item in batch])
        loss = 3 * F.binary_cross_entropy_with_logits(self.outline(torch.cat(features)), target)
        pooled = torch.stack([_pool(f, w) for f, w in zip(features, on_object, strict=True)])
        around = torch.stack([_pool(f, (w < 0.01).float()) for f, w in zip(features, on_object, strict=True)])
        inputs = {"shape": pooled, "colour": pooled, "size": pooled, "background": around}
        kind = batch[0].scene.kind
        inputs[kind] = pooled if kind == "image" else _ends(batch, features, on_object)
        for name, values in inputs.items():
            words = [self.words[name].index(_attribute(item.scene, name)) for item in batch]
            loss = loss + F.cross_entropy(self.attributes[name](values), torch.tensor(words))
        return loss / 5


def _attribute(scene: Scene, name: str) -> str:
    word: str = scene.place if name in ("image", "video") else getattr(scene, name)
    return word


def _pool(features: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (weights[:, None] * features).sum(dim=0) / (weights.sum() + 1e-4)


def _ends(batch: Sequence[QuestionedItem], features: list[torch.Tensor], weights: list[torch.Tensor]) -> torch.Tensor:
    """`(items, 2 * width)`: the object's features in the first and in the last pair of frames."""
    rows = []
    for item, feature, weight in zip(batch, features, weights, strict=True):
        pairs = int(item.grid[0, 0])
        by_pair, weight = feature.view(pairs, -1, feature.shape[-1]), weight.view(pairs, -1)
        rows.append(torch.cat([_pool(by_pair[0], weight[0]), _pool(by_pair[-1], weight[-1])]))
    return torch.stack(rows)


class _Shuffled:
    """Endless batches; every item once before any item again."""

    def __init__(self, items: list[QuestionedItem], seed: int) -> None:
        self._items, self._rng, self._left = items, random.Random(seed), list[int]()

    def take(self, count: int) -> list[QuestionedItem]:
        if len(self._left) < count:
            self._left = list(range(len(self._items)))
            self._rng.shuffle(self._left)
        return [self._items[self._left.pop()] for _ in range(count)]


def train(
    model: Qwen3VLForConditionalGeneration,
    processor: Qwen3VLProcessor,
    heads: Heads,
    pool: Pool,
    stage: Stage,
    seed: int,
) -> None:
    """Runs one stage in place, printing the losses and the accuracy on `pool`'s check items as it goes."""
    _multiply_patches(model)
    model.train()
    started = time.process_time()
    parameters = [*(model if stage.answers else model.model.visual).parameters(), *heads.parameters()]
    optimizer = _optimizer(parameters)
    source: dict[Kind, _Shuffled] = {kind: _Shuffled(pool[kind], seed) for kind in scenes.QUESTIONS}
    losses: dict[Kind, list[float]] = {"image": [], "video": []}
    for step in range(stage.steps):
        kind: Kind = "video" if step % (stage.clips_per_image + 1) else "image"
        batch = source[kind].take(stage.images_per_batch if kind == "image" else stage.clips_per_batch)
        loss = _loss(model, heads, batch, stage, step, processor.tokenizer.pad_token_id)
        losses[kind].append(loss.item())
        _update(optimizer, parameters, loss, stage.rate_at(step))
        if (step + 1) % 100 == 0:
            recent = {kind: round(sum(values[-30:]) / 30, 4) for kind, values in losses.items()}
            print(f"{stage.name} {step + 1}: {time.process_time() - started:.0f} CPU s, loss {recent}", flush=True)
        if stage.answers and (step + 1) % 250 == 0:
            for name in ("image_check", "video_check"):
                shares = teacher_forced_accuracy(model, pool[name], processor.tokenizer.pad_token_id)
                print(f"  {name}: {[round(share, 3) for share in shares]}", flush=True)


def _loss(
    model: Qwen3VLForConditionalGeneration,
    heads: Heads,
    batch: list[QuestionedItem],
    stage: Stage,
    step: int,
    pad_token_id: int,
) -> torch.Tensor:
    kind, weight = batch[0].scene.kind, stage.heads_at(step)
    if not stage.answers:
        get_features = model.model.get_image_features if kind == "image" else model.model.get_video_features
        return weight * heads(batch, get_features(*media_inputs(batch), return_dict=True).pooler_output)
    scored = score(model, batch, pad_token_id)
    loss = F.cross_entropy(scored.logits, scored.labels)
    if weight:
        output = scored.output.image_outputs if kind == "image" else scored.output.video_outputs
        loss = loss + weight * heads(batch, output.pooler_output)
    return loss


def _optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    matrices = [p for p in parameters if p.ndim >= 2]
    vectors = [p for p in parameters if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), foreach=True)


def _update(
    optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], loss: torch.Tensor, rate: float
) -> None:
    loss.backward()
    for group in optimizer.param_groups:
        group["lr"] = rate
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    optimizer.zero_grad()


def _multiply_patches(model: Qwen3VLForConditionalGeneration) -> None:
    """Replaces the patch embedding's Conv3d by the equal matrix product, several times faster on a CPU."""

    def forward(self: torch.nn.Module, patches: torch.Tensor) -> torch.Tensor:
        weight = self.proj.weight.flatten(1)
        return F.linear(patches.view(-1, weight.shape[1]).to(weight.dtype), weight, self.proj.bias)

    patch_embed = model.model.visual.patch_embed
    patch_embed.forward = types.MethodType(forward, patch_embed)


def save(model: Qwen3VLForConditionalGeneration, processor: Qwen3VLProcessor, folder: Path) -> None:
    """A checkpoint that `AutoProcessor` and `AutoModelForImageTextToText` load (float32 safetensors)."""
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
