"""What `headrace plan` found, for people: as lines on a terminal, and as one self-contained page with plots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from pipeline.runs.report import page, section, table

_MOST_BARS = 24
_UNITS = ("", "k", "M", "G", "T", "P", "E")
Row = tuple[str, str]


def plan_sections(plan: Mapping[str, Any]) -> list[tuple[str, list[Row]]]:
    """(heading, rows of name and value) of what there is."""
    parts = [
        ("Items", _items(plan["items"])),
        ("Would be quarantined", _rejected(plan["rejected"])),
        ("Encoding", _encoder(plan["encoder"])),
        ("Feature store", _store(plan["store"])),
        ("Language model", _language(plan["language"])),
        ("Texts", _texts(plan["texts"])),
        ("Time and cost", _times(plan)),
    ]
    return [(heading, rows) for heading, rows in parts if rows]


def plan_text(plan: Mapping[str, Any]) -> str:
    """For a terminal."""
    lines = [f"{plan['job']} with {plan['model']}: planned from headers, nothing decoded, nothing written"]
    for heading, rows in plan_sections(plan):
        width = max(len(name) for name, _ in rows)
        lines += ["", heading, *(f"  {name:{width}}  {value}" for name, value in rows)]
    return "\n".join(map(_printable, lines))


def _printable(text: str) -> str:
    """Names and messages come from a manifest, and could have a terminal's own commands in them."""
    return "".join(each if each.isprintable() else "?" for each in text)


def plan_page(plan: Mapping[str, Any]) -> str:
    """HTML without scripts or anything that is loaded; opens offline."""
    bodies = [section(heading, table(["", ""], rows)) for heading, rows in plan_sections(plan)]
    for heading, bars in _plots(plan):
        bodies.append(section(heading, bar_chart(bars)))
    return page(f"Plan: {plan['job']}", f"{plan['model']}: from headers, before anything was decoded", bodies)


def bar_chart(bars: Sequence[tuple[str, float, str]]) -> str:
    """(label, length, what is written behind it) of each bar, as an inline SVG."""
    longest = max((length for _, length, _ in bars), default=0.0) or 1.0
    height = 22 * len(bars)
    drawn = "".join(
        f'<text x="0" y="{22 * k + 15}">{escape(label)}</text>'
        f'<rect x="220" y="{22 * k + 4}" width="{max(1.0, 420 * length / longest):.1f}" height="14"/>'
        f'<text x="{226 + max(1.0, 420 * length / longest):.1f}" y="{22 * k + 15}">{escape(value)}</text>'
        for k, (label, length, value) in enumerate(bars)
    )
    return f'<svg viewBox="0 0 820 {height}" width="100%" role="img" xmlns="http://www.w3.org/2000/svg">{drawn}</svg>'


def _plots(plan: Mapping[str, Any]) -> Iterable[tuple[str, list[tuple[str, float, str]]]]:
    shapes = plan["shapes"][:_MOST_BARS]
    if shapes:
        left = plan["num_shapes"] - len(shapes)
        heading = "Shapes that are encoded, by items" + (f" (and {left:,} rarer ones)" if left else "")
        yield heading, [(_shape(each), each["items"], f"{each['items']:,}") for each in shapes]
    if plan["language"]:
        lengths = plan["language"]["lengths"].items()
        yield "Prompts, by tokens", [(f"up to {int(length):,}", n, f"{n:,}") for length, n in lengths]
    if plan["times"]:
        stages = plan["times"]["stage_seconds"].items()
        yield (
            "Seconds of one worker, by stage",
            [(name.replace("_", " "), value, duration(value)) for name, value in stages],
        )
        schedules = plan["times"]["schedules"]
        yield (
            "Time, by number of workers",
            [(f"{each['workers']:,}", each["seconds"], duration(each["seconds"])) for each in schedules],
        )


def _shape(shape: Mapping[str, Any]) -> str:
    frames = f"{shape['frames']} x " if shape["frames"] > 1 else ""
    return f"{shape['modality']} {frames}{shape['width']} x {shape['height']}"


def _items(items: Mapping[str, Any]) -> list[Row]:
    media = ", ".join(f"{count:,} {modality}s" for modality, count in items["media"].items())
    rows = [("listed", f"{items['listed']:,}")]
    if items["planned"] < items["listed"]:
        rows.append(("planned, the others as these", f"{items['planned']:,} in {items['windows']:,} windows"))
    rows += [("media admitted", media)] if media else []
    named = {
        "without_media": "without media",
        "rejected": "would be quarantined",
        "hits": "media whose features are in the store",
        "duplicates": "media that occur before",
        "carried": "unchanged since the base run",
    }
    return rows + [(label, f"{items[name]:,}") for name, label in named.items() if items[name]]


def _rejected(rejected: Mapping[str, Any]) -> list[Row]:
    return [(code, f"{each['items']:,}; {'; '.join(each['examples'])}") for code, each in rejected.items()]


def _encoder(encoder: Mapping[str, Any] | None) -> list[Row]:
    if encoder is None:
        return []
    return [
        ("media to encode", f"{encoder['media']:,} in {encoder['batches']:,} batches"),
        ("tokens computed", f"{encoder['computed_tokens']:,}, padding {encoder['padding_waste']:.1%}"),
        ("batches filled", f"{encoder['token_fill']:.0%} of their tokens, {encoder['item_fill']:.0%} of their items"),
        ("feature tokens", f"{encoder['feature_tokens']:,}"),
        ("encoder work", f"{_quantity(encoder['flops'])}FLOPs"),
        ("decoding", f"{duration(3600 * encoder['decode_core_hours'])} of the reference core"),
        ("frames on their way", f"{_quantity(encoder['frame_bytes'])}B"),
    ]


def _store(store: Mapping[str, Any] | None) -> list[Row]:
    if store is None:
        return []
    again = f"{_quantity(store['recompute_flops'])}FLOPs and {duration(3600 * store['recompute_decode_core_hours'])}"
    rows = [("features", f"{_quantity(store['bytes'])}B"), ("to compute them again", f"{again} of the reference core")]
    if store["month_cost"] is not None:
        rows.append(("held for a month", f"{store['month_cost']:,.2f}"))
    if store["recompute_cost"] is not None:
        rows.append(("computed again", f"{store['recompute_cost']:,.2f}"))
    if store["break_even_months"] is not None:
        rows.append(("worth holding", f"where asked again within {store['break_even_months']:,.1f} months"))
    return rows


def _language(language: Mapping[str, Any] | None) -> list[Row]:
    if language is None:
        return []
    expected = language["answer_tokens"]
    answers = f"{language['answer_tokens_at_most']:,} at most" + (f", {expected:,} expected" if expected else "")
    return [
        ("prompts", f"{language['prompts']:,} in {language['batches']:,} batches"),
        ("prompt tokens (prefill)", f"{language['prompt_tokens']:,}, padding {language['padding_waste']:.1%}"),
        ("longest prompt", f"{language['longest_prompt']:,}"),
        ("answer tokens (decode)", answers),
        ("prefill", f"{_quantity(language['prefill_flops'])}FLOPs"),
        ("answers", f"{_quantity(language['answer_flops_at_most'])}FLOPs at most"),
        ("keys and values, largest request", f"{_quantity(language['kv_bytes_largest_request'])}B"),
        (
            "keys and values, mean batch",
            f"{_quantity(language['kv_bytes_mean_batch'])}B of {_quantity(language['kv_bytes_budget'])}B",
        ),
    ]


def _texts(texts: Mapping[str, Any] | None) -> list[Row]:
    if texts is None:
        return []
    rows = [
        ("texts", f"{texts['texts']:,} in {texts['batches']:,} runs of like length"),
        ("text tokens", f"{texts['tokens']:,}, padding {texts['padding_waste']:.1%}"),
        ("work", f"{_quantity(texts['flops'])}FLOPs"),
    ]
    if texts["pages_read"] < texts["pages"]:
        rows.append(("of pages whose text was read", f"{texts['pages_read']:,} of {texts['pages']:,}; others as these"))
    return rows


def _times(plan: Mapping[str, Any]) -> list[Row]:
    times = plan["times"]
    if times is None:
        return [("not known", "nothing was measured for this job: run headrace calibrate CONFIG on the target machine")]
    rows = [
        ("measured on", times["accelerator"]),
        ("a run there, with its start", duration(times["this_machine_seconds"])),
    ]
    for each in times["schedules"]:
        cost = "" if each["cost"] is None else f", costs {each['cost']:,.2f}"
        workers = f"{each['workers']:,} workers, {each['decode_cores']:,} decoding cores"
        rows.append((workers, f"{duration(each['seconds'])}, most of it {each['bottleneck']}{cost}"))
    if times["decode_cores_per_accelerator"] is not None:
        has = times["cores_per_accelerator"]
        rows.append(
            ("cores that keep one encoder busy", f"{times['decode_cores_per_accelerator']:.1f}; it has {has:.1f}")
        )
    if times["placement"] is not None:
        placed = times["placement"]
        where = "on machines of their own" if placed["separate"] else "beside the encoder"
        waits = f"waits {placed['queue_seconds']:.2f} s for the cores beside it, {placed['transfer_seconds']:.2f} s"
        rows.append(("decoders belong", f"{where}: a second of encoding {waits} for frames from elsewhere"))
    for each in times["pools"]:
        turn, apart = duration(each["in_turn_seconds"]), duration(each["apart_seconds"])
        waits = f"{duration(each['queue_seconds'])} of it waiting for decoders"
        split = f"{each['encoders']} that encode and {each['workers'] - each['encoders']} that answer"
        best = "apart" if each["separate"] else "in turn"
        rows.append(
            (f"encode and answer, {each['workers']} workers", f"{best}: in turn {turn}, {waits}; {split} {apart}")
        )
    rows.append(("a second question, one worker", duration(times["second_question_seconds"])))
    return rows


def duration(seconds: float) -> str:
    """In the unit that suits: ms, s, min or h."""
    if seconds < 1:
        return f"{1e3 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"


def _quantity(value: float) -> str:
    """With a prefix of the SI, which steps by 1,000."""
    step = 0
    while value >= 1000 and step < len(_UNITS) - 1:
        value, step = value / 1000, step + 1
    return f"{value:.3g} {_UNITS[step]}"
