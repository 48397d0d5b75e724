"""The captioner's whole recipe: data, two training stages, evaluation, model card."""

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import Qwen3VLForConditionalGeneration, Qwen3VLProcessor

from scripts.demo_models import captioner_build as build
from scripts.demo_models import captioner_evaluate as evaluate
from scripts.demo_models.captioner_batch import prepare
from scripts.demo_models.captioner_data import build_pool
from scripts.demo_models.captioner_train import STAGES, Heads, Pool, save, train

IMAGES, CLIPS, CHECKS = 6000, 5000, 160
WEIGHTS_SEED, DATA_SEED, TRAINING_SEED, EVALUATION_SEED = 0, 1, 2, 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = [stage.name for stage in STAGES]
    parser.add_argument("--out", type=Path, default=Path("pipeline/demo/models/captioner"))
    parser.add_argument(
        "--work", type=Path, default=Path("build/demo-captioner"), help="drawn data (2.2 GB) and stages"
    )
    parser.add_argument(
        "--start-at",
        choices=[*names, "evaluate"],
        default=names[0],
        help="continue with the data and the stages that an earlier call left in --work",
    )


def run(arguments: argparse.Namespace) -> None:
    """Runs the recipe from `--start-at` on; each answering stage leaves a usable model in `--out`."""
    torch.set_num_threads(1)
    work, out = arguments.work, arguments.out
    work.mkdir(parents=True, exist_ok=True)
    names = [stage.name for stage in STAGES] + ["evaluate"]
    start = names.index(arguments.start_at)
    if start < len(STAGES):
        _train(work, out, start)
    results = evaluate.evaluate(out, EVALUATION_SEED)
    for result in results:
        held_out = "held out" if result.held_out else "seen"
        print(f"{result.kind}, {held_out}, {result.question} {result.share:.3f} {result.wrong[:4]}", flush=True)
    evaluate.write_card(out, results, _account(_read_seconds(work)), EVALUATION_SEED)


def _train(work: Path, out: Path, start: int) -> None:
    torch.manual_seed(WEIGHTS_SEED)
    processor = build.build_processor()
    model = build.build_model(processor.tokenizer)
    heads = Heads(model.config.text_config.hidden_size)
    if start > 0:
        previous = work / STAGES[start - 1].name
        model = Qwen3VLForConditionalGeneration.from_pretrained(previous)
        heads.load_state_dict(torch.load(previous / "heads.pt"))
    pool = _pool(work, processor, model)
    for stage in STAGES[start:]:
        torch.manual_seed(TRAINING_SEED)
        started = time.process_time()
        train(model, processor, heads, pool, stage, seed=TRAINING_SEED)
        _note_seconds(work, stage.name, time.process_time() - started)
        save(model, processor, work / stage.name)
        torch.save(heads.state_dict(), work / stage.name / "heads.pt")
        if stage.answers:
            save(model, processor, out)


def _pool(work: Path, processor: Qwen3VLProcessor, model: Qwen3VLForConditionalGeneration) -> Pool:
    """The examples with their questions; drawn once, then read from `work`."""
    path = work / "data.pt"
    if not path.exists():
        started = time.process_time()
        torch.save(build_pool(processor, IMAGES, CLIPS, CHECKS, DATA_SEED), path)
        _note_seconds(work, "data", time.process_time() - started)
    drawn = torch.load(path, weights_only=False)
    return {name: prepare(processor, model, examples) for name, examples in drawn.items()}


def _read_seconds(work: Path) -> dict[str, float]:
    path = work / "seconds.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _note_seconds(work: Path, name: str, seconds: float) -> None:
    (work / "seconds.json").write_text(json.dumps(_read_seconds(work) | {name: round(seconds)}))


def _account(seconds: dict[str, float]) -> str:
    """How the model was trained, for its card."""
    stages = "; ".join(
        f"{stage.name}, {stage.steps} steps at {stage.rate:g} "
        f"({seconds.get(stage.name, '?')} CPU-seconds, {stage.clips_per_image} clip batches an image batch)"
        for stage in STAGES
    )
    return (
        f"{IMAGES} images and {CLIPS} clips of the combinations that are not held out, each through a real codec "
        f"({seconds.get('data', '?')} CPU-seconds to make). One CPU thread. Stages: {stages}. Seeds: weights "
        f"{WEIGHTS_SEED}, data {DATA_SEED}, order of batches {TRAINING_SEED}."
    )
