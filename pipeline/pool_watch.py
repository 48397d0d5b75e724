"""Ends a pass whose workers have no room any more: Ray would wait for it for ever, and not say so."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ray.data._internal.execution.execution_callback import ExecutionCallback

if TYPE_CHECKING:
    from ray.data._internal.execution.streaming_executor import StreamingExecutor

_LOOK_SECONDS = 2.0


class NoRoomError(Exception):
    """A node was lost, and what its workers reserve is nowhere else."""


class PoolWatch(ExecutionCallback):
    """Asks `has_room` now and then while a pass is under way, and ends it when the answer is no for `wait_seconds`.

    What Ray has given a worker that starts anew stays with it, whether or not it ever finds room (ray 2.60).
    """

    def __init__(self, has_room: Callable[[], bool], wait_seconds: float) -> None:
        self._has_room = has_room
        self._wait_seconds = wait_seconds
        self._next_look = self._had_room = time.monotonic()

    def on_execution_step(self, executor: StreamingExecutor) -> None:
        """Raises `NoRoomError`, which whoever reads the pass's results gets."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_SECONDS
        if self._has_room():
            self._had_room = now
        elif now - self._had_room >= self._wait_seconds:
            raise NoRoomError(f"for {self._wait_seconds:g} s there was no room for all workers of the pass")
