"""`report.html`: one self-contained page that tells people how a run went."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from pipeline.runs.costs import RunCosts, cost_rows, dearest_rows
from pipeline.runs.tiers import describe_tiers
from pipeline.runs.timing_stats import Histogram, Timed, waited_longest
from pipeline.storage import Folder

REPORT_NAME = "report.html"
_TEXT_CHARACTERS = 300
# What to change when a stage has most of the workers' time.
_ADVICE = {
    "media_fetch": "fetching: put the store of media nearer, or raise decode.io_threads",
    "media_decode": "decoding: more CPU cores, smaller sampling.num_frames or fps, or decode.resize: fast",
    "mm_processor": "preparing patches: a faster device for the encoder, or smaller frames",
    "vision_encode": "the encoder: more accelerators, encode.dtype: bfloat16, or fewer and smaller frames",
    "commit": "writing features: a faster disk for store.local_path, or store.retention: segment",
    "feature_transfer": "reading features: a store nearer to the workers",
    "llm_prefill": "reading prompts: more accelerators, or fewer feature tokens an item",
    "llm_decode": "writing answers: more accelerators, larger batches, or a lower generate.max_new_tokens",
    "text_embed": "embedding texts: more accelerators, or shorter text.max_tokens",
    "score": "scoring: more accelerators, or shorter texts",
}

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
ol {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(12rem, 1fr)); gap: .8rem; padding: 0; }}
li {{ list-style: none; border: 1px solid var(--line); border-radius: 6px; padding: .6rem; overflow-wrap: anywhere; }}
li img {{ max-width: 100%; display: block; margin-bottom: .4rem; border-radius: 3px; }}
li b {{ display: block; font-weight: 500; color: var(--soft); font-size: .85rem; }}
svg polyline {{ fill: none; stroke: var(--bar); stroke-width: 2; }}
svg line {{ stroke: var(--line); }}
div.wide {{ overflow-x: auto; }}
div.wide td {{ overflow-wrap: normal; white-space: nowrap; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{subtitle}</p>
{sections}
</body>
</html>
"""

_TIERS = {"frames": "decoded frames", "features": "features", "vectors": "rows of the run before"}

_HEADLINES = (
    ("items_in", "items in"),
    ("media_in", "media in"),
    ("encodes", "media encoded"),
    ("features_reused", "features reused"),
    ("fallbacks", "fallbacks"),
    ("bytes_fetched", "bytes fetched"),
    ("fetch_retries", "attempts to fetch that were repeated"),
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """A row of a part, with the JPEG of its first media that has a picture; None without one."""

    row: Mapping[str, Any]
    picture: bytes | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """What a run's page shows besides its summary.

    `shown` are items that are ok and `failed` some of each code, `times` those of items by stage, kind and size,
    `progress` pass → (seconds since the first window was finished, items finished by then), ascending, `costs` those of
    items, of which timings of an earlier version have none.
    """

    shown: Sequence[Shown] = ()
    failed: Sequence[Shown] = ()
    times: Mapping[Timed, Histogram] = field(default_factory=dict)
    progress: Mapping[str, Sequence[tuple[float, int]]] = field(default_factory=dict)
    costs: RunCosts = field(default_factory=RunCosts)


def write_report(folder: Folder, summary: Mapping[str, Any], findings: Findings) -> None:
    """Publish `report.html`: `summary` as `build_summary` makes it, and what else was found."""
    told = (
        ("Fill and padding", _fill(summary)),
        ("What was there already", _tiers(summary)),
        ("Cost", _cost(summary, findings.costs)),
    )
    sections = [
        section("Where the items went", _reconciliation(summary)),
        section("What came out", _gallery(findings.shown) or "<p>Nothing.</p>"),
        section("Quarantined, by reason", _quarantine(summary["quarantine"]) + _gallery(findings.failed)),
        section("Numbers", table(["", ""], _headlines(summary))),
        section("Where the time went", _bottleneck(summary["seconds"], findings.times) + _bars(summary["seconds"])),
        section("Items finished over time", _progress(findings.progress)),
        section("Milliseconds an item, by stage, kind and size", _percentiles(findings.times)),
        *(section(heading, body) for heading, body in told if body),
        section("Forecast, from headers, and what was found", _forecast(summary.get("forecast", {}))),
        section("Environment", table(["", ""], sorted(summary["environment"].items()))),
    ]
    title = f"{summary['run_id']}: {summary['status']}"
    sample = summary.get("sample_fraction")
    about = f"configuration {summary['config_digest']}" + ("" if sample is None else f", a sample of {sample:.4%}")
    written = page(title, about, sections)
    folder.write_bytes(REPORT_NAME, written.encode())


def _headlines(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Counts that the job has anything of."""
    return [(label, _number(summary[name])) for name, label in _HEADLINES if summary.get(name) or name == "items_in"]


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
    finished = sum(summary[name] for _, name in parts)
    rows.append(("finished" if finished < summary["items_in"] else "sum", _number(finished)))
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
    if not rows:
        return "<p>Nothing was planned.</p>"
    return f'<div class="wide">{table(["", "forecast", "found", "found / forecast"], rows)}</div>'


def _quarantine(quarantine: Mapping[str, int]) -> str:
    if not quarantine:
        return "<p>Nothing.</p>"
    ordered = sorted(quarantine.items(), key=lambda item: (-item[1], item[0]))
    return table(["code", "count"], [(code, _number(count)) for code, count in ordered])


def _gallery(shown: Iterable[Shown]) -> str:
    cells = "\n".join(
        f"<li>{_picture(each)}<b>{escape(str(each.row['id']))}</b>{_outcome(each.row)}</li>" for each in shown
    )
    return f"<ol>\n{cells}\n</ol>" if cells else ""


def _picture(shown: Shown) -> str:
    if shown.picture is None:
        return ""
    data = base64.b64encode(shown.picture).decode()
    return f'<img alt="" src="data:image/jpeg;base64,{data}">'


def _outcome(row: Mapping[str, Any]) -> str:
    if row["status"] != "ok":
        return escape(f"{row.get('code')}: {row.get('message')}")
    if row.get("labels"):
        return escape(", ".join(str(label) for label in row["labels"]))
    text = str(row.get("text") or row.get("modality") or "")
    return escape(text if len(text) <= _TEXT_CHARACTERS else f"{text[:_TEXT_CHARACTERS]}…")


def _bottleneck(seconds: Mapping[str, float], times: Mapping[Timed, Histogram]) -> str:
    """The stage that has most of the workers' time, and what to change about it."""
    stages = {name: value for name, value in seconds.items() if name in _ADVICE and value > 0}
    if not stages:
        return ""
    most = max(stages, key=lambda name: stages[name])
    share = stages[most] / sum(stages.values())
    said = f"{most} has {share:.0%} of the workers' time. To shorten it, {_ADVICE[most]}."
    waited = waited_longest(times)
    if waited is not None:
        said += f" Items waited longest in {waited}."
    return f"<p>{escape(said)}</p>"


def _percentiles(times: Mapping[Timed, Histogram]) -> str:
    if not times:
        return "<p>No item was timed.</p>"
    rows = [
        (
            timed.stage,
            timed.kind,
            f"≤ {_number(timed.encoder_tokens)}" if timed.encoder_tokens else "",
            _number(each.count),
            *(_milliseconds(each.percentile(share)) for share in (0.5, 0.95, 0.99)),
        )
        for timed, each in sorted(times.items())
    ]
    head = ["stage", "kind", "encoder tokens", "items", "p50", "p95", "p99"]
    return f'<div class="wide">{table(head, rows)}</div>'


def _fill(summary: Mapping[str, Any]) -> str:
    """What share of the batches' tokens was not padding, where the run has such batches."""
    encoder, prompts, texts = (
        summary.get(name, 0) for name in ("padded_tokens", "prompt_padded_tokens", "text_padded_tokens")
    )
    pairs = (  # all computed, of which padding
        ("encoder batches", summary.get("computed_tokens", 0), encoder),
        ("prompt batches", summary.get("prompt_tokens", 0) + prompts, prompts),
        ("text batches", summary.get("text_tokens", 0) + texts, texts),
        ("steps of writing answers", summary.get("decode_slots", 0), summary.get("idle_decode_slots", 0)),
    )
    rows = [
        (label, _number(tokens), f"{1 - padding / tokens:.1%}", _number(padding))
        for label, tokens, padding in pairs
        if tokens
    ]
    if not rows:
        return ""
    splits = summary.get("oom_splits", 0)
    note = f"<p>{_number(splits)} times a batch was cut for want of memory.</p>" if splits else ""
    return f'<div class="wide">{table(["", "tokens computed", "fill", "padding"], rows)}</div>' + note


def _tiers(summary: Mapping[str, Any]) -> str:
    """Of each cache that was asked for something, how much was there, what that saved, and what the cache takes."""
    rows = []
    # Summaries of earlier versions have counts alone.
    for name, tier in (summary.get("tiers") or describe_tiers(summary, "", {})).items():
        if tier["hit_rate"] is not None or tier["evictions"]:
            rate, saved = tier["hit_rate"], tier["saved_seconds"]
            rows.append(
                (
                    _TIERS[name],
                    _number(tier["found"]),
                    _number(tier["made"]),
                    "" if rate is None else f"{rate:.1%}",
                    _number(tier["fallbacks"]),
                    "" if saved is None else f"{saved:,.1f}",
                    *("" if tier[each] is None else _number(tier[each]) for each in ("bytes", "max_bytes")),
                    _number(tier["evictions"]),
                )
            )
    if not rows:
        return ""
    names = ["", "found", "made anew", "found, share", "fell back", "saved, s", "bytes", "bound", "evicted"]
    return f'<div class="wide">{table(names, rows)}</div>'


def _cost(summary: Mapping[str, Any], costs: RunCosts) -> str:
    """What items took by stage, by kind, and those that took most."""
    said = ""
    for name, label in (("cpu_seconds", "CPU seconds"), ("accelerator_seconds", "Accelerator seconds")):
        if any(summary.get(name, {}).values()):
            said += f"<p>{label}, by stage</p>\n{_bars(summary[name])}\n"
    for label, (head, rows) in (("By kind", cost_rows(costs)), ("The dearest items", dearest_rows(costs))):
        if rows:
            said += f'<p>{label}</p>\n<div class="wide">{table(head, rows)}</div>\n'
    return said


def _milliseconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _progress(progress: Mapping[str, Sequence[tuple[float, int]]]) -> str:
    """A line a pass: how many items were finished by when."""
    last = max((points[-1][0] for points in progress.values() if points), default=0.0)
    if last <= 0:
        return "<p>Too few windows to draw.</p>"
    return "\n".join(_line(name, points, last) for name, points in progress.items() if points)


def _line(name: str, points: Sequence[tuple[float, int]], last: float) -> str:
    width, height = 560, 90
    most = points[-1][1]
    places = " ".join(f"{width * seconds / last:.1f},{height - height * items / most:.1f}" for seconds, items in points)
    label = f"{name}: {_number(most)} items in {points[-1][0]:,.1f} s"
    return (
        f'<svg viewBox="0 -18 {width + 4} {height + 22}" width="100%" role="img" aria-label="{escape(label)}">'
        f'<text x="0" y="-5">{escape(label)}</text><line x1="0" y1="{height}" x2="{width}" y2="{height}"/>'
        f'<polyline points="0,{height} {places}"/></svg>'
    )
