"""Seconds, cores, places and prices against arithmetic done by hand."""

import dataclasses
import json

import pytest

from pipeline.planning.calibration import Calibration, Prices, pass_seconds, run_seconds, schedule, work_seconds
from pipeline.planning.estimate import Work

RATES = Calibration(
    device="cuda",
    accelerator="one",
    cpu="another",
    cpu_count=32,
    accelerators=4,
    sampled_items=10,
    decode_ratio=0.5,
    encoder_flops_per_second=1e12,
    prefill_flops_per_second=2e12,
    step_seconds=0.02,
    batch_steps=50.0,
    answer_tokens=30.0,
    store_write_bytes_per_second=1e9,
    store_read_bytes_per_second=2e9,
    transfer_bytes_per_second=5e9,
)
WORK = Work(
    decode_core_ms=4_000_000,
    frame_bytes=10**12,
    encoder_flops=100 * 10**12,
    store_bytes=50 * 10**9,
    feature_bytes_read=50 * 10**9,
    prefill_flops=600 * 10**12,
    prompt_batches=100,
)
SECONDS = {
    "media_decode": 2_000.0,
    "frame_transfer": 200.0,
    "vision_encode": 100.0,
    "commit": 50.0,
    "feature_transfer": 25.0,
    "llm_prefill": 300.0,
    "llm_decode": 100.0,
}


def test_seconds_of_one_worker() -> None:
    assert work_seconds(WORK, RATES) == pytest.approx(SECONDS)


def test_what_was_not_measured_has_no_time() -> None:
    unknown = Calibration(device="cpu", accelerator="", cpu="", cpu_count=2, accelerators=0, sampled_items=0)
    assert work_seconds(WORK, unknown) == {}
    assert unknown.cores_per_accelerator == 1


def test_a_schedule() -> None:
    # Decoding on 32 cores: 62.5 s, longer than 200 / 4 of transfer and 100 / 4 of encoding, so the encode pass takes
    # 62.5. Then (25 + 300 + 100) / 4 = 106.25.
    found = schedule(SECONDS, 4, 32, Prices(accelerator_hour=3.0, core_hour=0.05))
    assert found.seconds == pytest.approx(168.75)
    assert found.bottleneck == "llm_prefill" and found.stage_seconds["llm_prefill"] == 75
    assert found.cost == pytest.approx(168.75 / 3600 * (4 * 3.0 + 32 * 0.05))
    assert schedule(SECONDS, 4, 16, Prices()).bottleneck == "media_decode"
    assert schedule(SECONDS, 4, 16, Prices()).cost is None


def test_it_is_saved_as_json() -> None:
    assert Calibration.from_json(json.loads(json.dumps(RATES.to_json()))) == RATES
    assert RATES.cores_per_accelerator == 8


def test_a_run_on_the_machine_that_was_measured() -> None:
    """By hand: 2,000 s of decoding on 32 cores take longer than 200 s of transfer on 4 accelerators."""
    rates = dataclasses.replace(RATES, start_seconds=10.0, encode_start_seconds=5.0, answer_start_seconds=7.0)
    assert pass_seconds(SECONDS, rates) == pytest.approx((62.5, 106.25))
    assert run_seconds(SECONDS, rates) == pytest.approx(62.5 + 106.25 + 22.0)
    answered = {name: SECONDS[name] for name in ("feature_transfer", "llm_prefill", "llm_decode")}
    assert run_seconds(answered, rates) == pytest.approx(106.25 + 17.0)  # nothing starts that would encode
    cores = dataclasses.replace(rates, accelerators=0, cpu_count=2)
    assert pass_seconds(SECONDS, cores) == pytest.approx((2_350 / 2, 425 / 2))
