"""`headrace`: the command."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from jobs import store
from jobs.refusals import refusals
from jobs.running import run_config
from pipeline.config import load_config
from pipeline.errors import ConfigError

app = typer.Typer(help="Offline batch multimodal processing on Ray Data.", no_args_is_help=True, add_completion=False)
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replace one value: a.b=c.")]
Sample = Annotated[
    str | None, typer.Option(metavar="PERCENT", help="Only this part of the items, such as 1%, chosen by their ids.")
]
AcceleratorHour = Annotated[float | None, typer.Option(min=0, help="Price of an accelerator with its machine.")]
CoreHour = Annotated[float | None, typer.Option(min=0, help="Price of a core.")]
app.add_typer(store.app, name="store")


@app.callback()
def _commands() -> None:
    """A callback of its own keeps typer from merging a single command into the program."""


@app.command()
def run(
    config: Annotated[str, typer.Argument(help="A YAML file: one complete run.")],
    set_: Settings = None,
    sample: Sample = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what plan does, and write nothing.")] = False,
) -> None:
    """Run a job, or resume it. Exit codes: 0 done, 2 refused, 3 too many quarantined, 4 held, 5 interrupted."""
    raise typer.Exit(run_config(config, set_ or [], sample=sample, dry_run=dry_run))


@app.command()
def submit(
    config: Annotated[str, typer.Argument(help="A YAML file: one complete run.")],
    set_: Settings = None,
    sample: Sample = None,
    address: Annotated[
        str | None, typer.Option(help="Of the cluster's job server, such as http://127.0.0.1:8265; else RAY_ADDRESS.")
    ] = None,
    working_dir: Annotated[str, typer.Option(help="What the cluster is sent, the configuration in it.")] = ".",
    runtime_env: Annotated[str, typer.Option(metavar="JSON", help="Ray's runtime environment, besides that.")] = "{}",
    submission_id: Annotated[str | None, typer.Option(help="The job's name, instead of one that Ray makes.")] = None,
    wait: Annotated[bool, typer.Option(help="Follow the log and end with the job's exit code.")] = True,
) -> None:
    """Run a job on a Ray cluster: its log, and its exit code, as those of `run`. Interrupted, it stops the job."""
    with refusals():
        from jobs.submit import run_submit

        code = run_submit(
            config,
            set_ or [],
            sample=sample,
            address=address,
            working_dir=working_dir,
            runtime_env=_mapping(runtime_env),
            submission_id=submission_id,
            wait=wait,
        )
    raise typer.Exit(code)


def _mapping(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"--runtime-env takes a JSON object, got {text!r}")
    return value


@app.command()
def status(
    run: Annotated[str, typer.Argument(help="The folder of a run, or an output folder: its last run.")],
    json_: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Tell how far a run is: who holds it, windows and items done by pass, what was quarantined."""
    with refusals():
        from pipeline.runs.run_folder import find_run
        from pipeline.runs.status import run_status, status_text

        found = run_status(find_run(run))
    typer.echo(json.dumps(dataclasses.asdict(found), indent=2) if json_ else status_text(found))


@app.command()
def report(
    run: Annotated[str, typer.Argument(help="The folder of a run, or an output folder: its last run.")],
    accelerator_hour: AcceleratorHour = None,
    core_hour: CoreHour = None,
) -> None:
    """Write a run's report.html from what it has on disk, whether it has ended or not; prints where it is."""
    with refusals():
        from pipeline.planning.calibration import Prices
        from pipeline.runs.run_folder import find_run
        from pipeline.runs.run_page import rewrite_run_page

        where = rewrite_run_page(find_run(run), Prices(accelerator_hour=accelerator_hour, core_hour=core_hour))
    typer.echo(f"report  {where}")


@app.command()
def retry(
    run: Annotated[str, typer.Argument(help="The folder of a run that has ended, or an output folder: its last run.")],
    code: Annotated[list[str] | None, typer.Option(help="Only what was quarantined with this code.")] = None,
) -> None:
    """Work on a run's quarantined items once more, and on nothing else; parts are rewritten. Exit codes of `run`."""
    with refusals():
        from jobs.retry import run_retry
        from pipeline.runs.run_folder import find_run

        found = find_run(run)
        summary = run_retry(found, code or ())
    if summary is None:
        typer.echo("nothing to retry")
        return
    written, quarantined = summary["items_written"], summary["items_quarantined"]
    typer.echo(f"{written} of {summary['items_in']} items written, {quarantined} quarantined")
    typer.echo(f"output  {found.url}")


@app.command()
def compare(
    left: Annotated[str, typer.Argument(metavar="RUN_A", help="The folder of a run that has ended.")],
    right: Annotated[str, typer.Argument(metavar="RUN_B", help="Another.")],
    json_: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Tell what differs between two runs, item by item, and in what made them. Exit code 1 when results differ."""
    with refusals():
        from pipeline.runs.compare import compare_runs, comparison_text
        from pipeline.runs.run_folder import find_run

        runs = find_run(left), find_run(right)
        found = compare_runs(*runs)
    names = runs[0].url, runs[1].url
    typer.echo(json.dumps(found.to_json(), indent=2) if json_ else comparison_text(found, names))
    raise typer.Exit(int(not found.same_results))


@app.command()
def evaluate(
    config: Annotated[str, typer.Argument(help="A YAML file: one complete run.")],
    labels: Annotated[str, typer.Option(metavar="FILE", help="What answers have to say, a JSON object a line.")],
    set_: Settings = None,
    baseline: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Replace one value of the baseline, after all else.")
    ] = None,
    max_regression: Annotated[
        float | None, typer.Option(min=0, max=1, help="Exit code 1 when a class loses more accuracy than this.")
    ] = None,
    json_: Annotated[str | None, typer.Option("--json", metavar="FILE", help="Where to write all of it.")] = None,
) -> None:
    """Run a configuration and a full-detail baseline on labelled items; tell by class what its answers lose."""
    with refusals():
        from pipeline.demo.drawn import draw_demo
        from pipeline.runs.evaluation import evaluation_text, read_labels

        loaded = load_config(config, set_)
        draw_demo(loaded)  # with its labels
        known = read_labels(labels)
        # Not at the top: labels that are refused are said without waiting for torch and Ray.
        from jobs.evaluating import failed_classes, run_evaluation

        found = run_evaluation(loaded, known, baseline or [])
    results = found.pop("results")
    failed = [] if max_regression is None else failed_classes(results, max_regression)
    if json_ is not None:
        told = {**found, "max_regression": max_regression, "passed": not failed}
        classes = [each.to_json() for each in results]
        Path(json_).write_text(json.dumps({**told, "classes": classes}, indent=2) + "\n", encoding="utf-8")
    typer.echo(f"run      {found['run']}\nbaseline {found['baseline']}  ({', '.join(found['baseline_settings'])})\n")
    typer.echo(evaluation_text(results))
    for each in failed:
        typer.echo(f"headrace: {each.name} loses {each.regression:.3f}, above {max_regression}", err=True)
    raise typer.Exit(int(bool(failed)))


@app.command()
def plan(
    config: Annotated[str, typer.Argument(help="A YAML file: one complete run.")],
    set_: Settings = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many rows.")] = None,
    sample: Annotated[int | None, typer.Option(min=1, help="Probe about so many rows, which stand for all.")] = None,
    calibration: Annotated[str | None, typer.Option(metavar="FILE", help="Instead of the one in the store.")] = None,
    workers: Annotated[str, typer.Option(help="Numbers of accelerators to tell times for.")] = "1,2,4,8",
    accelerator_hour: AcceleratorHour = None,
    core_hour: CoreHour = None,
    gb_month: Annotated[float | None, typer.Option(min=0, help="Price of a GB in the store for a month.")] = None,
    json_: Annotated[str | None, typer.Option("--json", metavar="FILE", help="Where to write all of it.")] = None,
    page: Annotated[str | None, typer.Option(metavar="FILE", help="Where to write the page with plots.")] = None,
) -> None:
    """Tell what a run would do, from headers alone: items, rejections, tokens, bytes, and times where calibrated."""
    with refusals():
        from jobs.planning import run_plan
        from pipeline.planning.calibration import Prices

        loaded = load_config(config, set_)
        run_plan(
            loaded if limit is None else loaded.model_copy(update={"limit": limit}),
            sample=sample,
            calibration=calibration,
            prices=Prices(accelerator_hour=accelerator_hour, core_hour=core_hour, gb_month=gb_month),
            workers=_numbers(workers),
            json_file=json_,
            page=page,
        )


def _numbers(text: str) -> list[int]:
    if not re.fullmatch(r"[1-9][0-9]*(,[1-9][0-9]*)*", text):
        raise ConfigError(f"--workers takes numbers such as 1,2,4, got {text!r}")
    return [int(number) for number in text.split(",")]


@app.command()
def calibrate(
    config: Annotated[str, typer.Argument(help="A YAML file: one complete run.")],
    set_: Settings = None,
    output: Annotated[str | None, typer.Option(metavar="FILE", help="Where to keep it, instead of the store.")] = None,
) -> None:
    """Measure how fast this machine does the job's stages, in about a minute, for `plan` and the forecasts of runs."""
    with refusals():
        from jobs.planning import run_calibrate

        run_calibrate(load_config(config, set_), output=output)


@app.command(name="profile-cache")
def profile_cache(
    config: Annotated[str, typer.Argument(help="A YAML file: one complete run.")],
    set_: Settings = None,
    question: Annotated[str, typer.Option(help="What is asked second, of the same media.")] = "What is shown?",
    items: Annotated[int, typer.Option(min=1, help="How many are asked about, from the middle of the listing.")] = 64,
    json_: Annotated[str | None, typer.Option("--json", metavar="FILE", help="Where to write all of it.")] = None,
) -> None:
    """Measure what kept frames and kept features save a second question, and what they take; four runs of some items.

    Exit code 1 when an answer is not the one without a cache.
    """
    with refusals():
        from pipeline.demo.drawn import draw_demo

        loaded = load_config(config, set_)
        draw_demo(loaded)
        # Not at the top: it imports Ray.
        from pipeline import cache_profile

        profile = cache_profile.profile_cache(
            loaded, question, items, told=lambda what: typer.echo(f"measuring {what}", err=True)
        )
        typer.echo(cache_profile.profile_text(profile))
        if json_ is not None:
            Path(json_).write_text(json.dumps(profile.to_json(), indent=2) + "\n", encoding="utf-8")
    if not all(each.same_output for each in profile.tiers):
        raise typer.Exit(1)


@app.command()
def search(
    run: Annotated[str, typer.Argument(help="The folder of a run, or an output folder: its last run.")],
    query: Annotated[str, typer.Argument(help="What to look for, in words.")],
    limit: Annotated[int, typer.Option(min=1, help="How many to show.")] = 10,
    tenant: Annotated[str, typer.Option(help="Whose items.")] = "",
    page: Annotated[str | None, typer.Option(metavar="FILE", help="Where to write the page with pictures.")] = None,
) -> None:
    """Find items of a run that embedded them: printed here, and as a page with pictures."""
    with refusals():
        # Not at the top: help is printed without waiting for torch.
        from jobs.search import run_search

        run_search(run, query, limit=limit, tenant=tenant, page=page)


@app.command()
def conform(
    config: Annotated[str, typer.Argument(help="A YAML file: one complete run.")], set_: Settings = None
) -> None:
    """Check a job's models against the libraries they were made for: six verdicts each. Exit code 1 if one differs."""
    with refusals():
        from pipeline.conformance import conform as check

        found = check(load_config(config, set_))
    for checked, verdicts in found:
        typer.echo(f"\n{checked}")
        for each in verdicts:
            typer.echo(f"  {'agrees ' if each.agrees else 'DIFFERS'}  {each.field:14} {each.says}  ({each.measured})")
    raise typer.Exit(int(not all(each.agrees for _, verdicts in found for each in verdicts)))


@app.command()
def limits(
    config: Annotated[str, typer.Argument(help="A YAML file: one complete run.")], set_: Settings = None
) -> None:
    """Print the admission budget, and where media may be read from, that a configuration puts in force."""
    with refusals():
        loaded = load_config(config, set_)
        sources = dataclasses.asdict(loaded.source_policy())
        typer.echo(json.dumps({**dataclasses.asdict(loaded.limits()), "sources": sources}, indent=2))


def main() -> None:
    """The console script."""
    sys.exit(app())
