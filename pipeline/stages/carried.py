"""Items that are unchanged since the run that this one goes on from: their rows are that run's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from pipeline.runs.base import Place, read_rows
from pipeline.stages.context import StageContext
from pipeline.stages.pool_plan import pool_plan_name
from pipeline.stages.prompt import prompt_plan_name
from pipeline.storage import Folder


def carried_items(context: StageContext, window: int) -> dict[int, Place]:
    """Item → its row there, of a window whose answers are planned."""
    name = prompt_plan_name(window) if context.embeds_prompts else pool_plan_name(window)
    carried: Mapping[str, Any] = context.folder.read_json(name).get("carried", {})
    return {int(item): Place(window=place[0], row=place[1]) for item, place in carried.items()}


def carried_rows(context: StageContext, window: int) -> dict[int, dict[str, Any]]:
    """Item → that row, with the item's index here."""
    by_part: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for item, place in carried_items(context, window).items():
        by_part[place.window].append((item, place.row))
    rows: dict[int, dict[str, Any]] = {}
    for part, pairs in by_part.items():
        assert context.base_url is not None
        table = read_rows(Folder(context.base_url), part, [row for _, row in pairs])
        for (item, _), row in zip(pairs, table.to_pylist(), strict=True):
            rows[item] = {**row, "item_index": item}
    return rows
