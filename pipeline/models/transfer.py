"""Frames to the device that computes and features back, beside what it computes.

On CUDA both go through pinned memory and streams of their own, so that one batch arrives and another leaves while a
third is computed. On a CPU nothing moves.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pipeline.schema import Frames


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """Tensors on their way to the device; `copied` is recorded behind them, None where nothing is to be waited for."""

    tensors: list[torch.Tensor]
    copied: torch.cuda.Event | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """Tensors of the host, to be read once `arrived` has happened."""

    tensors: list[torch.Tensor]
    arrived: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Return when the tensors can be read; any thread may ask."""
        if self.arrived is not None:
            self.arrived.synchronize()


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A moment of what the device computes: on CUDA an event of the current stream, elsewhere the host's clock."""

    host_seconds: float
    event: torch.cuda.Event | None

    def seconds_until(self, later: Mark) -> float:
        """Seconds between two moments of one device; waits for the later one."""
        if self.event is None or later.event is None:
            return later.host_seconds - self.host_seconds
        later.event.synchronize()
        return float(self.event.elapsed_time(later.event)) / 1e3


class DeviceLink:
    """Copies between the host and one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        if self.is_cuda:
            self._inward = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._outward = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send_frames(self, items: Sequence[Frames]) -> Sent:
        """`uint8` (T, H, W, 3) of each item, sent as one copy. Returns before it has arrived."""
        if not self.is_cuda:
            return Sent(tensors=[frames_tensor(item) for item in items])
        pinned = torch.empty(sum(item.pixels.nbytes for item in items), dtype=torch.uint8, pin_memory=True)
        np.concatenate([item.pixels.reshape(-1) for item in items], out=pinned.numpy())
        sent = self.send([pinned])
        pieces = torch.split_with_sizes(sent.tensors[0], [item.pixels.nbytes for item in items])
        views = [piece.view(item.pixels.shape) for piece, item in zip(pieces, items, strict=True)]
        return Sent(tensors=views, copied=sent.copied)

    def send(self, tensors: Sequence[torch.Tensor]) -> Sent:
        """Tensors of the host as they are. Returns before they have arrived.

        Where the device has no room for them they stay, pinned, and follow when they are received.
        """
        if not self.is_cuda:
            return Sent(tensors=list(tensors))
        pinned = [tensor if tensor.is_pinned() else tensor.pin_memory() for tensor in tensors]
        try:
            with torch.cuda.stream(self._inward):
                moved = [tensor.to(self.device, non_blocking=True) for tensor in pinned]
                copied = self._inward.record_event()
        except torch.OutOfMemoryError:
            return Sent(tensors=pinned)
        return Sent(tensors=moved, copied=copied)

    def receive(self, sent: Sent) -> list[torch.Tensor]:
        """What was sent, for the current stream, which waits for it; the host does not."""
        if sent.copied is None:
            return [tensor.to(self.device) for tensor in sent.tensors]
        computing = torch.cuda.current_stream(self.device)
        computing.wait_event(sent.copied)
        for tensor in sent.tensors:
            tensor.record_stream(computing)  # or its memory would be given to the next batch that is sent
        return sent.tensors

    def mark(self) -> Mark:
        """This moment of the current stream, to which the host does not wait."""
        event = None
        if self.is_cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self.device))
        return Mark(host_seconds=time.perf_counter(), event=event)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Fetched:
        """Copies of what the current stream computes, on the host; neither the host nor that stream waits for them."""
        if not self.is_cuda:
            return Fetched(tensors=[tensor.detach().contiguous() for tensor in tensors])
        self._outward.wait_stream(torch.cuda.current_stream(self.device))
        found = []
        with torch.cuda.stream(self._outward):
            for tensor in tensors:
                tensor.record_stream(self._outward)
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                found.append(host.copy_(tensor.detach(), non_blocking=True))
        arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # who waits shall not spin
        arrived.record(self._outward)
        return Fetched(tensors=found, arrived=arrived)


def channels_first(frames: torch.Tensor) -> torch.Tensor:
    """(T, H, W, 3) as (T, 3, H, W), dense."""
    return frames.permute(0, 3, 1, 2).contiguous()


def frames_tensor(item: Frames) -> torch.Tensor:
    """`uint8` (T, H, W, 3) on the host; shares its memory where that may be written to."""
    # Blocks lie read-only in the object store, and torch warns of tensors that it might write to.
    return torch.from_numpy(item.pixels if item.pixels.flags.writeable else item.pixels.copy())
