"""The dual encoder's whole recipe: data, five training stages, evaluation, model card."""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import CLIPModel

from pipeline.demo import scenes
from pipeline.demo.scenes import Kind
from scripts.demo_models import dual_encoder_build as build
from scripts.demo_models import dual_encoder_evaluate as evaluate
from scripts.demo_models.dual_encoder_data import Example, build_pool
from scripts.demo_models.dual_encoder_train import STAGES, Heads, save, train

ITEMS_A_SCENE: dict[Kind, int] = {"image": 6, "video": 4}
WEIGHTS_SEED, DATA_SEED, TRAINING_SEED, EVALUATION_SEED, CHECKS_SEED = 0, 1, 2, 6, 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = [stage.name for stage in STAGES]
    parser.add_argument("--out", type=Path, default=Path("pipeline/demo/models/dual_encoder"))
    parser.add_argument(
        "--work", type=Path, default=Path("build/demo-dual-encoder"), help="drawn data (0.7 GB) and stages"
    )
    parser.add_argument(
        "--start-at",
        choices=[*names, "evaluate"],
        default=names[0],
        help="continue with the data and the stages that an earlier call left in --work",
    )


def run(arguments: argparse.Namespace) -> None:
    """Runs the recipe from `--start-at` on; leaves the model and its card in `--out`."""
    torch.set_num_threads(1)
    work, out = arguments.work, arguments.out
    work.mkdir(parents=True, exist_ok=True)
    start = [*(stage.name for stage in STAGES), "evaluate"].index(arguments.start_at)
    if start < len(STAGES):
        _train(work, out, start)
    results = evaluate.evaluate(out, EVALUATION_SEED)
    print(evaluate.caption_table(results), evaluate.partial_table(results), results.confused, sep="\n", flush=True)
    evaluate.write_card(out, results, _account(_read_seconds(work)), EVALUATION_SEED)


def _train(work: Path, out: Path, start: int) -> None:
    torch.manual_seed(WEIGHTS_SEED)
    processor = build.build_processor()
    model, heads = build.build_model(processor.tokenizer), Heads()
    if start > 0:
        previous = work / STAGES[start - 1].name
        model = CLIPModel.from_pretrained(previous)
        heads.load_state_dict(torch.load(previous / "heads.pt"))
    pool, checks = _drawn(work)
    for stage in STAGES[start:]:
        torch.manual_seed(TRAINING_SEED)
        started = time.process_time()
        train(model, processor, heads, pool, checks, stage, seed=TRAINING_SEED)
        _note_seconds(work, stage.name, time.process_time() - started)
        save(model, processor, work / stage.name)
        torch.save(heads.state_dict(), work / stage.name / "heads.pt")
    save(model, processor, out)


def _drawn(work: Path) -> tuple[list[Example], list[Example]]:
    """(examples to train on, others of seen scenes to watch the training); drawn once, then read from `work`."""
    pool = partial(build_pool, ITEMS_A_SCENE, scenes.BACKGROUNDS, DATA_SEED)
    # All places of one background: what differs in its place only has to be among them.
    checks = partial(build_pool, {"image": 1, "video": 1}, ["grey"], CHECKS_SEED)
    return _once(work, "data", pool), _once(work, "checks", checks)


def _once(work: Path, name: str, draw: Callable[[], list[Example]]) -> list[Example]:
    path = work / f"{name}.pt"
    if not path.exists():
        started = time.process_time()
        torch.save(draw(), path)
        _note_seconds(work, name, time.process_time() - started)
    drawn: list[Example] = torch.load(path, weights_only=False)
    return drawn


def _read_seconds(work: Path) -> dict[str, float]:
    path = work / "seconds.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _note_seconds(work: Path, name: str, seconds: float) -> None:
    (work / "seconds.json").write_text(json.dumps(_read_seconds(work) | {name: round(seconds)}))


def _account(seconds: dict[str, float]) -> str:
    """How the model was trained, for its card."""
    stages = "; ".join(
        f"{stage.name}, {stage.steps} steps at {stage.rate:g} ({seconds.get(stage.name, '?')} CPU-seconds, "
        f"{stage.images} images and {stage.clips} clips a batch)"
        for stage in STAGES
    )
    return (
        f"{ITEMS_A_SCENE['image']} images or {ITEMS_A_SCENE['video']} clips of each combination that is not held out, "
        f"each through a real codec ({seconds.get('data', '?')} CPU-seconds to make). One CPU thread. Stages: "
        f"{stages}. Seeds: weights {WEIGHTS_SEED}, data {DATA_SEED}, order of batches {TRAINING_SEED}."
    )
