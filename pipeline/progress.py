"""A bar for each pass, on terminals only."""

from __future__ import annotations

import sys
from types import TracebackType

from tqdm import tqdm

from pipeline.runs.receipts import PassName
from pipeline.schema import Receipt


class PassBar:
    """Media (encode) or requests (generate) done, at what rate, how many reused and quarantined, and how long to go."""

    def __init__(self, name: PassName, *, shown: bool) -> None:
        hidden = not (shown and sys.stderr.isatty())
        self._bar = tqdm(total=0, desc=name, unit="item", disable=hidden, dynamic_ncols=True)
        self._stored = self._reused = self._quarantined = 0

    def __enter__(self) -> PassBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def update(self, receipt: Receipt) -> None:
        """Take in one receipt: a planning one raises the total, the others what is done."""
        if receipt.batch == -1:
            self._bar.total = (self._bar.total or 0) + receipt.counts.get("items", 0)
        reused = receipt.counts.get("features_reused", 0)
        quarantined = sum(receipt.quarantine.values())
        stored = receipt.counts.get("encodes", 0) + receipt.counts.get("answers", 0)
        self._stored += stored
        self._reused += reused
        self._quarantined += quarantined
        self._bar.set_postfix(stored=self._stored, reused=self._reused, quarantined=self._quarantined, refresh=False)
        self._bar.update(stored + reused + quarantined)
