"""What the saved captioner answers, through the plain processor and `generate`, and its model card."""

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from pipeline.demo import media, scenes
from pipeline.demo.scenes import Kind, Scene
from scripts.demo_models.captioner_data import SHARE_OF_FPS_POLICY, process
from scripts.demo_models.items import Item, clip_item, image_item, seen_scenes

BATCH = 32
MAX_NEW_TOKENS = 24
SEEN_SCENES = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Exact answers to one question about one set of items."""

    kind: Kind
    held_out: bool
    question: str
    items: int
    right: int
    wrong: list[tuple[str, str]]

    @property
    def share(self) -> float:
        return self.right / self.items


@torch.no_grad()
def evaluate(folder: Path, seed: int) -> list[Result]:
    """Loads the model from `folder` and asks it every question about freshly drawn items.

    100 seen and all 90 held-out scenes of each kind, each once in every image format or video codec.
    """
    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    rng = random.Random(seed)
    results = []
    for kind, held_out in itertools.product(scenes.QUESTIONS, (False, True)):
        chosen = sorted(scenes.held_out(kind)) if held_out else rng.sample(seen_scenes(kind), SEEN_SCENES)
        items = list(_items(chosen, rng))
        for question in scenes.QUESTIONS[kind]:
            expected = [scenes.answer(item.scene, question) for item in items]
            given = list(generate(model, processor, items, question))
            wrong = [pair for pair in zip(expected, given, strict=True) if pair[0] != pair[1]]
            results.append(
                Result(
                    kind=kind,
                    held_out=held_out,
                    question=question,
                    items=len(items),
                    right=len(items) - len(wrong),
                    wrong=wrong,
                )
            )
    return results


def _items(chosen: Iterable[Scene], rng: random.Random) -> Iterator[Item]:
    """Every scene once in each format or codec."""
    for scene in chosen:
        if scene.kind == "image":
            yield from (image_item(scene, format, rng) for format in media.IMAGE_FORMATS)
        else:
            yield from (clip_item(scene, codec, rng, fps_share=SHARE_OF_FPS_POLICY) for codec in media.VIDEO_CODECS)


def generate(model: torch.nn.Module, processor: AutoProcessor, items: Sequence[Item], question: str) -> Iterator[str]:
    """The answers, in order; greedy, as the checkpoint's generation config says."""
    for first in range(0, len(items), BATCH):
        inputs = process(processor, items[first : first + BATCH], question)
        tokens = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS)
        answers = tokens[:, inputs["input_ids"].shape[1] :]
        yield from processor.batch_decode(answers, skip_special_tokens=True)


def table(results: Iterable[Result]) -> str:
    """A Markdown table: a row a question, seen and held-out side by side."""
    lines = [
        "| media | question | seen | held out |",
        "| --- | --- | --- | --- |",
    ]
    by_question = itertools.groupby(
        sorted(results, key=lambda r: (r.kind, scenes.QUESTIONS[r.kind].index(r.question), r.held_out)),
        key=lambda r: (r.kind, r.question),
    )
    for (kind, question), pair in by_question:
        shares = " | ".join(f"{r.share:.3f} ({r.right} of {r.items})" for r in pair)
        lines.append(f"| {kind} | {question} | {shares} |")
    return "\n".join(lines)


CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: image-text-to-text
---

# Demo captioner

A Qwen3-VL of {parameters:.1f} M parameters (float32, {megabytes:.1f} MB), trained from nothing on the drawn scenes of
`pipeline/demo/scenes.py`. It knows one shape on a plain background, in stills and in clips of 2-4 seconds, and answers
the questions below. It exists so that a first run, and the tests, have a real model whose right answers are known.
It is of no use on other pictures.

{questions}

Licence: Apache-2.0; weights and data were made by the code of this repository, no outside data or weights were used.

## Made by

    scripts/train_demo_models captioner

{training}

## Accuracy

Exact answers of `generate` (greedy, batches of {batch}, left-padded) through the plain processor. {seen} seen scenes
and all {unseen} held-out combinations of each kind, drawn afresh (seed {evaluation_seed}), each once in every image
format ({formats}) or video codec ({codecs}); clips sampled at 2 frames a second (three in four) or at 4-8
evenly spaced times.

{table}
"""


def write_card(folder: Path, results: Iterable[Result], training: str, evaluation_seed: int) -> None:
    """`README.md` beside the weights."""
    model = AutoModelForImageTextToText.from_pretrained(folder)
    questions = dict.fromkeys(itertools.chain(*scenes.QUESTIONS.values()))
    card = CARD.format(
        parameters=sum(p.numel() for p in model.parameters()) / 1e6,
        megabytes=(folder / "model.safetensors").stat().st_size / 1e6,
        questions="\n".join(f"- {question}" for question in questions),
        training=training,
        batch=BATCH,
        seen=SEEN_SCENES,
        unseen=len(scenes.held_out("image")),
        evaluation_seed=evaluation_seed,
        formats=", ".join(media.IMAGE_FORMATS),
        codecs=", ".join(media.VIDEO_CODECS),
        table=table(results),
    )
    (folder / "README.md").write_text(card)
