"""`python -m jobs.demo`: two questions about the drawn media, the answers beside the truth, what the store saved.

Starts where `configs/` is. Exit codes are those of a run, and 1 when fewer than 0.9 of the answers are right.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow.parquet as pq

from jobs.running import run_config
from pipeline.config import Config, load_config
from pipeline.engine import ray_session
from pipeline.storage import Folder

CONFIG = "configs/demo_caption.yaml"
SECOND = "What colour is the shape?"
MIN_ACCURACY = 0.9
_ROWS_SHOWN = 12
_WIDEST = 70
_SAVED = ("fetches", "bytes_fetched", "frames_decoded", "images_decoded", "encodes")
_SAVED_SECONDS = ("encode_pass", "generate_pass", "total")


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What the run wrote for an item (`status: code` where there is no text), and the answer that is true."""

    item: str
    text: str
    truth: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A finished run of the demo."""

    question: str
    folder: Folder
    summary: Mapping[str, Any]
    answers: Sequence[Answer]

    @property
    def accuracy(self) -> float:
        """The share of answers that are exactly the truth."""
        return sum(answer.text == answer.truth for answer in self.answers) / len(self.answers)


def main() -> int:
    """Run both questions, print, and return the exit code."""
    results = []
    with ray_session(load_config(CONFIG).ray):  # one for both questions
        for settings in ([], [f"prompt={SECOND}"]):
            code = run_config(CONFIG, settings)
            if code != 0:
                return code
            results.append(read_result(load_config(CONFIG, settings)))
    for result in results:
        print_answers(result)
    for result in results:
        print(f"accuracy {result.accuracy:.2f}  {result.question}")
    print_places(load_config(CONFIG), results)
    print_savings(*results)
    return 0 if all(result.accuracy >= MIN_ACCURACY for result in results) else 1


def read_result(config: Config) -> Result:
    """The run that `config.output` holds last."""
    output = Folder(config.output)
    folder = output.sub(output.read_bytes("latest").decode().strip())
    lines = Folder(config.input.rpartition("/")[0]).read_bytes("truth.jsonl").decode().splitlines()
    truth = {row["id"]: row[config.prompt] for row in map(json.loads, lines)}
    rows: list[dict[str, Any]] = []
    for name in folder.list(suffix=".parquet"):
        with folder.open(name) as file:
            rows += pq.read_table(file).to_pylist()
    answers = [Answer(item=row["id"], text=_shown(row), truth=truth[row["id"]]) for row in rows]
    return Result(question=config.prompt, folder=folder, summary=folder.read_json("summary.json"), answers=answers)


def _shown(row: Mapping[str, Any]) -> str:
    return row["text"] if row["status"] == "ok" else f"{row['status']}: {row['code']}"


def print_answers(result: Result) -> None:
    """The first answers, and every wrong one."""
    shown = [a for i, a in enumerate(result.answers) if i < _ROWS_SHOWN or a.text != a.truth]
    texts = [" ".join(answer.text.split())[:_WIDEST] for answer in shown]
    width = max(len(result.question), *map(len, texts))
    print(f"\n{'item':10}   {result.question:{width}}   truth")
    for answer, text in zip(shown, texts, strict=True):
        mark = " " if answer.text == answer.truth else "✗"
        print(f"{answer.item:10} {mark} {text:{width}}   {answer.truth}")
    print(f"({len(shown)} of {len(result.answers)} items: the first {_ROWS_SHOWN}, and every wrong answer)\n")


def print_places(config: Config, results: Sequence[Result]) -> None:
    """Where output, summary, report and store are."""
    for result in results:
        place = result.folder
        print(f"\n{result.question}\n  output   {place.url}")
        print(f"  summary  {place.locate('summary.json')}\n  report   {place.locate('report.html')}")
    print(f"\nstore      {Folder(config.store.path).url}")


def print_savings(first: Result, second: Result) -> None:
    """What each question cost."""
    print(f"\n{'what it took':16} {'first question':>14} {'second':>10}")
    for name in _SAVED:
        print(f"{name:16} {first.summary[name]:14,} {second.summary[name]:10,}")
    for name in _SAVED_SECONDS:
        times = (result.summary["seconds"][name] for result in (first, second))
        print(f"{name:16}" + "".join(f" {seconds:{width}.1f} s" for seconds, width in zip(times, (12, 8), strict=True)))
    if not any(first.summary["seconds"][name] for name in ("encode_pass", "generate_pass")):
        print("(the first question had been answered by an earlier start: there was nothing left to do)")


if __name__ == "__main__":
    sys.exit(main())
