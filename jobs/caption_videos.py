"""`python -m jobs.caption_videos --config FILE`: bulk captioning, as `ray job submit` calls it."""

from __future__ import annotations

import argparse
import sys

from jobs.running import run_config


def main() -> int:
    """Parse the arguments and run; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, help="a YAML file: one complete run")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="replace one value: a.b=c")
    arguments = parser.parse_args()
    return run_config(arguments.config, arguments.set)


if __name__ == "__main__":
    sys.exit(main())
