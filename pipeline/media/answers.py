"""What a child says, checked before it is used: it may be the bytes that speak. All raise `BadMessage`."""

from __future__ import annotations

import math
import re
from typing import Any, get_args

from pipeline.media.channel import BadMessage
from pipeline.media.document import MOST_LETTERS, MOST_PAGES, is_clean
from pipeline.schema import Modality, Probe

_MOST = 2**62
_NAME = re.compile("[A-Za-z0-9_,.-]{1,100}")
_CODE = re.compile("[a-z_]{1,40}")
_MESSAGE_LETTERS = 500


def checked_probe(facts: dict[str, Any], request: dict[str, Any]) -> Probe:
    """Of a header; `request` is what it was asked with."""
    kinds: dict[str, type] = dict.fromkeys(Probe.__slots__, int)
    kinds.update(dict.fromkeys(("modality", "container", "codec"), str))
    kinds.update(dict.fromkeys(("duration_seconds", "rate_fps", "group_frames"), float))
    if facts.keys() != kinds.keys() or not all(type(facts[name]) is kind for name, kind in kinds.items()):
        raise BadMessage("facts of other names or kinds")
    numbers = [value for value in facts.values() if not isinstance(value, str)]
    if not all(math.isfinite(number) and 0 <= number < _MOST for number in numbers):
        raise BadMessage("numbers that cannot be")
    seen = ("sample_rate_hz", "num_channels") if facts["modality"] == "audio" else ("width", "height")
    if min(facts[name] for name in seen) < 1 or facts["num_bytes"] != request["num_bytes"]:
        raise BadMessage("a size that cannot be")
    names = facts["modality"], facts["container"], facts["codec"]
    if names[0] not in get_args(Modality) or not all(_NAME.fullmatch(name) for name in names):
        raise BadMessage("names that cannot be")
    return Probe(**facts)


def checked_count(count: Any) -> int:
    """Pages of a document."""
    if type(count) is not int or not 1 <= count <= MOST_PAGES:
        raise BadMessage("a number of pages that cannot be")
    return count


def checked_text(text: Any) -> str:
    """The text of a page."""
    if not isinstance(text, str) or len(text) > MOST_LETTERS or not is_clean(text):
        raise BadMessage("a text that cannot be")
    return text


def checked_times(times: list[Any], count: int) -> tuple[float, ...]:
    """Of frames."""
    if len(times) != count or not all(type(t) in (int, float) and math.isfinite(t) for t in times):
        raise BadMessage(f"{count} times were due, {len(times)} came, or not all are numbers")
    return tuple(map(float, times))


def checked_seconds(seconds: Any, most: float) -> float:
    """What an item took by its own word, as far as that can be."""
    is_time = isinstance(seconds, float) and 0 <= seconds <= most
    return seconds if is_time else most


def is_code(text: str) -> bool:
    """Whether it may name an error."""
    return _CODE.fullmatch(text) is not None


def printable(text: str) -> str:
    """Its beginning, without what does things to terminals."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:_MESSAGE_LETTERS])
