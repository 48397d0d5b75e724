"""Clocks of processes, and shares of what a batch takes."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from pipeline.stages.item_costs import Step, cost_columns
from pipeline.stages.spending import CpuClock, Spending, batch_spent, on_accelerator, shares

BURN = """
import sys, time
for line in sys.stdin:
    while time.process_time() < float(line):
        pass
    print(flush=True)
"""


def test_a_clock_has_what_a_child_takes_while_it_lives_and_when_it_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        children = [child.pid]

        def until(seconds: float) -> None:
            """Of the child's own clock."""
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write(f"{seconds}\n".encode())
            child.stdin.flush()
            child.stdout.readline()

        until(0.2)
        clock = CpuClock(lambda: children)
        until(0.5)
        assert clock.take() == pytest.approx(0.3, abs=0.05)
        until(0.7)
    assert clock.take() == pytest.approx(0.2, abs=0.05)  # a process that has ended has no clock
    children.clear()
    assert clock.take() < 0.01


def test_a_clock_has_all_of_this_process() -> None:
    clock, before = CpuClock(), os.times()
    while time.process_time() < before.user + before.system + 0.1:
        pass
    assert clock.take() == pytest.approx(0.1, abs=0.03)


def test_shares_come_to_the_whole() -> None:
    assert shares(12.0, [1, 0, 3]) == [3.0, 0.0, 9.0]
    assert shares(12.0, [0, 0, 0]) == [4.0, 4.0, 4.0]
    assert shares(12.0, []) == []
    rows = batch_spent(time.time() - 2, 6.0, 3.0, [1, 2])
    assert [(row["cpu_seconds"], row["accelerator_seconds"]) for row in rows] == [(2.0, 1.0), (4.0, 2.0)]
    assert rows[0]["seconds"] == pytest.approx(2, abs=0.5)
    assert (on_accelerator("cpu", 1.0, 2.0), on_accelerator("cuda", 1.0, 2.0)) == (0.0, 3.0)


def test_an_items_time_is_that_of_its_media_that_was_done_last() -> None:
    plan = {"spent": {"started_at": 100.0, "seconds": 1.0, "cpu_seconds": 0.6, "bytes_fetched": {"7": 30}}, "media": []}
    encoded = [
        {"item_index": 7, "decode_started_at": 102.0, "decode_seconds": 1.0, "started_at": 103.5, "seconds": 0.5}
        | {"cpu_seconds": 0.2, "decode_cpu_seconds": 0.4, "accelerator_seconds": 0.1, "bytes_fetched": 5},
        {"item_index": 7, "decode_started_at": 101.5, "decode_seconds": 2.0, "started_at": 105.0, "seconds": 1.0}
        | {"cpu_seconds": 0.3, "decode_cpu_seconds": 0.1, "accelerator_seconds": 0.2, "bytes_fetched": 6},
    ]
    answered = [{"item_index": 7, "started_at": 109.0, "seconds": 2.0, "cpu_seconds": 1.0, "accelerator_seconds": 0.0}]
    answering = {"spent": {"started_at": 107.0, "seconds": 0.5, "cpu_seconds": 0.2, "bytes_fetched": {}}}
    found = cost_columns(
        [6, 7],
        encode_plan=plan,
        encoded=encoded,
        plan=answering,
        answered=answered,
        publishing=Step("publish", 112.0, 0.25),
    )
    assert found[7] == pytest.approx(
        {
            **{"wall_seconds": 12.25, "plan_seconds": 1.0, "decode_wait_seconds": 0.5, "decode_seconds": 2.0},
            **{"encode_wait_seconds": 1.5, "encode_seconds": 1.0, "prompt_wait_seconds": 1.0, "prompt_seconds": 0.5},
            **{"answer_wait_seconds": 1.5, "answer_seconds": 2.0, "publish_wait_seconds": 1.0, "publish_seconds": 0.25},
            # Of the two plans half each, for the window has two items.
            **{"cpu_seconds": 0.3 + 0.6 + 0.4 + 0.1 + 1.0, "accelerator_seconds": 0.3, "bytes_fetched": 41},
        }
    )
    assert found[6]["cpu_seconds"] == pytest.approx(0.4)
    assert found[6]["publish_wait_seconds"] == pytest.approx(112 - 107.5)


def test_of_a_plan_that_an_earlier_version_wrote_nothing_is_said() -> None:
    [found] = cost_columns(
        [7], encode_plan={"media": []}, encoded=(), plan=None, answered=(), publishing=Step("publish", 5.0, 1.0)
    ).values()
    assert found == {
        **{"wall_seconds": 1.0, "publish_seconds": 1.0},
        **{"cpu_seconds": 0.0, "accelerator_seconds": 0.0, "bytes_fetched": 0},
    }


def test_a_plans_spending_is_asked_once() -> None:
    spending = Spending()
    told = spending.spent({3: 10, 4: 0})
    assert told["bytes_fetched"] == {"3": 10} and 0 <= told["seconds"] < 1 and told["cpu_seconds"] >= 0
