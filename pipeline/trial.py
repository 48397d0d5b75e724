"""How fast this machine does each stage of a job: a run of some of its items, in all the processes that a run has."""

from __future__ import annotations

import dataclasses
import math
import os
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pipeline import flow
from pipeline.config import Config, Incremental, Sinks
from pipeline.features.store import FeatureStore
from pipeline.planning.calibration import Calibration, pass_seconds, work_seconds
from pipeline.runs.ledger import Ledger
from pipeline.runs.manifest import freeze_part
from pipeline.runs.receipts import Totals
from pipeline.runs.run import stage_listing
from pipeline.runs.summary import FORECAST_STAGES, describe_environment
from pipeline.stages.forecast import forecast_work
from pipeline.storage import Folder

_FIRST_ITEMS = 64
_WORK_SECONDS = 12.0  # of all stages and workers together: after so much, what starts them counts for little
_RUN = "trial"


def calibrate(config: Config, device: str, *, told: Callable[[str], None]) -> Calibration:
    """Run some items from the middle of the listing, and more of them where those were done at once.

    Stages are measured as they run beside each other, for that is how they share cores, caches and memory. Store and
    output are beside the job's store, on the same disk or bucket, and removed at the end; sinks get nothing. `told`
    what is being done. Raises what a run raises.
    """
    # Not at the top: it imports torch, which a driver does without.
    from pipeline.stages.checked_model import checked_model

    config = config.anchored()
    store = FeatureStore(config.store.path, config.store.local_path).folder
    scratch = f"calibrating-{uuid.uuid4().hex[:12]}"
    try:
        with stage_listing(config) as staged:
            listing, num_items, number = Folder(staged.directory), min(staged.num_items, _FIRST_ITEMS), 0
            while True:
                told(f"{num_items} items")
                trial = _trial(config, f"{store.url}/{scratch}/{number}")
                checked_model(trial, device)  # as in all runs but a model's first
                summary, totals = _run(trial, listing, staged.num_items, num_items)
                seconds = _work_seconds(totals)
                if number or seconds >= _WORK_SECONDS or num_items == staged.num_items:
                    return _measured(device, num_items, summary["seconds"], totals)
                more = math.ceil(2 * num_items * _WORK_SECONDS / max(seconds, 1e-3))
                number, num_items = number + 1, min(staged.num_items, more)
    finally:
        store.remove(scratch)


def _trial(config: Config, home: str) -> Config:
    store = config.store.model_copy(update={"path": f"{home}/store", "reuse": False, "retention": "keep"})
    changes = {
        "store": store,
        "output": f"{home}/output",
        "run_id": _RUN,
        "sample_fraction": None,  # the listing is one already
        "sinks": Sinks(),
        "incremental": Incremental(),
        "max_quarantined_fraction": 1.0,
    }
    return config.model_copy(update=changes)


def _run(trial: Config, listing: Folder, listed: int, num_items: int) -> tuple[dict[str, Any], Totals]:
    start = (listed - num_items) // 2
    folder = Folder(trial.output).sub(_RUN)
    freeze_part(listing, folder, start, start + num_items)
    summary = flow.run(trial)
    ledger = Ledger(folder)
    entries = [entry for name in ("encode", "generate", "pool") for entry in ledger.finished(name).values()]
    return summary, _summed(Totals.from_entry(entry) for entry in entries)


def _summed(totals: Iterable[Totals]) -> Totals:
    total = Totals()
    for each in totals:
        for sums, more in ((total.counts, each.counts), (total.seconds, each.seconds)):
            for name, value in more.items():
                sums[name] = sums.get(name, 0) + value  # type: ignore[assignment]
    return total


def _work_seconds(totals: Totals) -> float:
    return sum(totals.seconds.get(name, 0.0) for names in FORECAST_STAGES.values() for name in names)


def _measured(device: str, num_items: int, spent: Mapping[str, float], totals: Totals) -> Calibration:
    # Not at the top: it imports torch.
    from pipeline.stages.computing import accelerator_names

    work, counts = forecast_work(totals.counts), totals.counts
    accelerators = accelerator_names() if device != "cpu" else []
    cpu = describe_environment([])["cpu_model"]

    def seconds(stage: str) -> float:
        return sum(totals.seconds.get(name, 0.0) for name in FORECAST_STAGES[stage])

    steps, answers = counts.get("decode_steps", 0), counts.get("answers", 0)
    rates = Calibration(
        device=device,
        accelerator=accelerators[0] if accelerators else f"a core of {cpu}",
        cpu=cpu,
        cpu_count=os.cpu_count() or 1,
        accelerators=len(accelerators),
        sampled_items=num_items,
        decode_ratio=_ratio(seconds("media_decode"), work.decode_core_ms / 1e3),
        encoder_flops_per_second=_ratio(work.encoder_flops, seconds("vision_encode")),
        prefill_flops_per_second=_ratio(work.prefill_flops, seconds("llm_prefill")),
        step_seconds=_ratio(seconds("llm_decode"), steps),
        batch_steps=_ratio(steps, work.prompt_batches),
        answer_tokens=_ratio(counts.get("generated_tokens", 0), answers),
        text_flops_per_second=_ratio(work.text_flops, seconds("text")),
        store_write_bytes_per_second=_ratio(counts.get("store_bytes", 0), seconds("commit")),
        store_read_bytes_per_second=_ratio(work.feature_bytes_read, seconds("feature_transfer")),
    )
    encode, answer = pass_seconds(work_seconds(work, rates), rates)
    answering = spent["generate_pass"] + spent["pool_pass"]
    return dataclasses.replace(
        rates,
        start_seconds=spent["total"] - spent["encode_pass"] - answering,
        encode_start_seconds=max(0.0, spent["encode_pass"] - encode),
        answer_start_seconds=max(0.0, answering - answer),
    )


def _ratio(amount: float, by: float) -> float | None:
    return amount / by if amount > 0 and by > 0 else None
