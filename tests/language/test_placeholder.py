import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.language.placeholder import collapse, expand
from pipeline.schema import Placeholder


@pytest.mark.parametrize(
    ("text", "collapsed", "runs"),
    [
        ("<i><i><i>", "<i>", (3,)),
        ("\n\n<start><i><i><end>\n\n", "\n\n<start><i><end>\n\n", (2,)),
        ("<1 s><v><v><2 s><v>", "<1 s><v><2 s><v>", (2, 1)),
        ("<i><v><v>", "<i><v>", (1, 2)),
        ("none", "none", ()),
    ],
)
def test_runs_are_shown_once_and_counted(text: str, collapsed: str, runs: tuple[int, ...]) -> None:
    assert collapse(text, ["<i>", "<v>"]) == Placeholder(text=collapsed, runs=runs)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), max_size=12))
def test_expanding_gives_back_what_was_collapsed(parts: list[tuple[str, int]]) -> None:
    # "a" and "b" are media tokens, each its own id; "c" is text, never in runs.
    text = "".join(token * (count if token != "c" else 1) for token, count in parts)
    placeholder = collapse(text, ["a", "b"])
    assert expand(map(ord, placeholder.text), {ord("a"), ord("b")}, placeholder.runs) == [ord(c) for c in text]
    assert placeholder.num_tokens == text.count("a") + text.count("b")


@pytest.mark.parametrize("runs", [(1,), (1, 1, 1)])
def test_runs_must_match_the_tokens(runs: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="media tokens than runs"):
        expand([7, 1, 7], {7}, runs)
