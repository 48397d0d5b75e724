"""What `python -m jobs.NAME --config FILE` does, as `ray job submit` calls it."""

from __future__ import annotations

import argparse

from jobs.running import run_config


def main(job: str, description: str | None) -> int:
    """Parse the arguments and run the configuration, which has to be of `job`; returns the exit code."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--config", required=True, help="a YAML file: one complete run")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="replace one value: a.b=c")
    parser.add_argument("--sample", metavar="PERCENT", help="this part of the items, such as 1%%, chosen by their ids")
    parser.add_argument("--dry-run", action="store_true", help="print what headrace plan does; write nothing")
    arguments = parser.parse_args()
    return run_config(arguments.config, arguments.set, job=job, sample=arguments.sample, dry_run=arguments.dry_run)
