"""What the device had no room for is remembered, and the next batch is staged while one is used."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pipeline.stages.computing import Room, in_halves, one_ahead


def attempts(room: Room, sizes: list[int], device_room: int) -> tuple[list[int], int]:
    """The sizes tried on a device of that room, in turn, and how often a batch was halved."""
    tried: list[int] = []

    def work(batch: Sequence[int]) -> list[int]:
        tried.append(sum(batch))
        with room.trying(sum(batch)):
            if sum(batch) > device_room:
                raise torch.OutOfMemoryError
            return list(batch)

    splits = {"oom_splits": 0}
    done = [size for run in room.runs(sizes) for size in in_halves(work, sizes[run], splits)]
    assert done == sizes
    return tried, splits["oom_splits"]


def test_a_size_that_had_no_room_is_not_tried_again() -> None:
    room = Room()
    assert attempts(room, [10] * 8, device_room=45) == ([80, 40, 40], 1)
    assert attempts(room, [10] * 8, device_room=45) == ([40, 40], 0)
    assert attempts(room, [10] * 9, device_room=45) == ([40, 40, 10], 0)


def test_sizes_between_are_tried() -> None:
    room = Room()
    attempts(room, [10] * 8, device_room=65)
    assert attempts(room, [10] * 6, device_room=65) == ([60], 0)
    assert attempts(room, [10] * 8, device_room=65) == ([60, 20], 0)
    assert attempts(room, [10] * 7, device_room=65) == ([70, 30, 40], 1)
    assert attempts(room, [10] * 7, device_room=65) == ([60, 10], 0)


def test_an_item_above_what_fitted_is_tried_by_itself() -> None:
    room = Room()
    attempts(room, [10] * 8, device_room=45)
    assert attempts(room, [100, 10], device_room=200) == ([100, 10], 0)


def test_one_item_without_room_is_an_error() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        attempts(Room(), [50], device_room=45)


def test_the_next_is_worked_out_while_the_last_is_used() -> None:
    begun = [threading.Event() for _ in range(3)]

    def work(number: int) -> int:
        begun[number].set()
        return number

    with ThreadPoolExecutor(1) as executor:
        for number in one_ahead(work, range(3), executor):
            if number < 2:
                assert begun[number + 1].wait(timeout=10)  # while this one is in use


def test_without_an_executor_nothing_is_ahead() -> None:
    done: list[int] = []
    results = one_ahead(lambda number: done.append(number) or number, range(3), None)  # type: ignore[func-returns-value]
    assert next(results) == 0
    assert done == [0]
