"""A run without Ray, told from headers before it starts, and held against what was told."""

from __future__ import annotations

from typing import Any

from pipeline import flow
from pipeline.config import Config
from pipeline.stages.dry_run import dry_run


def run_as_foretold(config: Config) -> dict[str, Any]:
    """The summary, whose items, verdicts and tokens must be those of a dry run before.

    Not of a run that is resumed, or of which something fails when it is decoded or scored.
    """
    forecast = dry_run(config, "cpu", told=lambda num_items: None)
    summary = flow.run(config)
    for name in ("encodes", "feature_tokens", "computed_tokens", "prompt_tokens", "text_tokens"):
        pair = summary["forecast"].get(name, {"forecast": 0, "found": 0})
        assert getattr(forecast.work, name) == pair["forecast"] == pair["found"], name
    assert dict(forecast.failures) == summary["quarantine"]
    assert forecast.carried == summary["items_carried"]
    assert forecast.num_items == forecast.planned_items == summary["items_in"]
    return summary
