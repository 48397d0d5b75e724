"""Resizing that equals what torchvision, and so the models' own processors, would have made of the same pixels.

The kernel is torch's, and is called without `import torch`: in the library that torch has for the CPU, through the C
interface that it keeps stable for extensions (`torch/csrc/stable/c/shim.h`, `torch/csrc/inductor/aoti_torch/c/shim.h`).
Measured (torch 2.14 with CUDA): a process that decodes weighs 145 MB more for it, with `import torch` 660.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from importlib.metadata import version
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Resample = Literal["bicubic", "bilinear"]
# What `torch.nn.functional.interpolate` calls with antialias; take (self, size, align_corners, scales_h, scales_w, out)
# and return `out`.
_KERNELS: dict[Resample, bytes] = {
    "bicubic": b"aten::_upsample_bicubic2d_aa",
    "bilinear": b"aten::_upsample_bilinear2d_aa",
}
_CPU = 0
# The torch that the calls were written for, as extensions state it (2.10); later ones go on understanding them.
_WRITTEN_FOR = 2 << 56 | 10 << 48
# All return 0, or something else when torch raised.
_CALLS: dict[str, Sequence[Any]] = {
    "aoti_torch_create_tensor_from_blob": (
        *(c_void_p, c_int64, POINTER(c_int64), POINTER(c_int64)),  # data, dimensions, sizes, strides
        *(c_int64, c_int32, c_int32, c_int32, POINTER(c_void_p)),  # offset, dtype, device, its index, result
    ),
    "aoti_torch_delete_tensor_object": (c_void_p,),
    "torch_new_list_reserve_size": (c_size_t, POINTER(c_void_p)),
    "torch_list_push_back": (c_void_p, c_uint64),
    "torch_call_dispatcher": (c_char_p, c_char_p, POINTER(c_uint64), c_uint64),
}


@functools.cache
def resize_backend(resample: Resample = "bicubic") -> str:
    """What resizes, with its version: a term of every feature key."""
    return f"torch-uint8-{resample}-antialias/{version('torch').split('+')[0]}"


def resize_frames(
    pixels: npt.NDArray[np.uint8], size: tuple[int, int], resample: Resample = "bicubic"
) -> npt.NDArray[np.uint8]:
    """`uint8 (T, H, W, C)`, of 3 or 4 channels, at `size` = (height, width); `pixels` itself when it has that size.

    Bit-equal to `torchvision.transforms.v2.functional.resize(…, antialias=True)` on a uint8 CPU tensor, which calls the
    same uint8 kernel (`transforms/v2/functional/_geometry.py`, `resize_image`); channels-last skips its repacking.
    """
    if pixels.shape[1:3] == size:
        return pixels
    torch = _torch()
    frames = np.require(pixels, np.uint8, "C")
    resized = np.empty((len(frames), *size, frames.shape[3]), np.uint8)
    torch.run_kernel(_KERNELS[resample], torch.tensor(frames), torch.list(size), 0, 0, 0, torch.tensor(resized))
    return resized


def crop_frames(pixels: npt.NDArray[np.uint8], size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """The middle `size` = (height, width) of `uint8 (T, H, W, 3)`, as image processors crop; black where it is smaller.

    Equal to `center_crop` in transformers' `image_processing_backends.py`: odd remainders go to the right and bottom.
    """
    missing = [max(0, wanted - side) for wanted, side in zip(size, pixels.shape[1:3], strict=True)]
    margins = [(0, 0), *((gap // 2, (gap + 1) // 2) for gap in missing), (0, 0)]
    padded = np.pad(pixels, margins) if any(missing) else pixels
    top, left = ((side - wanted) // 2 for wanted, side in zip(size, padded.shape[1:3], strict=True))
    return np.ascontiguousarray(padded[:, top : top + size[0], left : left + size[1]])


@functools.cache
def _torch() -> _Torch:
    return _Torch()


class _Torch:
    """As much of torch as resizing takes. Its objects are addresses, which `run_kernel` takes over."""

    def __init__(self) -> None:
        package = importlib.util.find_spec("torch")
        assert package is not None and package.origin is not None
        self._library = ctypes.CDLL(os.path.join(os.path.dirname(package.origin), "lib", "libtorch_cpu.so"))
        for name, arguments in _CALLS.items():
            getattr(self._library, name).argtypes = arguments
        self._uint8: int = self._library.aoti_torch_dtype_uint8()

    def tensor(self, frames: npt.NDArray[np.uint8]) -> int:
        """`uint8 (T, H, W, C)` as (T, C, H, W), channels last, in the same memory; `frames` has to outlive it."""
        num_frames, height, width, channels = frames.shape
        sizes = (c_int64 * 4)(num_frames, channels, height, width)
        strides = (c_int64 * 4)(height * width * channels, 1, width * channels, channels)
        made = c_void_p()
        self._call(
            "aoti_torch_create_tensor_from_blob",
            *(frames.ctypes.data, 4, sizes, strides),
            *(0, self._uint8, _CPU, 0, byref(made)),
        )
        return _address(made)

    def list(self, numbers: Sequence[int]) -> int:
        """A list of integers."""
        made = c_void_p()
        self._call("torch_new_list_reserve_size", len(numbers), byref(made))
        for number in numbers:
            self._call("torch_list_push_back", made, number)
        return _address(made)

    def run_kernel(self, name: bytes, *arguments: int) -> None:
        """Call a kernel that writes to its last argument; 0 is False, and what is left out."""
        stack = (c_uint64 * len(arguments))(*arguments)
        self._call("torch_call_dispatcher", name, b"out", stack, _WRITTEN_FOR)
        self._call("aoti_torch_delete_tensor_object", stack[0])  # the result is on the stack, and ours to free

    def _call(self, name: str, *arguments: Any) -> None:
        if getattr(self._library, name)(*arguments):
            raise RuntimeError(f"torch refused {name}{arguments}; it has printed why")


def _address(made: c_void_p) -> int:
    assert made.value is not None
    return made.value
