"""`headrace retry`: what a run has quarantined, once more; its parts are rewritten with what succeeded."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pipeline import engine, flow
from pipeline.runs.lock import run_lock
from pipeline.runs.retried import begin_retry, merge_retry
from pipeline.runs.run_folder import read_config
from pipeline.storage import Folder


def run_retry(run: Folder, codes: Collection[str]) -> dict[str, Any] | None:
    """Work on the quarantined items of `run` and on nothing else; returns its new summary, None with nothing to do.

    Raises what `flow.run` does, `QuarantineLimitError` for what is still out among it, and `RunLockedError` when
    somebody holds the run.
    """
    with run_lock(run):
        retry = begin_retry(run, codes)
    if retry is None:
        return None
    config = read_config(run)
    with engine.ray_session(config.ray):  # one for both runs
        flow.run(retry.config)
        with run_lock(run):
            merge_retry(run, retry)
        # All its windows are finished: it delivers what is missing, and writes summary and report anew.
        root, _, run_id = run.url.rstrip("/").rpartition("/")
        return flow.run(config.model_copy(update={"output": root, "run_id": run_id}))
