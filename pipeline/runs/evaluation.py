"""How often answers say what a labelled item shows, by class, of two runs beside each other."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow.parquet as pq

from pipeline.errors import ConfigError
from pipeline.storage import Folder

ALL = "all"
_EXAMPLES = 3
_WIDEST = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    """What an item's answer has to say: class → phrases, of which one is enough."""

    id: str
    expected: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """An item that the baseline answered right in a class, and the configuration did not."""

    id: str
    expected: tuple[str, ...]
    baseline: str
    answer: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassResult:
    """A class: labelled items, how many are right in the baseline and under the configuration, and which changed.

    `lost` were right in the baseline alone, `won` under the configuration alone. `examples` are some of the lost.
    """

    name: str
    items: int
    baseline_right: int
    right: int
    lost: int
    won: int
    examples: tuple[Loss, ...] = ()

    @property
    def regression(self) -> float:
        """The accuracy of the baseline less that of the configuration."""
        return (self.baseline_right - self.right) / self.items

    def to_json(self) -> dict[str, Any]:
        """The fields, with accuracies and `regression`."""
        shares = {"baseline_accuracy": self.baseline_right / self.items, "accuracy": self.right / self.items}
        return {**asdict(self), **shares, "regression": self.regression}


def read_labels(path: str) -> list[Label]:
    """JSON lines `{"id": …, "expected": {class: phrase, or a list of which one is enough}}`.

    Raises `ConfigError` naming the line.
    """
    folder, _, name = path.rpartition("/")
    try:
        lines = Folder(folder or ".").read_bytes(name).decode().splitlines()
    except (FileNotFoundError, UnicodeDecodeError) as error:
        raise ConfigError(f"--labels {path}: cannot be read: {error}") from error
    labels = [_label(line, f"--labels {path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not labels:
        raise ConfigError(f"--labels {path}: has no labels")
    if len({label.id for label in labels}) < len(labels):
        raise ConfigError(f"--labels {path}: an id occurs twice; write all its classes into one line")
    return labels


def _label(line: str, where: str) -> Label:
    try:
        row = json.loads(line)
        expected = {name: (each,) if isinstance(each, str) else tuple(each) for name, each in row["expected"].items()}
        phrases = [phrase for each in expected.values() for phrase in each]
        if expected and all(expected.values()) and all(_words(phrase) for phrase in phrases):
            return Label(id=str(row["id"]), expected=expected)
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise ConfigError(f'{where}: expected {{"id": …, "expected": {{class: phrase or phrases}}}}, got {line[:200]}')


def says(answer: str, phrase: str) -> bool:
    """Whether the words of `phrase` stand in `answer` one after another, whatever their case and punctuation."""
    wanted, given = _words(phrase), _words(answer)
    return any(given[at : at + len(wanted)] == wanted for at in range(len(given) - len(wanted) + 1))


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


def read_answers(run: Folder) -> dict[str, str]:
    """Item → its text, or the label of its highest score; "" of one that was quarantined."""
    answers: dict[str, str] = {}
    for name in run.list(suffix=".parquet"):
        with run.open(name) as file:
            schema = pq.read_schema(file)
            column = "text" if "text" in schema.names else "label"
            part = pq.read_table(file, columns=["id", column])
        answers |= {id_: answer or "" for id_, answer in zip(*part.to_pydict().values(), strict=True)}
    return answers


def evaluate(labels: Iterable[Label], baseline: Mapping[str, str], answers: Mapping[str, str]) -> list[ClassResult]:
    """A result a class, by name, and `ALL` over all classes of all items, last."""
    judged: dict[str, list[tuple[bool, bool, Loss]]] = {}
    for label in labels:
        before, after = baseline[label.id], answers[label.id]
        for name, phrases in label.expected.items():
            right = [any(says(answer, phrase) for phrase in phrases) for answer in (before, after)]
            loss = Loss(id=label.id, expected=phrases, baseline=before, answer=after)
            judged.setdefault(name, []).append((right[0], right[1], loss))
    results = [_result(name, each) for name, each in sorted(judged.items())]
    everything = [one for each in judged.values() for one in each]
    return [*results, _result(ALL, everything)]


def _result(name: str, judged: Sequence[tuple[bool, bool, Loss]]) -> ClassResult:
    lost = [loss for before, after, loss in judged if before and not after]
    return ClassResult(
        name=name,
        items=len(judged),
        baseline_right=sum(before for before, _, _ in judged),
        right=sum(after for _, after, _ in judged),
        lost=len(lost),
        won=sum(after and not before for before, after, _ in judged),
        examples=() if name == ALL else tuple(lost[:_EXAMPLES]),
    )


def evaluation_text(results: Sequence[ClassResult]) -> str:
    """For people: a line a class, and under it some of what was lost."""
    width = max(len("class"), *(len(each.name) for each in results))
    lines = [f"{'class':{width}} {'items':>7} {'baseline':>9} {'this':>7} {'change':>7} {'lost':>6} {'won':>6}"]
    for each in results:
        before, after = each.baseline_right / each.items, each.right / each.items
        lines.append(
            f"{each.name:{width}} {each.items:7,} {before:9.3f} {after:7.3f} {after - before:+7.3f} "
            f"{each.lost:6,} {each.won:6,}"
        )
        lines += [
            f"    {loss.id}: {_short(loss.answer)!r}, where the baseline says {_short(loss.baseline)!r}"
            for loss in each.examples
        ]
    return "\n".join(lines)


def _short(text: str) -> str:
    return text if len(text) <= _WIDEST else f"{text[:_WIDEST]}…"
