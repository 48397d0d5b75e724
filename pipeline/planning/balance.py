"""The order in which a window's batches go out, so that the blocks they are cut into take about as long. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def balanced_order(costs: Sequence[float], *, per_block: int, ahead: int = 0) -> list[int]:
    """Indices into `costs`, each once: cut behind every `per_block`-th row, of which `ahead` are there already, they
    make blocks of about the same cost.

    From the costliest on each goes to the block that has the least so far and has room (Graham, "Bounds on
    multiprocessing timing anomalies", 1969, with as many rows a block): of the costliest, as many as there are blocks
    share none. Blocks follow each other by falling cost, for a straggler is to start early, but for those at either
    end that have fewer rows; equal costs keep their order.
    """
    rooms = _rooms(len(costs), per_block, per_block - ahead % per_block)
    blocks: list[list[int]] = [[] for _ in rooms]
    loads = [0.0] * len(rooms)
    least = [(0.0, 0, block) for block in range(len(rooms))]
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        _, _, block = heapq.heappop(least)
        blocks[block].append(index)
        loads[block] += costs[index]
        if len(blocks[block]) < rooms[block]:
            heapq.heappush(least, (loads[block], len(blocks[block]), block))
    first, last = int(rooms[:1] != [per_block]), len(rooms) - int(rooms[-1:] != [per_block])
    full = sorted(range(first, last), key=lambda block: -loads[block])
    order = [*range(min(first, len(rooms))), *full, *range(max(first, last), len(rooms))]
    return [index for block in order for index in sorted(blocks[block])]


def _rooms(count: int, per_block: int, first: int) -> list[int]:
    """Rows of each block of `count` in all: the first may be begun already, the last may be short."""
    rooms: list[int] = []
    while count > 0:
        rooms.append(min(count, first if not rooms else per_block))
        count -= rooms[-1]
    return rooms
