"""Whatever is delivered twice, late or out of order, every receipt counts once."""

import itertools
import json
from dataclasses import replace

import pytest

from pipeline.runs.receipts import ReceiptBook, Totals, receipt_from_json, receipt_to_json, sum_receipts
from pipeline.schema import Receipt

STAGES = [("encode", "plan", "encode"), ("generate", "prompt", "generate")]


def plan(stage: str, window: int, batches: int, quarantined: int = 0) -> Receipt:
    return Receipt(
        stage=stage,
        window=window,
        batch=-1,
        digest="p",
        counts={"batches": batches, "items_quarantined": quarantined},
        quarantine={"too_large": quarantined} if quarantined else {},
    )


def batch(stage: str, window: int, number: int, digest: str = "d") -> Receipt:
    return Receipt(
        stage=stage,
        window=window,
        batch=number,
        digest=f"{digest}{number}",
        shards=("s", "t"),
        counts={"encodes": number + 1},
        seconds={stage: 0.5},
    )


@pytest.mark.parametrize(("pass_name", "planning", "working"), STAGES)
def test_a_window_is_finished_in_any_order_of_arrival(pass_name: str, planning: str, working: str) -> None:
    receipts = [plan(planning, 3, 2, quarantined=1), batch(working, 3, 0), batch(working, 3, 1)]
    for order in itertools.permutations(receipts):
        book = ReceiptBook()
        for number, receipt in enumerate(order):
            assert not book.is_finished(pass_name, 3)
            assert book.finished_windows(pass_name) == []
            assert book.add(receipt)
            assert not book.add(receipt_from_json(receipt_to_json(receipt))), f"delivered again: {number}"
        assert book.finished_windows(pass_name) == [3]
        assert book.window_receipts(pass_name, 3) == receipts
        assert book.counts == {"batches": 2, "items_quarantined": 1, "encodes": 1 + 2}
        assert book.seconds == {working: 1.0}
        assert book.quarantine == {"too_large": 1}


def test_a_window_without_batches_is_finished_by_its_plan() -> None:
    book = ReceiptBook()
    book.add(plan("plan", 0, 0))
    assert book.is_finished("encode", 0)
    assert not book.is_finished("generate", 0) and not book.is_finished("pool", 0)
    book.add(plan("ready", 0, 0))
    assert book.is_finished("pool", 0)


def test_passes_and_windows_are_kept_apart() -> None:
    book = ReceiptBook()
    for receipt in [batch("encode", 1, 0), batch("generate", 1, 0), batch("encode", 2, 0), plan("plan", 1, 1)]:
        assert book.add(receipt)
    assert (book.finished_windows("encode"), book.finished_windows("generate")) == ([1], [])
    assert book.counts["encodes"] == 3


def test_settling_drops_the_receipts_and_keeps_the_sums() -> None:
    book = ReceiptBook()
    receipts = [plan("plan", 1, 2), batch("encode", 1, 0), batch("encode", 1, 1)]
    for receipt in receipts[:2]:
        book.add(receipt)
    with pytest.raises(RuntimeError, match="encode window 1 cannot be settled, it is waiting: 2 receipts are in"):
        book.settle("encode", 1)
    book.add(receipts[2])
    totals = book.settle("encode", 1)
    assert totals == sum_receipts(receipts)
    assert totals == Totals(
        counts={"batches": 2, "items_quarantined": 0, "encodes": 3}, seconds={"encode": 1.0}, quarantine={}
    )
    assert book.window_receipts("encode", 1) == []
    assert not any(book.add(receipt) for receipt in receipts)
    assert book.counts == totals.counts
    assert book.finished_windows("encode") == [1]
    with pytest.raises(RuntimeError, match="settled already"):
        book.settle("encode", 1)


def test_what_is_lost_is_taken_back_and_done_anew() -> None:
    book = ReceiptBook()
    settled = [plan("plan", 0, 1), batch("encode", 0, 0)]
    lost = [plan("plan", 1, 2, quarantined=1), batch("encode", 1, 0), batch("encode", 1, 1)]
    for receipt in [*settled, *lost, batch("generate", 1, 1)]:
        book.add(receipt)
    book.settle("encode", 0)
    assert book.withdraw("encode", lambda receipt: "s" in receipt.shards and receipt.batch == 1) == [lost[2]]
    assert not book.is_finished("encode", 1)
    assert book.window_receipts("encode", 1) == lost[:2]
    assert book.counts == {"batches": 3, "items_quarantined": 1, "encodes": 1 + 1 + 2}  # the last is generate's
    assert book.seconds == {"encode": 1.0, "generate": 0.5}
    again = replace(lost[2], shards=("t",), counts={"encodes": 2})
    assert book.add(again)
    assert book.settle("encode", 1) == sum_receipts([*lost[:2], again])
    assert book.withdraw("encode", lambda receipt: True) == [], "of settled windows nothing is lost"


def test_a_resumed_run_takes_over_what_the_ledger_holds() -> None:
    first = ReceiptBook()
    for receipt in [plan("plan", 0, 1), batch("encode", 0, 0)]:
        first.add(receipt)
    entry = json.loads(json.dumps(first.settle("encode", 0).to_entry()))
    second = ReceiptBook()
    second.restore("encode", 0, entry)
    assert not second.add(batch("encode", 0, 0))
    assert second.is_finished("encode", 0)
    assert (second.counts, second.seconds) == (first.counts, first.seconds)
    with pytest.raises(RuntimeError, match="encode window 0 is known already"):
        second.restore("encode", 0, entry)


@pytest.mark.parametrize(
    ("receipts", "said"),
    [
        ([batch("encode", 1, 0), batch("encode", 1, 0, digest="x")], "window 1 batch 0: done twice .* d0 and x0"),
        ([plan("plan", 1, 1), batch("encode", 1, 1)], "the plan has 1 batches, but 1 has a receipt"),
        ([batch("encode", 1, 4), plan("plan", 1, 2)], "the plan has 2 batches, but 4 has a receipt"),
        ([batch("encode", 1, -1)], "planning receipts have batch -1"),
        ([batch("encode", 1, -2)], "planning receipts have batch -1"),
        ([Receipt(stage="plan", window=1, batch=0, digest="p")], "planning receipts have batch -1"),
    ],
)
def test_receipts_that_contradict_the_plan_stop_the_run(receipts: list[Receipt], said: str) -> None:
    book = ReceiptBook()
    for receipt in receipts[:-1]:
        book.add(receipt)
    with pytest.raises(RuntimeError, match=said):
        book.add(receipts[-1])


def test_json_holds_the_whole_receipt() -> None:
    receipt = batch("generate", 7, 2)
    assert "\n" not in receipt_to_json(receipt)
    assert receipt_from_json(receipt_to_json(receipt).encode()) == receipt
    with pytest.raises(TypeError, match="colour"):
        receipt_from_json('{"stage": "plan", "window": 0, "batch": -1, "digest": "", "colour": 1}')
