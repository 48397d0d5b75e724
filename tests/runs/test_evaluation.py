"""Labels, what counts as saying a phrase, and the sums by class."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from pipeline.runs.evaluation import Label, evaluate, evaluation_text, read_labels, says


@pytest.mark.parametrize(
    "answer, phrase, said",
    [
        ("A small RED circle, moving left.", "moving left", True),
        ("A small red circle moving, left", "Moving Left", True),
        ("moving right, then left", "moving left", False),
        ("a reddish circle", "red", False),
        ("left moving", "moving left", False),
        ("", "red", False),
        ("der Fuß", "FUSS", True),
    ],
)
def test_a_phrase_is_said_by_whole_words_in_order(answer: str, phrase: str, said: bool) -> None:
    assert says(answer, phrase) is said


def test_results_are_told_by_class() -> None:
    labels = [
        Label(id="a", expected={"colour": ("red",), "motion": ("left", "leftwards")}),
        Label(id="b", expected={"colour": ("blue",), "motion": ("up",)}),
        Label(id="c", expected={"colour": ("green",)}),
    ]
    baseline = {"a": "red, goes leftwards", "b": "blue, up", "c": "a grey thing"}
    answers = {"a": "red", "b": "", "c": "green"}
    results = evaluate(labels, baseline, answers)
    found = {r.name: (r.items, r.baseline_right, r.right, r.lost, r.won) for r in results}
    assert found == {"colour": (3, 2, 2, 1, 1), "motion": (2, 2, 0, 2, 0), "all": (5, 4, 2, 3, 1)}
    assert [r.name for r in results] == ["colour", "motion", "all"]
    assert [r.regression for r in results] == [0.0, 1.0, pytest.approx(0.4)]
    assert [loss.id for loss in results[1].examples] == ["a", "b"]
    text = evaluation_text(results).splitlines()
    assert text[1].split() == ["colour", "3", "0.667", "0.667", "+0.000", "1", "1"]
    assert "    a: 'red', where the baseline says 'red, goes leftwards'" in text
    assert text[-1].split() == ["all", "5", "0.800", "0.400", "-0.400", "3", "1"]


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "[]",
        '{"id": "a"}',
        '{"id": "a", "expected": {}}',
        '{"id": "a", "expected": {"colour": []}}',
        '{"id": "a", "expected": {"colour": "?!"}}',
        '{"id": "a", "expected": {"colour": 3}}',
    ],
)
def test_labels_that_say_nothing_are_refused_by_line(tmp_path: Path, line: str) -> None:
    file = tmp_path / "labels.jsonl"
    file.write_text('{"id": "z", "expected": {"colour": "red"}}\n\n' + line + "\n")
    with pytest.raises(ConfigError, match="line 3: expected"):
        read_labels(str(file))


def test_labels_are_read_once_each(tmp_path: Path) -> None:
    file = tmp_path / "labels.jsonl"
    file.write_text('{"id": 7, "expected": {"colour": "red", "motion": ["left", "to the left"]}}\n')
    assert read_labels(str(file)) == [Label(id="7", expected={"colour": ("red",), "motion": ("left", "to the left")})]
    file.write_text(file.read_text() * 2)
    with pytest.raises(ConfigError, match="occurs twice"):
        read_labels(str(file))
    file.write_text("\n")
    with pytest.raises(ConfigError, match="no labels"):
        read_labels(str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_labels(str(tmp_path / "absent.jsonl"))
