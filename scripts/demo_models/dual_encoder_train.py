"""The dual encoder's training stages, on one CPU thread.

The contrastive loss alone stays on a plateau. So the image tower learns first, through throw-away linear heads that
read the outline, the place and the attributes; then both towers learn to meet while the heads' loss fades out. What is
saved is a plain CLIP checkpoint.
"""

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import CLIPModel, CLIPProcessor

from pipeline.demo.scenes import BACKGROUNDS, COLOURS, Kind, Scene
from scripts.demo_models.dual_encoder_build import GRID, WIDTH
from scripts.demo_models.dual_encoder_data import (
    ATTRIBUTES,
    OUTLINE_CELLS,
    OUTLINE_SIDE,
    Example,
    Query,
    attributes,
    full_query,
    matches,
    partial_query,
)

LARGEST_LOGIT_SCALE = math.log(100)  # CLIP's own limit (Radford et al. 2021, section 2.5)
# Not all positive. With t + 1 the score of a clip is, up to its length, a mean of its frames' scores: at every height,
# clips that run left would have to score more than those that run up do anywhere, yet averaged over all heights and
# places both are one number. Measured with t + 1: 0.265 of clips found by their captions, about chance among motions.
FIRST_WEIGHT, LAST_WEIGHT = -5.0, 7.0
PLACE_BINS = 8
MIRROR, BACKWARDS = -1, 0  # the dimensions of frames that are turned over
MIRRORED = {
    "at the left": "at the right",
    "at the right": "at the left",
    "moving left": "moving right",
    "moving right": "moving left",
}
REVERSED = {
    "moving left": "moving right",
    "moving right": "moving left",
    "moving up": "moving down",
    "moving down": "moving up",
}
_SEEN_IN_ONE_FRAME = [name for name in ATTRIBUTES if name != "place"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One stage: warm-up, `flat` of the steps at the full `rate`, then a cosine down to 3 % of it.

    A batch holds `images` images and `clips` clips; of the clips, a stage without texts sees one frame each. Every
    `easy_every`th batch is drawn from all scenes, the others from those of `colours` colours and `backgrounds`
    backgrounds, so that the other attributes decide. `turned`: some are mirrored or run backwards. `heads` is the
    heads' first weight; it reaches zero at 60 % of a stage with texts.
    """

    name: str
    steps: int
    rate: float
    texts: bool
    images: int
    clips: int
    easy_every: int
    colours: int
    backgrounds: int
    turned: bool
    heads: float
    flat: float

    def rate_at(self, step: int) -> float:
        done = step / self.steps
        fall = 0.0 if done < self.flat else (done - self.flat) / (1 - self.flat)
        return self.rate * min(1.0, (step + 1) / 60) * (0.03 + 0.97 * (1 + math.cos(math.pi * fall)) / 2)

    def heads_at(self, step: int) -> float:
        return self.heads * (max(0.0, 1 - step / (0.6 * self.steps)) if self.texts else 1)


STAGES = (
    Stage(
        name="look",
        steps=1200,
        rate=1.5e-3,
        texts=False,
        images=40,
        clips=40,
        easy_every=2,
        colours=2,
        backgrounds=2,
        turned=False,
        heads=1.0,
        flat=0.3,
    ),
    Stage(
        name="match",
        steps=1000,
        rate=2e-3,
        texts=True,
        images=48,
        clips=48,
        easy_every=2,
        colours=2,
        backgrounds=2,
        turned=False,
        heads=1.0,
        flat=0.4,
    ),
    Stage(
        name="settle",
        steps=500,
        rate=1e-3,
        texts=True,
        images=40,
        clips=56,
        easy_every=3,
        colours=1,
        backgrounds=2,
        turned=True,
        heads=0.0,
        flat=0.2,
    ),
    Stage(
        name="polish",
        steps=450,
        rate=1e-3,
        texts=True,
        images=40,
        clips=56,
        easy_every=3,
        colours=2,
        backgrounds=1,
        turned=True,
        heads=0.0,
        flat=0.2,
    ),
    Stage(
        name="finish",
        steps=600,
        rate=4e-4,
        texts=True,
        images=48,
        clips=64,
        easy_every=3,
        colours=2,
        backgrounds=2,
        turned=True,
        heads=0.0,
        flat=0.2,
    ),
)


def trend(vectors: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """`(items, D)` unit vectors from `(sum of counts, D)`, the frames of all items in order, `counts[i]` of item i.

    Each frame's vector is L2-normalised; the weights of an item's T frames rise linearly from -5/T for its first to 7/T
    for its last (1 for an only frame; their sum is 1); the weighted sum is L2-normalised again.
    """
    weights = torch.cat([torch.linspace(FIRST_WEIGHT, LAST_WEIGHT, n) / n if n > 1 else torch.ones(1) for n in counts])
    item = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    weighted = weights[:, None] * F.normalize(vectors, dim=-1)
    return F.normalize(vectors.new_zeros(len(counts), vectors.shape[1]).index_add(0, item, weighted), dim=-1)


def pairwise_loss(logits: torch.Tensor, positive: torch.Tensor) -> torch.Tensor:
    """InfoNCE of each positive among its row's negatives, averaged over the row's positives, then over the rows.

    A row's other positives are not among the negatives. Every row has a positive.
    """
    negatives = logits.masked_fill(positive, -1e4).logsumexp(dim=1, keepdim=True)
    losses = F.softplus(negatives - logits) * positive
    return (losses.sum(dim=1) / positive.sum(dim=1)).mean()


class Heads(torch.nn.Module):
    """Linear read-outs of the image tower; thrown away after training."""

    def __init__(self) -> None:
        super().__init__()
        self.outline = torch.nn.Linear(WIDTH, OUTLINE_CELLS**2)
        counts = {name: len(ATTRIBUTES[name]) for name in _SEEN_IN_ONE_FRAME}
        self.of_patches = torch.nn.ModuleDict({name: torch.nn.Linear(WIDTH, n) for name, n in counts.items()})
        self.of_whole = torch.nn.ModuleDict({name: torch.nn.Linear(WIDTH, n) for name, n in counts.items()})
        self.row, self.column = torch.nn.Linear(WIDTH, PLACE_BINS), torch.nn.Linear(WIDTH, PLACE_BINS)

    def forward(
        self, scenes: Sequence[Scene], outlines: torch.Tensor, patches: torch.Tensor, whole: torch.Tensor
    ) -> torch.Tensor:
        """The loss for frames of `scenes`: their outlines, patch tokens `(frames, 36, W)`, whole `(frames, W)`."""
        cells = _by_patch(outlines)
        loss = 3 * F.binary_cross_entropy_with_logits(self.outline(patches), cells)
        share = cells.mean(dim=-1)
        on, off = _pool(patches, share), _pool(patches, (share < 0.01).float())
        numbers = torch.tensor([attributes(scene) for scene in scenes])
        for place, name in enumerate(ATTRIBUTES):
            if name in _SEEN_IN_ONE_FRAME:
                from_patches = self.of_patches[name](off if name == "background" else on)
                loss = loss + F.cross_entropy(from_patches, numbers[:, place])
                loss = loss + F.cross_entropy(self.of_whole[name](whole), numbers[:, place])
        for head, lines in ((self.row, outlines.sum(dim=2)), (self.column, outlines.sum(dim=1))):
            centres = (lines * torch.arange(OUTLINE_SIDE)).sum(dim=1) / (lines.sum(dim=1) + 1e-4)
            loss = loss + F.cross_entropy(head(whole), (centres * PLACE_BINS / OUTLINE_SIDE).long())
        return loss / 10


def _by_patch(outlines: torch.Tensor) -> torch.Tensor:
    """`(frames, 24, 24)` cells as `(frames, 36 patches, 16)`."""
    cells = outlines.view(-1, GRID, OUTLINE_CELLS, GRID, OUTLINE_CELLS)
    return cells.permute(0, 1, 3, 2, 4).reshape(len(outlines), GRID**2, OUTLINE_CELLS**2)


def _pool(tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (weights[..., None] * tokens).sum(dim=1) / (weights.sum(dim=1, keepdim=True) + 1e-4)


class Batches:
    """Random batches of a stage."""

    def __init__(self, pool: Sequence[Example], seed: int) -> None:
        self._rng = random.Random(seed)
        self._examples: dict[Kind, dict[Scene, list[Example]]] = {"image": {}, "video": {}}
        for example in pool:
            self._examples[example.scene.kind].setdefault(example.scene, []).append(example)

    def take(self, stage: Stage, step: int) -> list[Example]:
        """Examples of `stage.images` and `stage.clips` scenes, each another."""
        easy = step % stage.easy_every == 0
        colours = self._rng.sample(list(COLOURS), len(COLOURS) if easy else stage.colours)
        backgrounds = self._rng.sample(list(BACKGROUNDS), len(BACKGROUNDS) if easy else stage.backgrounds)
        batch = []
        for kind, count in (("image", stage.images), ("video", stage.clips)):
            chosen = [s for s in self._examples[kind] if s.colour in colours and s.background in backgrounds]
            for scene in self._rng.sample(chosen, min(count, len(chosen))):
                batch.append(self._rng.choice(self._examples[kind][scene]))
        return [self._turned(example) for example in batch] if stage.turned else batch

    def _turned(self, example: Example) -> Example:
        """The example, or its mirror image, or (a clip) itself backwards; never as a scene that is held out."""
        axis = self._rng.choice((None, MIRROR, BACKWARDS) if example.scene.kind == "video" else (None, MIRROR))
        if axis is None:
            return example
        place = (MIRRORED if axis == MIRROR else REVERSED).get(example.scene.place, example.scene.place)
        scene = replace(example.scene, place=place)
        if scene not in self._examples[scene.kind]:
            return example
        return Example(scene=scene, frames=example.frames.flip(axis), outline=example.outline.flip(axis))

    def one_frame_each(self, batch: Sequence[Example]) -> list[Example]:
        """The same examples, each cut to a random frame."""
        single = []
        for example in batch:
            i = self._rng.randrange(len(example.frames))
            one = {"frames": example.frames[i : i + 1], "outline": example.outline[i : i + 1]}
            single.append(Example(scene=example.scene, **one))
        return single

    def queries(self, batch: Sequence[Example]) -> list[Query]:
        """The caption of every example, then a partial query for every example."""
        scenes = [example.scene for example in batch]
        return [*map(full_query, scenes), *(partial_query(scene, self._rng) for scene in scenes)]


def train(
    model: CLIPModel,
    processor: CLIPProcessor,
    heads: Heads,
    pool: Sequence[Example],
    checks: Sequence[Example],
    stage: Stage,
    seed: int,
) -> None:
    """Runs one stage in place, printing the losses and the captions that find their own among `checks` as it goes."""
    model.train()
    started = time.process_time()
    parameters = [*(model if stage.texts else model.vision_model).parameters(), *heads.parameters()]
    optimizer = _optimizer(parameters)
    batches, losses = Batches(pool, seed), list[tuple[float, ...]]()
    for step in range(stage.steps):
        batch = batches.take(stage, step)
        if stage.texts:
            terms = _matching_losses(model, processor, heads, batch, batches.queries(batch), stage.heads_at(step))
        else:
            terms = [_looking_loss(model, heads, batches.one_frame_each(batch))[0]]
        _update(optimizer, parameters, sum(terms[1:], terms[0]), stage.rate_at(step))
        with torch.no_grad():
            model.logit_scale.clamp_(max=LARGEST_LOGIT_SCALE)
        losses.append(tuple(term.item() for term in terms))
        if (step + 1) % 50 == 0:
            recent = [round(sum(column) / len(column), 4) for column in zip(*losses[-50:], strict=True)]
            print(f"{stage.name} {step + 1}: {time.process_time() - started:.0f} CPU s, losses {recent}", flush=True)
        if stage.texts and (step + 1) % 100 == 0:
            print(f"  captions that find their own: {caption_top1(model, processor, checks)}", flush=True)


def _looking_loss(model: CLIPModel, heads: Heads, batch: Sequence[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    """(the heads' loss, pooled output `(frames, W)`) of all frames of the batch."""
    output = model.vision_model(pixel_values=pixel_values(batch))
    scenes = [example.scene for example in batch for _ in example.frames]
    outlines = torch.cat([example.outline for example in batch])
    return heads(scenes, outlines, output.last_hidden_state[:, 1:], output.pooler_output), output.pooler_output


def _matching_losses(
    model: CLIPModel,
    processor: CLIPProcessor,
    heads: Heads,
    batch: Sequence[Example],
    queries: Sequence[Query],
    heads_weight: float,
) -> list[torch.Tensor]:
    """Texts to items, items to texts, and the heads' loss by its weight."""
    heads_loss, pooled = _looking_loss(model, heads, batch)
    items = trend(model.visual_projection(pooled), [len(example.frames) for example in batch])
    logits = model.logit_scale.exp() * _text_vectors(model, processor, queries) @ items.T
    positive = matches(queries, [example.scene for example in batch])
    return [pairwise_loss(logits, positive), pairwise_loss(logits.T, positive.T), heads_weight * heads_loss]


@torch.no_grad()
def caption_top1(model: CLIPModel, processor: CLIPProcessor, shown: Sequence[Example]) -> dict[Kind, float]:
    """The share of captions, by kind, whose best item in the index of `shown` (of different scenes) is their own."""
    items = torch.cat([_item_vectors(model, shown[i : i + 64]) for i in range(0, len(shown), 64)])
    texts = _text_vectors(model, processor, [full_query(example.scene) for example in shown])
    right = (texts @ items.T).argmax(dim=1) == torch.arange(len(shown))
    kinds = [example.scene.kind for example in shown]
    return {k: round(right[torch.tensor([kind == k for kind in kinds])].float().mean().item(), 3) for k in set(kinds)}


def _item_vectors(model: CLIPModel, batch: Sequence[Example]) -> torch.Tensor:
    vectors = model.get_image_features(pixel_values=pixel_values(batch)).pooler_output
    return trend(vectors, [len(example.frames) for example in batch])


def _text_vectors(model: CLIPModel, processor: CLIPProcessor, queries: Sequence[Query]) -> torch.Tensor:
    tokens = processor.tokenizer([query.text for query in queries], padding=True, return_tensors="pt")
    output = model.text_model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"])
    return F.normalize(model.text_projection(output.pooler_output), dim=-1)


def pixel_values(batch: Sequence[Example]) -> torch.Tensor:
    """`(frames, 3, 96, 96)` of all frames of the batch, normalised as by the processor."""
    return torch.cat([example.frames for example in batch]).float().div_(127.5).sub_(1)


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


def save(model: CLIPModel, processor: CLIPProcessor, folder: Path) -> None:
    """A checkpoint that `CLIPModel` and `CLIPProcessor` load (float32 safetensors)."""
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
