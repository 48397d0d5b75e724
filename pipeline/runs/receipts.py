"""Receipts: who knows that something is finished. Collected once each, whatever is delivered twice."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from pipeline.schema import Receipt

PassName = Literal["encode", "generate", "pool"]

# A pass is planned by one receipt a window (batch -1, counts["batches"] = how many follow) and done by the others.
_PASS_OF_STAGE: dict[str, PassName] = {
    "plan": "encode",
    "encode": "encode",
    "prompt": "generate",
    "generate": "generate",
    "tokenize": "pool",
    "ready": "pool",
    "pool": "pool",
}
_PLANNING_STAGES = ("plan", "prompt", "tokenize", "ready")


def receipt_to_json(receipt: Receipt) -> str:
    """One line of JSON; `receipt_from_json` gives the receipt back."""
    return json.dumps(asdict(receipt), sort_keys=True)


def receipt_from_json(text: str | bytes) -> Receipt:
    """The receipt that `receipt_to_json` wrote. Raises `TypeError` for fields a receipt does not have."""
    values = json.loads(text)
    shard = values.pop("shard", "")  # of a version that put a batch into one shard
    values["shards"] = values.get("shards", [shard] if shard else [])
    return Receipt(**{**values, "shards": tuple(values["shards"])})


def sum_receipts(receipts: Iterable[Receipt]) -> Totals:
    """The totals of distinct receipts."""
    totals = Totals()
    for receipt in receipts:
        _accumulate(totals, receipt)
    return totals


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """Sums over distinct receipts; what a ledger entry holds of a window and a summary holds of a run."""

    counts: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    quarantine: dict[str, int] = field(default_factory=dict)
    cpu_seconds: dict[str, float] = field(default_factory=dict)
    accelerator_seconds: dict[str, float] = field(default_factory=dict)

    def to_entry(self) -> dict[str, Any]:
        """The totals as a ledger entry."""
        return asdict(self)

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any]) -> Totals:
        """The totals in a ledger entry, which may hold more, and less if an earlier version wrote it."""
        return cls(**{each.name: dict(entry.get(each.name, {})) for each in fields(cls)})


class ReceiptBook:
    """Adds each receipt once, and knows of every (pass, window) whether its receipts are all in.

    Receipts may arrive in any order and any number of times, the planning one too. Two receipts with different
    digests for one batch, or a batch outside the window's plan, raise `RuntimeError`: the plan was not followed.
    """

    def __init__(self) -> None:
        self._windows: dict[tuple[PassName, int], _Window] = {}
        self._totals = Totals()

    @property
    def counts(self) -> dict[str, int]:
        """Summed over every receipt so far, windows that an earlier start finished included."""
        return dict(self._totals.counts)

    @property
    def seconds(self) -> dict[str, float]:
        """As `counts`."""
        return dict(self._totals.seconds)

    @property
    def quarantine(self) -> dict[str, int]:
        """As `counts`: code → how many."""
        return dict(self._totals.quarantine)

    @property
    def cpu_seconds(self) -> dict[str, float]:
        """As `counts`, by stage."""
        return dict(self._totals.cpu_seconds)

    @property
    def accelerator_seconds(self) -> dict[str, float]:
        """As `counts`, by stage."""
        return dict(self._totals.accelerator_seconds)

    def add(self, receipt: Receipt) -> bool:
        """Take in a receipt; False when it was there already, or its window is settled."""
        window = self._windows.setdefault((_PASS_OF_STAGE[receipt.stage], receipt.window), _Window())
        if window.settled or not window.add(receipt):
            return False
        _accumulate(self._totals, receipt)
        return True

    def withdraw(self, pass_name: PassName, lost: Callable[[Receipt], bool]) -> list[Receipt]:
        """Take back and return the receipts that are `lost`, of windows that are not settled.

        Their batches count as never done, until receipts come of what is done in their place.
        """
        windows = [window for (name, _), window in self._windows.items() if name == pass_name]
        withdrawn = [receipt for window in windows for receipt in window.receipts.values() if lost(receipt)]
        for receipt in withdrawn:
            del self._windows[pass_name, receipt.window].receipts[receipt.batch]
            _accumulate(self._totals, receipt, sign=-1)
        return withdrawn

    def restore(self, pass_name: PassName, window: int, entry: Mapping[str, Any]) -> None:
        """Take over a window that an earlier start of the run finished, as its ledger entry has it."""
        if (pass_name, window) in self._windows:
            raise RuntimeError(f"{pass_name} window {window} is known already; restore the ledger before the pass")
        self._windows[pass_name, window] = _Window(settled=True)
        _accumulate(self._totals, Totals.from_entry(entry))

    def settle(self, pass_name: PassName, window: int) -> Totals:
        """The totals of a finished window, whose receipts are dropped: a driver sees millions of them.

        Raises `RuntimeError` when the window is not finished, or settled before.
        """
        known = self._windows.get((pass_name, window), _Window())
        if known.settled or not known.finished:
            state = "settled already" if known.settled else f"waiting: {len(known.receipts)} receipts are in"
            raise RuntimeError(f"{pass_name} window {window} cannot be settled, it is {state}")
        totals = sum_receipts(known.receipts.values())
        self._windows[pass_name, window] = _Window(settled=True)
        return totals

    def is_finished(self, pass_name: PassName, window: int) -> bool:
        """True when the window's planning receipt and all the batches it announced are in."""
        known = self._windows.get((pass_name, window))
        return known is not None and known.finished

    def finished_windows(self, pass_name: PassName) -> list[int]:
        """Windows of the pass that are finished, settled ones included, ascending."""
        return sorted(
            number for (name, number), window in self._windows.items() if name == pass_name and window.finished
        )

    def window_receipts(self, pass_name: PassName, window: int) -> list[Receipt]:
        """The receipts of a window that is not settled, by batch, the planning one first."""
        known = self._windows.get((pass_name, window), _Window())
        return [known.receipts[batch] for batch in sorted(known.receipts)]


def _accumulate(totals: Totals, more: Receipt | Totals, sign: int = 1) -> None:
    for name, count in more.counts.items():
        totals.counts[name] = totals.counts.get(name, 0) + sign * count
    for name, seconds in more.seconds.items():
        totals.seconds[name] = totals.seconds.get(name, 0.0) + sign * seconds
    for code, count in more.quarantine.items():
        totals.quarantine[code] = totals.quarantine.get(code, 0) + sign * count
    for sums, costs in (
        (totals.cpu_seconds, more.cpu_seconds),
        (totals.accelerator_seconds, more.accelerator_seconds),
    ):
        for stage, seconds in costs.items():
            sums[stage] = sums.get(stage, 0.0) + sign * seconds


@dataclass(kw_only=True, slots=True)
class _Window:
    receipts: dict[int, Receipt] = field(default_factory=dict)
    settled: bool = False

    @property
    def expected(self) -> int | None:
        """How many batches the plan announced; None before its receipt."""
        plan = self.receipts.get(-1)
        return None if plan is None else plan.counts["batches"]

    @property
    def finished(self) -> bool:
        return self.settled or len(self.receipts) - 1 == self.expected

    def add(self, receipt: Receipt) -> bool:
        where = f"{receipt.stage} window {receipt.window} batch {receipt.batch}"
        if (receipt.stage in _PLANNING_STAGES) != (receipt.batch == -1) or receipt.batch < -1:
            raise RuntimeError(f"{where}: planning receipts have batch -1, others 0 and up")
        known = self.receipts.get(receipt.batch)
        if known is not None:
            if known.identity != receipt.identity:
                raise RuntimeError(f"{where}: done twice to different plans, {known.digest} and {receipt.digest}")
            return False
        self.receipts[receipt.batch] = receipt
        if self.expected is not None and max(self.receipts) >= self.expected:
            raise RuntimeError(f"{where}: the plan has {self.expected} batches, but {max(self.receipts)} has a receipt")
        return True
