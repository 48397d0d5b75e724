"""Bucket bounds of padded towers: the lengths to pad to that cost the fewest tokens. Pure.

A bucket is a run of neighbouring lengths, and costs its longest for each row. The dynamic programme is exact; that it
takes time in proportion to lengths times bounds is the convex hull trick: the fewest tokens up to a length are the
lowest, at that length, of straight lines, one for each place where the last bucket may begin.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence

_Line = tuple[int, int, int]  # rows shorter than the bucket, tokens of the buckets before it, its first length's index


def bucket_bounds(rows: Mapping[int, int], max_shapes: int, *, max_padding: float = 0.0) -> list[int]:
    """The longest length of each of at most `max_shapes` buckets, ascending; `rows` is length → how many rows have it.

    No choice of so many bounds computes fewer tokens when each row is padded to the next bound. They are as few as keep
    padding within the share `max_padding` of what is computed, where so few do.
    """
    if not rows:
        return []
    lengths = sorted(rows)
    shorter = [0, *itertools.accumulate(rows[length] for length in lengths)]
    fewest = [length * below for length, below in zip(lengths, shorter[1:], strict=True)]
    firsts = [[0] * len(lengths)]
    own = sum(length * count for length, count in rows.items())
    while fewest[-1] - own > max_padding * fewest[-1] and len(firsts) < max_shapes:
        fewest, first = _one_more(lengths, shorter, fewest)
        firsts.append(first)
    bounds, last = [], len(lengths) - 1
    for first in reversed(firsts):
        bounds.append(lengths[last])
        last = first[last] - 1
    return bounds[::-1]


def _one_more(lengths: Sequence[int], shorter: Sequence[int], fewest: Sequence[int]) -> tuple[list[int], list[int]]:
    """With one bucket more than `fewest` has: the fewest tokens up to each length, and where the last bucket begins."""
    tokens, first = [fewest[0]], [0]
    lines: deque[_Line] = deque()
    for index in range(1, len(lengths)):
        line = (shorter[index], fewest[index - 1], index)
        while len(lines) > 1 and _is_hidden(lines[-2], lines[-1], line):
            lines.pop()
        lines.append(line)
        length = lengths[index]
        while len(lines) > 1 and lines[1][1] - length * lines[1][0] <= lines[0][1] - length * lines[0][0]:
            lines.popleft()
        before, cost, start = lines[0]
        tokens.append(cost + length * (shorter[index + 1] - before))
        first.append(start)
    return tokens, first


def _is_hidden(before: _Line, line: _Line, after: _Line) -> bool:
    """Whether `line` is nowhere the lowest of the three."""
    return (after[1] - before[1]) * (line[0] - before[0]) <= (line[1] - before[1]) * (after[0] - before[0])
