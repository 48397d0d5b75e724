"""Logs as lines of JSON, each with the ids of what it is about."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["text", "json"]
_ROOT = logging.getLogger("pipeline")
_KNOWN = logging.LogRecord("", 0, "", 0, "", (), None).__dict__.keys() | {"message", "asctime"}
_ids: ContextVar[dict[str, Any]] = ContextVar("headrace_log_ids")


@contextmanager
def log_ids(**ids: Any) -> Iterator[None]:
    """What is logged in the block, by this thread, has these fields, besides those of blocks around it."""
    token = _ids.set({**_ids.get({}), **ids})
    try:
        yield
    finally:
        _ids.reset(token)


def start_logs(format: LogFormat) -> None:
    """Have this process log what headrace says as `format` asks for; may be called again.

    `json`: everything from INFO on, to standard error. `text` leaves logging as it is: warnings alone, unless the
    program around a run wants more.
    """
    if format == "json" and not any(isinstance(handler.formatter, JsonLines) for handler in _ROOT.handlers):
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(JsonLines())
        _ROOT.addHandler(handler)
        _ROOT.setLevel(logging.INFO)
        _ROOT.propagate = False


class JsonLines(logging.Formatter):
    """A record as one line: `time` (UTC), `level`, `logger`, `message`, ids, and what the record was given besides."""

    def format(self, record: logging.LogRecord) -> str:
        """One JSON object, without a line break in it."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_ids.get({}),
            **{name: value for name, value in record.__dict__.items() if name not in _KNOWN},
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
