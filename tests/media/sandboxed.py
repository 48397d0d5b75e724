"""Sandboxes for tests: with a child that follows orders, and what is seen of it from outside."""

from __future__ import annotations

import io
import os
from dataclasses import replace

from pipeline.errors import ItemError
from pipeline.media.probe import probe_media
from pipeline.media.sandbox import Sandbox
from pipeline.media.undecoded import Undecoded
from pipeline.schema import Frames, SamplePlan
from tests.media.hostile_child import MARK
from tests.media.media_files import make_image

SIZE = (28, 56)


def open_hostile(*, item_seconds: float = 20.0, filtered: bool = True) -> Sandbox:
    """A sandbox whose child follows the orders of `order`."""
    name = "hostile_child" if filtered else "unfiltered_child"
    return Sandbox(item_seconds=item_seconds, module=f"tests.media.{name}")


def order(text: str) -> bytes:
    """A JPEG that has the child do something else."""
    return ordering(make_image("JPEG"), text)


def ordering(data: bytes, text: str) -> bytes:
    """The same file, which has the child do something else."""
    return data + MARK + text.encode()


def decode(sandbox: Sandbox, data: bytes, *times: float) -> Frames:
    """The frames at those times, at `SIZE`."""
    probe = probe_media(io.BytesIO(data), num_bytes=len(data), declared=None, name="item", page=0)
    plan = SamplePlan(pts_seconds=times or (0.0,))
    return frames(sandbox, Undecoded(data=data, probe=probe, plan=plan, size=SIZE, page=0))


def frames(sandbox: Sandbox, item: Undecoded) -> Frames:
    """Of one item; raises why there are none."""
    [outcome] = sandbox.decode([item])
    if isinstance(outcome.result, ItemError):
        raise outcome.result
    return replace(outcome.result, pixels=outcome.result.pixels.copy())


def child_pid(sandbox: Sandbox) -> int:
    """The process that decodes."""
    assert sandbox._child is not None
    return sandbox._child._process.pid


def is_alive(pid: int) -> bool:
    """False once it is gone, or waits for nothing but being looked at."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def open_fds(pid: int | str = "self") -> int:
    """How many descriptors a process has."""
    return len(os.listdir(f"/proc/{pid}/fd"))
