"""Every error headrace raises on purpose, as a tree.

    HeadraceError
    ├── ConfigError             the configuration or its input is refused               exit 2
    │   ├── ManifestError       a manifest row, column or id is wrong
    │   └── UnschedulableError  the cluster can never run what the configuration asks for
    ├── RunLockedError          another process holds the run                           exit 4
    ├── QuarantineLimitError    more items were quarantined than the limit allows       exit 3
    ├── InterruptedRunError     stopped by a signal, resumable                          exit 5
    ├── TransientError          throttling, resets: retried where I/O happens
    ├── UnavailableShardError   a shard cannot be had now: what it holds is made again
    └── ItemError               one item is at fault: quarantined, the run goes on

Anything else that is raised stops the run (exit 1), which can be resumed.
"""

from __future__ import annotations

from typing import ClassVar


class HeadraceError(Exception):
    """Base of everything below; `exit_code` is what the process ends with when it reaches the command."""

    exit_code: ClassVar[int] = 1


class ConfigError(HeadraceError):
    """The configuration, or the input it names, is refused before any work starts."""

    exit_code = 2


class ManifestError(ConfigError):
    """A manifest row, column or id is wrong; the message names file, row and column."""


class UnschedulableError(ConfigError):
    """What the stages reserve can never fit the cluster; the message says what to change."""


class RunLockedError(HeadraceError):
    """Another process holds the run's lock; the message names the holder."""

    exit_code = 4


class QuarantineLimitError(HeadraceError):
    """The run finished, but quarantined a larger share of its items than `max_quarantined_fraction`."""

    exit_code = 3


class InterruptedRunError(HeadraceError):
    """The run was stopped by a signal after its state was put away; starting it again resumes it."""

    exit_code = 5


class TransientError(HeadraceError):
    """The outside failed in a way that may pass (throttling, a reset, a timeout).

    `after_seconds` is when it asks to be tried again, 0 when it does not say.
    """

    def __init__(self, message: str, after_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.after_seconds = after_seconds

    def __reduce__(self) -> tuple[type[TransientError], tuple[str, float]]:
        return type(self), (str(self), self.after_seconds)


class UnavailableShardError(HeadraceError):
    """A sealed shard cannot be had now, for the given `reason`: what it holds counts as not stored."""

    def __init__(self, shard_id: str, reason: str) -> None:
        super().__init__(f"shard {shard_id} cannot be had: {reason}")
        self.shard_id = shard_id
        self.reason = reason

    def __reduce__(self) -> tuple[type[UnavailableShardError], tuple[str, str]]:
        return type(self), (self.shard_id, self.reason)


class ItemError(HeadraceError):
    """One item cannot be processed. `stage` says where, `code` is stable and countable, `message` is for people."""

    def __init__(self, stage: str, code: str, message: str) -> None:
        super().__init__(f"{stage}: {code}: {message}")
        self.stage = stage
        self.code = code
        self.message = message

    def __reduce__(self) -> tuple[type[ItemError], tuple[str, str, str]]:
        return type(self), (self.stage, self.code, self.message)
