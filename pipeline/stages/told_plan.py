"""A forecast as `headrace plan` tells it: plain values, None for what is not known."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from pipeline.config import Config
from pipeline.planning.calibration import Calibration, Prices, run_seconds, schedule, work_seconds
from pipeline.planning.estimate import Work, break_even_months, second_question
from pipeline.planning.placement import decode_cores_per_accelerator, placement, pools
from pipeline.stages.dry_run import Forecast

_MOST_SHAPES = 100  # shown


def told_plan(
    config: Config, forecast: Forecast, rates: Calibration | None, prices: Prices, workers: Sequence[int]
) -> dict[str, Any]:
    """Sums are of all items: of a sample, so many times what was planned. `times` are None without a calibration."""
    work = forecast.work.scaled(forecast.scale)
    seconds = None if rates is None else work_seconds(work, rates)
    return {
        "job": config.job,
        "model": config.model,
        "items": _items(forecast),
        "rejected": {
            code: {"items": round(count * forecast.scale), "examples": forecast.examples[code]}
            for code, count in forecast.failures.most_common()
        },
        "shapes": [
            dict(zip(("modality", "frames", "height", "width", "items"), (*shape, count), strict=True))
            for shape, count in forecast.shapes.most_common(_MOST_SHAPES)
        ],
        "num_shapes": len(forecast.shapes),
        "encoder": _encoder(config, work, forecast.max_batch_tokens) if work.encodes else None,
        "store": _store(work, seconds, prices) if work.encodes else None,
        "language": _language(config, forecast, work, rates) if work.prompts else None,
        "texts": _texts(forecast, work) if work.texts else None,
        "times": None if rates is None or not seconds else _times(work, seconds, rates, prices, workers),
        "calibration": None if rates is None else rates.to_json(),
    }


def _items(forecast: Forecast) -> dict[str, Any]:
    def scaled(count: int) -> int:
        return round(count * forecast.scale)

    return {
        "listed": forecast.num_items,
        "planned": forecast.planned_items,
        "windows": forecast.windows,
        "media": {modality: scaled(count) for modality, count in sorted(forecast.media.items())},
        "without_media": scaled(forecast.texts_without_media),
        "rejected": scaled(forecast.failures.total()),
        "hits": scaled(forecast.hits),
        "duplicates": scaled(forecast.duplicates),
        "carried": scaled(forecast.carried),
    }


def _encoder(config: Config, work: Work, max_batch_tokens: int) -> dict[str, Any]:
    return {
        "media": work.encodes,
        "batches": work.encode_batches,
        "patches": work.patches,
        "computed_tokens": work.computed_tokens,
        "padding_waste": 1 - work.patches / work.computed_tokens,
        "token_fill": work.computed_tokens / (work.encode_batches * max_batch_tokens),
        "item_fill": work.encodes / (work.encode_batches * config.encode.max_batch_items),
        "feature_tokens": work.feature_tokens,
        "frame_bytes": work.frame_bytes,
        "flops": work.encoder_flops,
        "decode_core_hours": work.decode_core_ms / 3.6e6,
    }


def _store(work: Work, seconds: dict[str, float] | None, prices: Prices) -> dict[str, Any]:
    held = None if prices.gb_month is None else work.store_bytes / 1e9 * prices.gb_month
    again = None
    if seconds is not None and "vision_encode" in seconds and prices.accelerator_hour is not None:
        again = seconds["vision_encode"] / 3600 * prices.accelerator_hour
        again += seconds.get("media_decode", 0.0) / 3600 * (prices.core_hour or 0.0)
    months = None
    if again is not None and prices.gb_month is not None:
        months = break_even_months(work.store_bytes, again, prices.gb_month)
    return {
        "bytes": work.store_bytes,
        "month_cost": held,
        "recompute_flops": work.encoder_flops,
        "recompute_decode_core_hours": work.decode_core_ms / 3.6e6,
        "recompute_cost": again,
        "break_even_months": months,
    }


def _language(config: Config, forecast: Forecast, work: Work, rates: Calibration | None) -> dict[str, Any]:
    answer = work.most_answer_tokens // work.prompts
    expected = None if rates is None or rates.answer_tokens is None else round(work.prompts * rates.answer_tokens)
    return {
        "prompts": work.prompts,
        "batches": work.prompt_batches,
        "prompt_tokens": work.prompt_tokens,
        "padding_waste": work.prompt_padded_tokens / (work.prompt_tokens + work.prompt_padded_tokens),
        "lengths": {str(length): round(n * forecast.scale) for length, n in sorted(forecast.prompt_lengths.items())},
        "longest_prompt": forecast.longest_prompt,
        "answer_tokens_at_most": work.most_answer_tokens,
        "answer_tokens": expected,
        "prefill_flops": work.prefill_flops,
        "answer_flops_at_most": work.answer_flops,
        "kv_bytes_per_token": forecast.kv_cache.token_bytes,
        "kv_bytes_largest_request": forecast.kv_cache.most_bytes(forecast.longest_prompt, answer),
        "kv_bytes_mean_request": work.kv_bytes // work.prompts,
        "kv_bytes_mean_batch": work.kv_bytes // work.prompt_batches,
        "kv_bytes_budget": config.generate.max_batch_bytes,
    }


def _texts(forecast: Forecast, work: Work) -> dict[str, Any]:
    return {
        "texts": work.texts,
        "batches": work.text_batches,
        "tokens": work.text_tokens,
        "padding_waste": work.text_padded_tokens / (work.text_tokens + work.text_padded_tokens),
        "flops": work.text_flops,
        "pages": forecast.pages,
        "pages_read": forecast.pages_read,
    }


def _times(
    work: Work, seconds: dict[str, float], rates: Calibration, prices: Prices, workers: Sequence[int]
) -> dict[str, Any]:
    needed = decode_cores_per_accelerator(seconds)
    placed = placement(seconds, rates.cores_per_accelerator)
    schedules = [
        dataclasses.asdict(schedule(seconds, number, max(1, math.ceil(number * (needed or 0.0))), prices))
        for number in workers
    ]
    carried = None
    if rates.accelerators and rates.transfer_bytes_per_second is not None:  # where cores do it all there are no pools
        carried = work.feature_bytes_read / rates.transfer_bytes_per_second
    found = [pools(seconds, carried, number, number * rates.cores_per_accelerator) for number in workers]
    return {
        "device": rates.device,
        "accelerator": rates.accelerator,
        "stage_seconds": seconds,
        "this_machine_seconds": run_seconds(seconds, rates),
        "schedules": schedules,
        "decode_cores_per_accelerator": needed,
        "cores_per_accelerator": rates.cores_per_accelerator,
        "placement": None if placed is None else dataclasses.asdict(placed),
        "pools": [dataclasses.asdict(each) for each in found if each is not None],
        "second_question_seconds": second_question(seconds)["media_reused"],
    }
