"""`headrace plan` and `headrace calibrate`: what a job will take, before it runs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import typer
from tqdm import tqdm

from pipeline.config import Config
from pipeline.demo.drawn import draw_demo
from pipeline.errors import ConfigError
from pipeline.models.vision_language import resolve_device
from pipeline.planning.calibration import Calibration, Prices
from pipeline.runs.plan_page import plan_page, plan_text
from pipeline.stages.calibrations import read_calibration, write_calibration
from pipeline.stages.dry_run import dry_run
from pipeline.stages.told_plan import told_plan

WORKERS = (1, 2, 4, 8)  # numbers of accelerators that times are told for, where nobody says
_TRANSFER_BYTES = 64 * 2**20  # as much as a row has at most


def run_plan(
    config: Config,
    *,
    sample: int | None,
    calibration: str | None,
    prices: Prices,
    workers: Sequence[int],
    json_file: str | None,
    page: str | None,
) -> None:
    """Print the plan of `config`; write it as JSON and as a page where that is asked for."""
    draw_demo(config)
    device = resolve_device(config.encode.device)
    rates = _load(calibration) if calibration is not None else read_calibration(config.anchored(), device)
    with tqdm(unit=" items", desc="plan", leave=False, disable=None) as bar:
        forecast = dry_run(config, device, sample=sample, told=lambda num_items: bar.update(num_items))
    plan = told_plan(config, forecast, rates, prices, workers)
    typer.echo(plan_text(plan))
    if json_file is not None:
        Path(json_file).write_text(json.dumps(plan, indent=2) + "\n", encoding="utf-8")
    if page is not None:
        Path(page).write_text(plan_page(plan), encoding="utf-8")


def run_calibrate(config: Config, *, output: str | None) -> None:
    """Measure this machine, print what was found, and keep it in the store or at `output`."""
    draw_demo(config)
    device = resolve_device(config.encode.device)
    # Not at the top: Ray takes seconds to import, and a plan does without.
    from pipeline import engine
    from pipeline.trial import calibrate

    rates = calibrate(config, device, told=lambda what: typer.echo(f"measuring {what}", err=True))
    with engine.ray_session(config.ray):
        rates = dataclasses.replace(rates, transfer_bytes_per_second=engine.transfer_rate(_TRANSFER_BYTES))
    for name, value in rates.to_json().items():
        typer.echo(f"{name:32} {'not measured' if value is None else value}")
    if output is None:
        where = write_calibration(config.anchored(), rates)
    else:
        Path(output).write_text(json.dumps(rates.to_json(), indent=2) + "\n", encoding="utf-8")
        where = output
    typer.echo(f"kept at {where}")


def _load(path: str) -> Calibration:
    try:
        return Calibration.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"--calibration {path}: not what headrace calibrate writes: {error}") from error
