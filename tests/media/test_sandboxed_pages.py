"""Pages counted and their text read in a child: as here, and whatever a document does to it costs that document."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from pipeline.errors import ItemError
from pipeline.media import document
from pipeline.media.in_process import InProcess
from pipeline.media.sandbox import Probers, Sandbox
from tests.media.pdf_files import Page, make_pdf, stream, text_line
from tests.media.sandboxed import child_pid, open_fds, ordering

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the child is kept in by Linux")

LETTERS = "Zwölf Öfen, naïve café"
PDF = make_pdf([Page(content=text_line(LETTERS, 20, 100) + text_line('and "more"', 20, 80)), Page()])
FILES = {
    "two pages": PDF,
    "cut off": PDF[: len(PDF) // 2],
    "no pages": make_pdf([]),
    "no PDF": b"Dear reader",
    "more than is read at once": make_pdf(
        [Page(content=text_line("large", 20, 100))], objects=[stream("x" * (17 * 2**20))]
    ),
}


def count(reader: Sandbox | Probers | InProcess, data: bytes) -> int:
    return reader.page_count(io.BytesIO(data), num_bytes=len(data), name="a.pdf")


def outcome(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except ItemError as error:
        return error.stage, error.code, error.message


@pytest.mark.parametrize("name", FILES)
def test_counts_texts_and_failures_are_those_of_this_process(shared: Sandbox, name: str) -> None:
    data = FILES[name]
    for reader in (shared, Probers([shared]), InProcess()):
        assert outcome(lambda: count(reader, data)) == outcome(lambda: document.read_page_count(data, "a.pdf"))  # noqa: B023
        for page in (0, 1, 7):
            assert outcome(lambda: reader.page_text(data, page)) == outcome(lambda: document.page_text(data, page))  # noqa: B023
    assert shared._child is not None


def test_what_is_written_is_read(shared: Sandbox) -> None:
    assert shared.page_text(PDF, 0) == f'{LETTERS}\nand "more"'
    assert (shared.page_text(PDF, 1), count(shared, PDF)) == ("", 2)


@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        ("hang", "timeout", "not decoded within 1.0 s"),
        ("segfault", "crashed", "the decoder's process ended (SIGSEGV)"),
        (f"eat {2**33}", "out_of_memory", "decoding takes more than the 512 MB"),
    ],
)
def test_a_document_that_breaks_its_reader_costs_itself(hostile: Sandbox, what: str, code: str, said: str) -> None:
    for order, stage, read in (
        ("count", "probe", lambda data: count(hostile, data)),
        ("text", "decode", lambda data: hostile.page_text(data, 0)),
    ):
        hostile.start()
        started = time.monotonic()
        found = outcome(lambda: read(ordering(PDF, f"{order}_{what}")))  # noqa: B023
        seconds = time.monotonic() - started
        assert found[:2] == (stage, code)
        assert said in found[2]
        assert code != "timeout" or 1.0 <= seconds < 2.0
        assert read(PDF) == (2 if stage == "probe" else f'{LETTERS}\nand "more"')


@pytest.mark.parametrize(
    "lie", ["-1", "0", "True", "2.0", "'2'", "2**20 + 1", "[2]", "None"]
)  # of pages; for each there would be a row
def test_a_number_of_pages_that_cannot_be_is_not_believed(hostile: Sandbox, lie: str) -> None:
    stage, code, message = outcome(lambda: count(hostile, ordering(PDF, f"count_as {lie}")))
    assert (stage, code) == ("probe", "crashed")
    assert message.endswith("makes no sense: a number of pages that cannot be")


@pytest.mark.parametrize("lie", ["1", "None", "['a']", "'x' * 1_000_001", "'a\\x00b'", "'a\\ud800'", "'a\\u00adb'"])
def test_a_text_that_cannot_be_is_not_believed(hostile: Sandbox, lie: str) -> None:
    stage, code, message = outcome(lambda: hostile.page_text(ordering(PDF, f"text_as {lie}"), 0))
    assert (stage, code) == ("decode", "crashed")
    assert message.endswith("makes no sense: a text that cannot be")


def test_the_longest_text_there_may_be_arrives(shared: Sandbox) -> None:
    found = shared.page_text(ordering(PDF, f"text_as '\\U0001F600' * {document.MOST_LETTERS}"), 0)
    assert found == "\N{GRINNING FACE}" * document.MOST_LETTERS


def test_a_page_of_more_text_is_refused(shared: Sandbox) -> None:
    lines = "".join(text_line("so " * 334, 0, 14 * number) for number in range(1001))
    data = make_pdf([Page(content=lines, media_box=(0, 0, 9_000, 14_014))])
    for reader in (shared, InProcess()):
        found = outcome(lambda: reader.page_text(data, 0))  # noqa: B023
        assert found[:2] == ("decode", "too_much_text")


def test_nothing_leaks_over_200_readings(shared: Sandbox) -> None:
    count(shared, PDF)
    pid = child_pid(shared)
    before = open_fds(), open_fds(pid)
    for number in range(200):
        outcome(lambda: shared.page_text(PDF[: 100 * (number % 7)] if number % 2 else PDF, 0))  # noqa: B023
    assert (open_fds(), open_fds(pid)) == before
    assert child_pid(shared) == pid
