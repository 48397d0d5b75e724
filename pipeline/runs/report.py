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
td.bar div {{ height: .8rem; min-width: 1px; background: var(--bar); border-radius: 2px; margin-top: .35rem; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>configuration {digest}</p>
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
        _section("Numbers", _table(["", ""], _headlines(summary))),
        _section("Where the items went", _reconciliation(summary)),
        _section("Seconds, by stage (summed over workers) and by pass", _bars(summary["seconds"])),
        _section("Quarantined, by reason", _quarantine(summary["quarantine"])),
        _section(f"The first {_MAX_SAMPLES} items", _samples(samples)),
        _section("Environment", _table(["", ""], sorted(summary["environment"].items()))),
    ]
    page = _PAGE.format(
        title=escape(f"{summary['run_id']}: {summary['status']}"),
        digest=escape(summary["config_digest"]),
        sections="\n".join(sections),
    )
    folder.write_bytes(REPORT_NAME, page.encode())


def _headlines(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Counts that the job has anything of."""
    return [(label, _number(summary[name])) for name, label in _HEADLINES if summary[name] or name == "items_in"]


def _section(heading: str, body: str) -> str:
    return f"<h2>{escape(heading)}</h2>\n{body}"


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
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
    return _table(["", ""], rows) + note


def _bars(seconds: Mapping[str, float]) -> str:
    longest = max(seconds.values(), default=0.0) or 1.0
    rows = "\n".join(
        f'<tr><td>{escape(name)}</td><td>{value:,.2f}</td><td class="bar">'
        f'<div style="width: {100 * value / longest:.1f}%"></div></td></tr>'
        for name, value in sorted(seconds.items(), key=lambda item: (-item[1], item[0]))
    )
    return f"<table>\n{rows}\n</table>"


def _quarantine(quarantine: Mapping[str, int]) -> str:
    if not quarantine:
        return "<p>Nothing.</p>"
    ordered = sorted(quarantine.items(), key=lambda item: (-item[1], item[0]))
    return _table(["code", "count"], [(code, _number(count)) for code, count in ordered])


def _samples(samples: Iterable[Mapping[str, Any]]) -> str:
    rows = [(row["id"], row["status"], _outcome(row)) for row in islice(samples, _MAX_SAMPLES)]
    return _table(["id", "status", "text"], rows)


def _outcome(row: Mapping[str, Any]) -> str:
    if row["status"] == "ok":
        return str(row.get("text") or "")
    return f"{row.get('code')}: {row.get('message')}"
