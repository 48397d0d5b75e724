"""Parse, run, exit code: what every entry point does."""

from __future__ import annotations

import logging
import signal
import sys
import types

from pipeline.config import Config, load_config
from pipeline.errors import ConfigError, HeadraceError, InterruptedRunError
from pipeline.logs import start_logs
from pipeline.runs.report import forecast_rows

_log = logging.getLogger("pipeline.jobs")


def run_config(
    path: str, settings: list[str], *, job: str | None = None, sample: str | None = None, dry_run: bool = False
) -> int:
    """Run the configuration at `path`; prints where the results are, or what went wrong. Returns the exit code.

    With `job` a configuration of another job is refused; `sample`, such as "1%", is that part of the listing; with
    `dry_run` only what `headrace plan` prints of it is printed, and nothing is written.
    """
    config: Config | None = None
    try:
        config = load_config(path, settings)
        if job not in (None, config.job):
            raise ConfigError(f"{path}: is of the job {config.job!r}, not {job!r}; start jobs.{config.job}")
        if sample is not None:
            config = config.sampled(sample)
        if dry_run:
            _print_plan(config)
            return 0
        start_logs(config.logs.format)
        # Not at the top: a refused configuration is said without waiting for torch and Ray.
        from pipeline.flow import run

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _interrupt)
        summary = run(config)
    except HeadraceError as error:
        if config is not None and config.logs.format == "json":
            _log.error("%s", error, extra={"exit_code": error.exit_code})
        else:
            print(f"headrace: {error}", file=sys.stderr)
        return error.exit_code
    folder = f"{config.output.rstrip('/')}/{summary['run_id']}"
    print(
        f"{summary['items_written']} of {summary['items_in']} items written, "
        f"{summary['items_reused']} without encoding, {summary['items_quarantined']} quarantined"
    )
    if summary["sample_fraction"] is not None:
        print(f"  a sample: {summary['sample_fraction']:.4%} of the ids in {config.input}")
    for name, forecast, found, _ in forecast_rows(summary["forecast"]):
        print(f"  {name}: {forecast} forecast, {found} found")
    print(f"output  {folder}\nsummary {folder}/summary.json\nreport  {folder}/report.html")
    return 0


def _print_plan(config: Config) -> None:
    from jobs.planning import WORKERS, run_plan
    from pipeline.planning.calibration import Prices

    run_plan(config, sample=None, calibration=None, prices=Prices(), workers=WORKERS, json_file=None, page=None)


def _interrupt(number: int, frame: types.FrameType | None) -> None:
    raise InterruptedRunError(f"stopped by {signal.Signals(number).name}; start the same command again to resume")
