"""`headrace search`: what was found, on the terminal and as a page with pictures."""

from __future__ import annotations

import base64
import html
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeline.config import Config
from pipeline.media.sandbox import Sandbox, open_sandbox
from pipeline.media.thumbnail import as_png, scaled, thumbnail
from pipeline.models.checkpoint import load_quietly
from pipeline.runs.run_folder import find_run, read_config
from pipeline.schema import MediaItem
from pipeline.search import Answers, search
from pipeline.sinks.contract import Hit

_TERMINAL_SIDE = 24  # pixels, two a character cell one above the other
_PAGE_SIDE = 240
_TEXT_CHARACTERS = 300
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2530; --soft: #5d6875; --paper: #fff; --line: #d9dfe6; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e9ef; --soft: #98a4b1; --paper: #14191f; --line: #2f3843; }
}
body { margin: 2rem auto; max-width: 64rem; padding: 0 1rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.05rem; margin-top: 2rem; }
ol { display: grid; grid-template-columns: repeat(auto-fill, minmax(15rem, 1fr)); gap: 1rem; padding: 0; }
li { list-style: none; border: 1px solid var(--line); border-radius: 6px; padding: .7rem; overflow-wrap: anywhere; }
img { max-width: 100%; display: block; margin-bottom: .5rem; }
p { margin: .2rem 0; } .soft { color: var(--soft); }
"""


def run_search(path: str, query: str, *, limit: int, tenant: str, page: str | None) -> None:
    """Search the run at `path`, print what was found and write the page; where it is, is printed last."""
    load_quietly()
    run = find_run(path)
    found = search(run, query, limit=limit, tenant=tenant)
    pictures = _pictures(found, read_config(run))
    found = [answers for answers in found if answers.hits]
    for answers in found:
        print(f"\n{answers.of}, by {answers.model}")
        for rank, hit in enumerate(answers.hits, start=1):
            _print_hit(rank, hit, pictures[hit.id])
    target = page or f"{run.path.rpartition('/')[2]}-search.html"
    Path(target).write_text(page_of(query, found, pictures), encoding="utf-8")
    print(f"\npage  {os.path.abspath(target)}")


def _print_hit(rank: int, hit: Hit, found: npt.NDArray[np.uint8] | None) -> None:
    lines = _lines(rank, hit)
    if found is None or not sys.stdout.isatty():
        print("\n".join(lines))
        return
    picture = scaled(found, _TERMINAL_SIDE)
    drawn = list(_cells(picture))
    for number in range(max(len(drawn), len(lines))):
        left = drawn[number] if number < len(drawn) else " " * picture.shape[1]
        print(f"{left}  {lines[number] if number < len(lines) else ''}")


def _lines(rank: int, hit: Hit) -> list[str]:
    width = shutil.get_terminal_size().columns - 4
    place = "" if hit.start_char is None else f"  characters {hit.start_char}-{hit.end_char}"
    lines = [f"{rank:3}  {hit.score:.3f}  {hit.item_id}  ({hit.kind}){place}"]
    if hit.text:
        lines.append(f"     {' '.join(hit.text.split())[: max(20, min(width, _TEXT_CHARACTERS))]}")
    return lines


def _cells(picture: npt.NDArray[np.uint8]) -> Iterator[str]:
    """Lines of half blocks: the upper pixel as the ink, the lower one as the ground."""
    rows = picture if len(picture) % 2 == 0 else np.concatenate([picture, picture[-1:]])
    for upper, lower in zip(rows[::2], rows[1::2], strict=True):
        cells = (
            f"\x1b[38;2;{a[0]};{a[1]};{a[2]}m\x1b[48;2;{b[0]};{b[1]};{b[2]}m\u2580"
            for a, b in zip(upper, lower, strict=True)
        )
        yield "".join(cells) + "\x1b[0m"


def _pictures(found: Sequence[Answers], config: Config) -> dict[str, npt.NDArray[np.uint8] | None]:
    """By id of the hit; decoded as the run's media were, in its sandbox."""
    sandbox = open_sandbox(config.decode.sandbox, config.decode.item_seconds)
    try:
        return {hit.id: _picture(hit, config, sandbox) for answers in found for hit in answers.hits}
    finally:
        if sandbox is not None:
            sandbox.close()


def _picture(hit: Hit, config: Config, sandbox: Sandbox | None) -> npt.NDArray[np.uint8] | None:
    if hit.uri is None:
        return None
    modality = hit.kind if hit.kind in ("image", "video", "page") else ("page" if hit.page is not None else None)
    media = MediaItem(uri=hit.uri, modality=modality, page=hit.page)  # type: ignore[arg-type]
    return thumbnail(media, _PAGE_SIDE, config.source_policy(), config.limits(), sandbox)


def page_of(query: str, found: Sequence[Answers], pictures: dict[str, npt.NDArray[np.uint8] | None]) -> str:
    """One self-contained HTML page of what was found."""
    sections = "\n".join(
        f"<h2>{html.escape(answers.of)} <span class=soft>by {html.escape(answers.model)}</span></h2>\n<ol>"
        + "\n".join(_card(rank, hit, pictures.get(hit.id)) for rank, hit in enumerate(answers.hits, start=1))
        + "</ol>"
        for answers in found
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(query)}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{html.escape(query)}</h1>\n{sections}\n</body></html>\n"
    )


def _card(rank: int, hit: Hit, picture: npt.NDArray[np.uint8] | None) -> str:
    image = ""
    if picture is not None:
        data = base64.b64encode(as_png(picture)).decode()
        image = f'<img alt="{html.escape(hit.item_id)}" src="data:image/png;base64,{data}">'
    text = f"<p>{html.escape(hit.text[:_TEXT_CHARACTERS])}</p>" if hit.text else ""
    place = "" if hit.start_char is None else f", characters {hit.start_char} to {hit.end_char}"
    said = f"{hit.score:.3f} · {html.escape(hit.kind)}{place}"
    return f"<li>{image}<p>{rank}. {html.escape(hit.item_id)}</p>{text}<p class=soft>{said}</p></li>"
