"""What a failure of storage means, and the one loop that tries again. Whose fault it is, the callers know."""

from __future__ import annotations

import functools
import importlib
import io
import logging
import random
import time
from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import Any, TypeVar

from pipeline.errors import TransientError

_log = logging.getLogger(__name__)
_ATTEMPTS = 5
_BASE_SECONDS = 0.2
_CAP_SECONDS = 5.0
_CAP_AFTER_SECONDS = 30.0  # of what an answer asks for

_BAD_CREDENTIALS = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "TokenRetrievalError",
    "UnauthorizedSSOTokenError",
    "ProfileNotFound",
    "DefaultCredentialsError",
    "RefreshError",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "RequestTimeTooSkewed",
    "ExpiredToken",
    "InvalidToken",
}
_THROTTLED = {
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "RequestLimitExceeded",
    "TooManyRequests",
    "RequestTimeout",
}
# ConditionalRequestConflict: two conditional writes met. ResponseParserError: a balancer's page where XML should be.
_CUT_OFF = {
    "EndpointConnectionError",
    "ConnectionClosedError",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "HTTPClientError",
    "ResponseStreamingError",
    "ResponseParserError",
    "IncompleteReadError",
    "IncompleteBody",
    "ConditionalRequestConflict",
    "ClientConnectionError",
    "ClientPayloadError",
    "ServerDisconnectedError",
}
# The object is not the one that was looked at: a range is asked for only where there was one.
_OTHER_VERSION = {"PreconditionFailed", "412", "FileExpired", "InvalidRange", "416"}
# What the clients of object stores and vector stores raise besides OSError; imported with the scheme, for it takes a
# quarter of a second. LanceDB has no classes of its own for what its storage says.
_CLIENT_ERRORS = {
    "s3": (
        "botocore.exceptions:BotoCoreError",
        "botocore.exceptions:ClientError",
        "botocore.parsers:ResponseParserError",
        "aiohttp:ClientError",
    ),
    "gs": ("gcsfs.retry:HttpError", "google.auth.exceptions:GoogleAuthError", "aiohttp:ClientError"),
    "lancedb": ("builtins:RuntimeError", "builtins:ValueError"),
    "postgresql": ("psycopg:Error",),
    "qdrant": ("qdrant_client.http.exceptions:ApiException", "builtins:RuntimeError"),
}

Result = TypeVar("Result")


class Fault(Enum):
    """What a storage error says."""

    CREDENTIALS = auto()
    NO_BUCKET = auto()
    ABSENT = auto()
    EXISTS = auto()
    NOT_A_FILE = auto()
    DENIED = auto()
    PASSING = auto()
    UNKNOWN = auto()


def retry(
    call: Callable[[], Result],
    *,
    scheme: str,
    meaning: Callable[[Exception], Exception],
    sleep: Callable[[float], None] = time.sleep,
    again: Callable[[], None] = lambda: None,
) -> Result:
    """`call()`, tried up to 5 times with exponential back-off and full jitter (at most 0.2, 0.4, 0.8, 1.6 s).

    `meaning` says what an error of `scheme`'s storage is to be raised as; only what it makes a `TransientError` is
    tried again, at the earliest when that says, or after 30 s; `again` is told each time. Other errors pass.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return call()
        except _failures(scheme) as error:
            meant = meaning(error)
            if meant is error:
                raise
            if not isinstance(meant, TransientError) or attempt == _ATTEMPTS:
                raise meant from error
            _log.info("attempt %d of %d: %s", attempt, _ATTEMPTS, meant, extra={"attempt": attempt})
            again()
        pause = random.uniform(0, min(_CAP_SECONDS, _BASE_SECONDS * 2 ** (attempt - 1)))
        sleep(min(meant.after_seconds, _CAP_AFTER_SECONDS) + pause)
    raise AssertionError("unreachable: the last attempt returns or raises")


def with_reason(call: Callable[[], Result], look: Callable[[], object]) -> Result:
    """`call()`; when it is denied, `look()` first, a read that is denied with the reason.

    The answer to a HEAD request has no body: only a read tells wrong credentials from a denied object.
    """
    try:
        return call()
    except PermissionError:
        look()
        raise


def judge(error: Exception) -> Fault:
    """What the error says, by its class, its causes and the service's own code."""
    causes = list(_causes(error))
    codes = {code for cause in causes for code in _service_codes(cause)}
    names = {type(cause).__name__ for cause in causes} | codes
    if names & _BAD_CREDENTIALS:
        return Fault.CREDENTIALS
    if "NoSuchBucket" in codes:
        return Fault.NO_BUCKET
    if isinstance(error, FileExistsError) or names & _OTHER_VERSION:
        return Fault.EXISTS
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return Fault.ABSENT
    if isinstance(error, IsADirectoryError):
        return Fault.NOT_A_FILE
    if isinstance(error, PermissionError):
        return Fault.DENIED
    if codes & _THROTTLED or any(code == "429" or (len(code) == 3 and code[0] == "5") for code in codes - {"501"}):
        return Fault.PASSING
    if any(isinstance(cause, ConnectionError | TimeoutError) for cause in causes) or names & _CUT_OFF:
        return Fault.PASSING
    return Fault.UNKNOWN


def explain(error: Exception) -> str:
    """The innermost cause, for people."""
    cause = list(_causes(error))[-1]
    return f"{type(cause).__name__}: {cause}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _service_codes(error: BaseException) -> Iterator[str]:
    """Error codes in the answer of S3 (botocore's `response`) and of Google (`code` or `status`)."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        yield str(response.get("Error", {}).get("Code", ""))
        yield str(response.get("ResponseMetadata", {}).get("HTTPStatusCode", ""))
    for name in ("code", "status"):
        yield str(getattr(error, name, ""))


@functools.cache
def _failures(scheme: str) -> tuple[type[Exception], ...]:
    """Every error class with which storage of `scheme` can fail for reasons outside this program."""
    named = (name.split(":") for name in _CLIENT_ERRORS.get(scheme, ()))
    return (OSError, *(getattr(importlib.import_module(module), name) for module, name in named))


class RetryingFile(io.RawIOBase):
    """A seekable, readable file over another, each of whose reads goes through `attempt` from where it began."""

    def __init__(self, file: Any, attempt: Callable[[Callable[[], bytes]], bytes]) -> None:
        super().__init__()
        self._file = file
        self._attempt = attempt

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return int(self._file.tell())

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._file.seek(offset, whence))

    def read(self, size: int | None = -1) -> bytes:
        start = self._file.tell()
        return self._attempt(lambda: self._read_at(start, -1 if size is None else size))

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()

    def _read_at(self, start: int, size: int) -> bytes:
        self._file.seek(start)
        return bytes(self._file.read(size))
