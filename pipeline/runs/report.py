"""`report.html`: one self-contained page that tells people how a run went."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import islice
from typing import Any

from pipeline.storage import Folder

REPORT_NAME = "report.html"
_MAX_SAMPLES = 50

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --ink: #1c2530; --soft: #5d6875; --paper: #fff; --line: #d9dfe6; --bar: #3b78b5; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e4e9ef; --soft: #98a4b1; --paper: #14191f; --line: #2f3843; --bar: #5a9bd8; }}
}}
body {{ margin: 2rem auto; max-width: 60rem; padding: 0 1rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }}
h1 {{ font-size: 1.4rem; margin-bottom: 0; }}
h2 {{ font-size: 1.05rem; margin-top: 2rem; }}
p {{ margin: .3rem 0; color: var(--soft); }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); }}
th {{ color: var(--soft); font-weight: 500; }}
td {{ overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }}
td.bar {{ width: 50%; }}
svg text {{ font: 12px system-ui, sans-serif; fill: var(--ink); }}
svg rect {{ fill: var(--bar); }}
td.bar div {{ height: .8rem; min-width: 1px; background: var(--bar); border-radius: 2px; margin-top: .35rem; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{subtitle}</p>
{sections}
</body>
</html>
"""

_HEADLINES = (
    ("items_in", "items in"),
    ("media_in", "media in"),
    ("encodes", "media encoded"),
    ("features_reused", "features reused"),
    ("fallbacks", "fallbacks"),
    ("bytes_fetched", "bytes fetched"),
    ("frames_decoded", "video frames decoded"),
    ("images_decoded", "images decoded"),
    ("computed_tokens", "encoder tokens computed"),
    ("padded_tokens", "of which padding"),
    ("prompt_tokens", "prompt tokens computed"),
    ("prompt_padded_tokens", "and padding besides"),
    ("generated_tokens", "tokens generated"),
    ("decode_slots", "tokens computed one after another"),
    ("idle_decode_slots", "of which after an answer's end"),
    ("pages_decoded", "pages drawn"),
    ("texts_embedded", "texts embedded"),
    ("pairs_scored", "pairs scored"),
    ("texts_scored", "texts scored"),
    ("text_tokens", "text tokens computed"),
    ("text_padded_tokens", "and padding besides"),
    ("items_carried", "items taken from the base run"),
)


def write_report(folder: Folder, summary: Mapping[str, Any], samples: Iterable[Mapping[str, Any]]) -> None:
    """Publish `report.html`: `summary` as `build_summary` makes it, and the first 50 rows of the results."""
    sections = [
        section("Numbers", table(["", ""], _headlines(summary))),
        section("Where the items went", _reconciliation(summary)),
        section("Seconds, by stage (summed over workers) and by pass", _bars(summary["seconds"])),
        section("Forecast, from headers, and what was found", _forecast(summary["forecast"])),
        section("Quarantined, by reason", _quarantine(summary["quarantine"])),
        section(f"The first {_MAX_SAMPLES} items", _samples(samples)),
        section("Environment", table(["", ""], sorted(summary["environment"].items()))),
    ]
    title = f"{summary['run_id']}: {summary['status']}"
    written = page(title, f"configuration {summary['config_digest']}", sections)
    folder.write_bytes(REPORT_NAME, written.encode())


def _headlines(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Counts that the job has anything of."""
    return [(label, _number(summary[name])) for name, label in _HEADLINES if summary[name] or name == "items_in"]


def page(title: str, subtitle: str, sections: Iterable[str]) -> str:
    """A page that loads nothing, of sections that are HTML."""
    return _PAGE.format(title=escape(title), subtitle=escape(subtitle), sections="\n".join(sections))


def section(heading: str, body: str) -> str:
    """A heading over HTML."""
    return f"<h2>{escape(heading)}</h2>\n{body}"


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Rows of any values, as text; without a head when it is all empty."""
    header = "".join(f"<th>{escape(name)}</th>" for name in head) if any(head) else ""
    body = "\n".join(f"<tr>{''.join(f'<td>{_cell(value)}</td>' for value in row)}</tr>" for row in rows)
    return f"<table>\n<tr>{header}</tr>\n{body}\n</table>" if header else f"<table>\n{body}\n</table>"


def _cell(value: Any) -> str:
    if isinstance(value, list | tuple):
        value = ", ".join(str(each) for each in value)
    return "" if value is None else escape(str(value))


def _number(value: float) -> str:
    return f"{value:,}"


def _reconciliation(summary: Mapping[str, Any]) -> str:
    parts = [("written", "items_written"), ("quarantined", "items_quarantined"), ("skipped", "items_skipped")]
    rows = [(label, _number(summary[name])) for label, name in parts]
    rows.append(("sum", _number(sum(summary[name] for _, name in parts))))
    rows.append(("items in", _number(summary["items_in"])))
    note = f"<p>{escape(_number(summary['items_reused']))} of the written needed no encoding.</p>"
    return table(["", ""], rows) + note


def _bars(seconds: Mapping[str, float]) -> str:
    longest = max(seconds.values(), default=0.0) or 1.0
    rows = "\n".join(
        f'<tr><td>{escape(name)}</td><td>{value:,.2f}</td><td class="bar">'
        f'<div style="width: {100 * value / longest:.1f}%"></div></td></tr>'
        for name, value in sorted(seconds.items(), key=lambda item: (-item[1], item[0]))
    )
    return f"<table>\n{rows}\n</table>"


def forecast_rows(forecast: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """(name, forecast, found, found by forecast) of what a summary has of it."""
    named = {name.replace("_", " "): pair for name, pair in forecast.items() if name != "seconds"}
    timed = {f"{stage.replace('_', ' ')}, seconds": pair for stage, pair in forecast.get("seconds", {}).items()}
    return [
        (name, _amount(pair["forecast"]), _amount(pair["found"]), _ratio(pair["found"], pair["forecast"]))
        for name, pair in {**named, **timed}.items()
    ]


def _amount(value: float) -> str:
    return _number(value) if isinstance(value, int) else f"{value:,.2f}"


def _ratio(found: float, forecast: float) -> str:
    return f"{found / forecast:.2f}" if forecast else ""


def _forecast(forecast: Mapping[str, Any]) -> str:
    rows = forecast_rows(forecast)
    return table(["", "forecast", "found", "found / forecast"], rows) if rows else "<p>Nothing was planned.</p>"


def _quarantine(quarantine: Mapping[str, int]) -> str:
    if not quarantine:
        return "<p>Nothing.</p>"
    ordered = sorted(quarantine.items(), key=lambda item: (-item[1], item[0]))
    return table(["code", "count"], [(code, _number(count)) for code, count in ordered])


def _samples(samples: Iterable[Mapping[str, Any]]) -> str:
    rows = [(row["id"], row["status"], _outcome(row)) for row in islice(samples, _MAX_SAMPLES)]
    return table(["id", "status", "text"], rows)


def _outcome(row: Mapping[str, Any]) -> str:
    if row["status"] == "ok":
        return str(row.get("text") or "")
    return f"{row.get('code')}: {row.get('message')}"
