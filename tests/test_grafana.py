"""The dashboard loads under Grafana's schema, and asks for nothing that a run does not export."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard, Panel, RowPanel
from grafana_foundation_sdk.models.prometheus import Dataquery

from pipeline.runs.metrics import METRICS

FILE = Path(__file__).parent.parent / "configs" / "grafana" / "headrace.json"
SUFFIXES = {"counter": {""}, "gauge": {""}, "histogram": {"_bucket", "_sum", "_count"}}
# Of Ray's metrics, headrace's are those; labels that Ray adds to each are of the form NodeAddress.
NAME = re.compile(r"ray_(headrace_[a-z_]+?)(_bucket|_sum|_count)?\{([^}]*)\}")


@pytest.fixture(scope="module")
def raw() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def dashboard(raw: dict[str, Any]) -> Dashboard:
    register_default_plugins()
    return Dashboard.from_json(raw)


def without_defaults(loaded: Any, file: Any) -> Any:
    """`loaded` cut down to the keys that `file` has."""
    if isinstance(file, dict) and isinstance(loaded, dict):
        return {key: without_defaults(loaded[key], each) for key, each in file.items() if key in loaded}
    if isinstance(file, list) and isinstance(loaded, list):
        return [without_defaults(*pair) for pair in zip(loaded, file, strict=True)]
    return loaded


def test_the_schema_knows_everything_in_the_file(raw: dict[str, Any], dashboard: Dashboard) -> None:
    # What the schema does not have is dropped when it is loaded.
    again = json.loads(JSONEncoder().encode(dashboard))
    assert without_defaults(again, raw) == raw


def test_a_key_that_the_schema_does_not_have_is_found(raw: dict[str, Any]) -> None:
    broken = json.loads(json.dumps(raw))
    broken["panels"][1]["feildConfig"] = broken["panels"][1].pop("fieldConfig")
    again = json.loads(JSONEncoder().encode(Dashboard.from_json(broken)))
    assert without_defaults(again, broken) != broken


def queries(dashboard: Dashboard) -> list[str]:
    found = []
    for panel in dashboard.panels or []:
        assert isinstance(panel, Panel | RowPanel)
        for target in getattr(panel, "targets", None) or []:
            assert isinstance(target, Dataquery)
            found.append(target.expr)
    return found


def test_every_query_names_what_is_exported_with_labels_that_it_has(dashboard: Dashboard) -> None:
    asked = set()
    for query in queries(dashboard):
        names = [match.groups() for match in NAME.finditer(query)]
        assert len(names) == query.count("ray_") > 0, query
        for name, suffix, selected in names:
            metric = METRICS[name]
            assert (suffix or "") in SUFFIXES[metric.kind], query
            asked.add(name)
            by = re.findall(r"by \(([^)]*)\)", query)
            grouped = {label.strip() for labels in by for label in labels.split(",")} - {"le"}
            grouped |= set(re.findall(r"([a-z_]+)=", selected))
            assert {label for label in grouped if label.islower()} <= {"run_id", *metric.labels}, query
    assert asked == set(METRICS), "a metric that nobody looks at"


def test_panels_do_not_overlap(raw: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in raw["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert at["x"] + at["w"] <= 24 and not taken & cells, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in raw["panels"]}) == len(raw["panels"])
