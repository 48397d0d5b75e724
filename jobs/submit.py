"""`headrace submit`: a run as a job of a Ray cluster, through Ray's job client; its log and its exit code come back."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
import time
import types
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pipeline.config import load_config
from pipeline.errors import ConfigError, InterruptedRunError

_POLL_SECONDS = 0.2
if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient


def run_submit(
    path: str,
    settings: Sequence[str],
    *,
    sample: str | None,
    address: str | None,
    working_dir: str,
    runtime_env: dict[str, Any],
    submission_id: str | None,
    wait: bool,
) -> int:
    """Start `python -m jobs.<job> --config PATH` on the cluster at `address`; returns the job's exit code.

    Without `wait` 0 as soon as the cluster has taken the job. Interrupted while it waits, it stops the job, which ends
    resumably, and returns 5. Raises `ConfigError` for a configuration that is refused, a `path` outside `working_dir`
    (which is what the cluster gets to see), and a cluster that cannot be reached.
    """
    config = load_config(path, list(settings))
    inside = os.path.relpath(os.path.realpath(path), os.path.realpath(working_dir))
    if inside.startswith(os.pardir + os.sep):
        raise ConfigError(
            f"{path} is not below {working_dir}, which is all that the cluster is sent; set --working-dir"
        )
    words = ["python", "-m", f"jobs.{config.job}", "--config", inside]
    for setting in settings:
        words += ["--set", setting]
    if sample is not None:
        config.sampled(sample)  # refused here rather than on the cluster
        words += ["--sample", sample]
    client = _client(address)
    job = client.submit_job(
        entrypoint=shlex.join(words),
        submission_id=submission_id,
        runtime_env={"working_dir": working_dir, **runtime_env},
        metadata={"job": config.job},
    )
    print(f"job     {job}\nlog     headrace's, below; again: ray job logs {job}", flush=True)
    return _followed(client, job) if wait else 0


def _client(address: str | None) -> JobSubmissionClient:
    from ray.job_submission import JobSubmissionClient

    try:
        return JobSubmissionClient(address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"--address {address}: no cluster's job server there: {error}") from error


def _followed(client: JobSubmissionClient, job: str) -> int:
    """Print the job's log until it has ended; returns its exit code, 5 when it was stopped, 1 when it was lost."""
    before = [(number, signal.signal(number, _interrupt)) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        asyncio.run(_print_log(client, job))
    except InterruptedRunError as error:
        print(f"headrace: {error}; stopping job {job}", file=sys.stderr)
        client.stop_job(job)
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    return _exit_code(client, job)


async def _print_log(client: JobSubmissionClient, job: str) -> None:
    async for lines in client.tail_job_logs(job):
        print(lines, end="", flush=True)


def _exit_code(client: JobSubmissionClient, job: str) -> int:
    from ray.job_submission import JobStatus

    status = client.get_job_status(job)
    while not status.is_terminal():
        time.sleep(_POLL_SECONDS)
        status = client.get_job_status(job)
    details = client.get_job_info(job)
    if status == JobStatus.SUCCEEDED:
        return 0
    if status == JobStatus.STOPPED:
        return InterruptedRunError.exit_code
    if details.driver_exit_code in (None, 0):
        print(f"headrace: job {job} was lost: {details.message}", file=sys.stderr)
        return 1
    return int(details.driver_exit_code)


def _interrupt(number: int, frame: types.FrameType | None) -> None:
    raise InterruptedRunError(f"interrupted by {signal.Signals(number).name}")
