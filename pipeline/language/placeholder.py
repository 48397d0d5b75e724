"""Placeholders in prompts: collapsed for storage, spliced as text, expanded as token ids. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from pipeline.schema import Placeholder


def collapse(text: str, media_tokens: Sequence[str]) -> Placeholder:
    """`text` with each run of one media token shown once, and how long the runs were."""
    pattern = "|".join(f"(?:{re.escape(token)})+" for token in media_tokens)
    runs: list[int] = []

    def shown_once(match: re.Match[str]) -> str:
        token = next(t for t in media_tokens if match[0].startswith(t))
        runs.append(len(match[0]) // len(token))
        return token

    return Placeholder(text=re.sub(pattern, shown_once, text), runs=tuple(runs))


def expand(token_ids: Iterable[int], media_token_ids: set[int], runs: Iterable[int]) -> list[int]:
    """`token_ids` with each media token repeated as often as its run says.

    Raises `ValueError` when there are more or fewer media tokens than runs.
    """
    lengths = iter(runs)
    expanded: list[int] = []
    for token_id in token_ids:
        repeats = 1
        if token_id in media_token_ids:
            found = next(lengths, None)
            if found is None:
                raise ValueError("there are more media tokens than runs")
            repeats = found
        expanded.extend([token_id] * repeats)
    if next(lengths, None) is not None:
        raise ValueError("there are fewer media tokens than runs")
    return expanded
