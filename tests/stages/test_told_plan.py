"""The numbers of a plan as it is told, against arithmetic done by hand."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest

from pipeline.config import parse_config
from pipeline.language.kv_cache import KvCache
from pipeline.planning.calibration import Prices
from pipeline.planning.estimate import Work
from pipeline.stages.dry_run import Forecast
from pipeline.stages.told_plan import told_plan
from tests.planning.test_calibration import RATES

WORK = Work(
    encodes=40,
    encode_batches=10,
    feature_tokens=2_000,
    patches=7_600,
    computed_tokens=8_000,
    frame_bytes=10**9,
    store_bytes=25 * 10**8,
    decode_core_ms=3_600_000,
    encoder_flops=18 * 10**14,
    prompts=20,
    prompt_batches=4,
    prompt_tokens=900,
    prompt_padded_tokens=100,
    most_answer_tokens=200,
    kv_bytes=8_000,
    feature_bytes_read=25 * 10**8,
    prefill_flops=2 * 10**12,
)


def told(prices: Prices, rates: Any = RATES) -> dict[str, Any]:
    config = parse_config(
        {
            "job": "caption_videos",
            "input": "x",
            "model": "m",
            "encode": {"max_batch_tokens": 1_000, "max_batch_items": 8},
            "generate": {"max_new_tokens": 10},
        }
    )
    forecast = Forecast(
        max_batch_tokens=1_000,
        num_items=40,
        planned_items=20,
        windows=1,
        media=Counter(image=21),
        failures=Counter(corrupt=1),
        examples={"corrupt": ["a: it is"]},
        prompt_lengths=Counter({64: 20}),
        longest_prompt=50,
        kv_cache=KvCache(6),
        work=WORK,
    )
    return told_plan(config, forecast, rates, prices, [2])


def test_a_sample_is_scaled() -> None:
    plan = told(Prices(), None)
    assert plan["items"]["media"] == {"image": 42} and plan["items"]["rejected"] == 2
    assert plan["rejected"] == {"corrupt": {"items": 2, "examples": ["a: it is"]}}
    assert (plan["encoder"]["media"], plan["encoder"]["batches"], plan["store"]["bytes"]) == (80, 20, 5 * 10**9)
    assert (plan["times"], plan["calibration"], plan["texts"]) == (None, None, None)


def test_waste_fill_and_memory() -> None:
    plan = told(Prices(), None)
    encoder, language = plan["encoder"], plan["language"]
    assert encoder["padding_waste"] == pytest.approx(0.05)  # 400 of 8,000
    assert (encoder["token_fill"], encoder["item_fill"]) == (0.8, 0.5)  # 8,000 of 10 x 1,000; 40 of 10 x 8
    assert encoder["decode_core_hours"] == 2.0
    assert language["padding_waste"] == pytest.approx(0.1)
    assert language["kv_bytes_largest_request"] == (50 + 10) * 6
    assert (language["kv_bytes_mean_request"], language["kv_bytes_mean_batch"]) == (400, 2_000)
    assert language["answer_tokens"] is None


def test_costs_and_times() -> None:
    plan = told(Prices(accelerator_hour=3.6, core_hour=0.1, gb_month=0.02))
    store, times = plan["store"], plan["times"]
    # Twice the sample: 3.6e15 FLOPs at 1e12 a second are 3,600 s, an hour; 2 core-hours at half are one.
    assert times["stage_seconds"]["vision_encode"] == times["stage_seconds"]["media_decode"] == 3_600
    assert store["recompute_cost"] == pytest.approx(3.6 + 0.1)
    assert store["month_cost"] == pytest.approx(0.1)  # 5 GB
    assert store["break_even_months"] == pytest.approx(37.0)
    assert times["decode_cores_per_accelerator"] == 1.0 and times["placement"]["separate"] is False
    [schedule], [apart] = times["schedules"], times["pools"]
    # Encoding on 2: 1,800 s. Then reading 5e9 bytes 2.5 s, prefill 4e12 FLOPs 2 s, 8 batches of 50 steps of 0.02 s 8 s
    assert schedule["seconds"] == pytest.approx(1_800 + (2.5 + 2 + 8) / 2)
    assert (schedule["workers"], schedule["decode_cores"]) == (2, 2)
    assert plan["language"]["answer_tokens"] == 40 * 30
    assert times["second_question_seconds"] == pytest.approx(2.5 + 2 + 8)
    # One that encodes takes all of 3,600 s; 5e9 bytes of features are carried in one.
    assert apart["in_turn_seconds"] == schedule["seconds"] and apart["apart_seconds"] == 3_600
    assert (apart["separate"], apart["transfer_seconds"]) == (False, 1.0)


def test_where_cores_do_everything_there_are_no_pools() -> None:
    times = told(Prices(), dataclasses.replace(RATES, device="cpu", accelerators=0, cpu_count=2))["times"]
    assert times["pools"] == []
