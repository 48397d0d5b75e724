"""Whether items of a family may go through its processor and tower together: tried on a pair, not assumed.

Families whose frames reach the processor in their original size differ in what their processors pad, what their
towers return, and in whether they take items of different shapes at all.
"""

from __future__ import annotations

import logging

import numpy as np
import torch

from pipeline.errors import ItemError
from pipeline.models.features import CannotSplitError
from pipeline.models.vision_encoder import EncodedItem, Together, VisionEncoder
from pipeline.schema import Frames, Geometry, Modality, Probe, SamplePlan

_log = logging.getLogger(__name__)
# (frames, height, width) of a pair: tiles differ in number where a family cuts tiles.
_PAIRS: dict[Together, dict[Modality, tuple[tuple[int, int, int], ...]]] = {
    "any": {"image": ((1, 64, 64), (1, 64, 128)), "video": ((2, 64, 64), (4, 64, 128))},
    "one_shape": {"image": ((1, 64, 128), (1, 64, 128)), "video": ((4, 64, 128), (4, 64, 128))},
}
# Of the largest feature. On CUDA kernels are chosen by shape and convolutions use TF32: a bound for sums in another
# order, not measured; features of another item are off by their own size.
_TOLERANCES = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
_CUDA_FLOAT32_TOLERANCE = 1e-3


def check_pairs(encoder: VisionEncoder, *, raw: bool | None = None) -> None:
    """Set `encoder.together` for each modality without a rule, by what a pair of noise gives together and alone.

    What does not come out equal, in features, inputs and placeholders, stays one by one. Where the pair also comes out
    when its pixels are normalised on the device, they are (`encoder.raw`); that is tried with `raw`, by default on all
    devices but a CPU.
    """
    for modality in encoder.facts.modalities:
        if modality not in encoder.facts.rules:
            _check_modality(encoder, modality, raw=encoder.device.type != "cpu" if raw is None else raw)


def _check_modality(encoder: VisionEncoder, modality: Modality, *, raw: bool) -> None:
    for together, pairs in _PAIRS.items():
        items = [_noise(k, *size) for k, size in enumerate(pairs[modality])]
        difference = _attempt(encoder, modality, items, together, raw=False)
        if difference:
            _log.info("%s: %ss are not encoded together (%s): %s", encoder.facts.model, modality, together, difference)
            continue
        difference = _attempt(encoder, modality, items, together, raw=True) if raw else ""
        if difference:
            _log.info("%s: %ss are normalised on the host: %s", encoder.facts.model, modality, difference)
            _set(encoder, modality, together, raw=False)
        return


def _attempt(encoder: VisionEncoder, modality: Modality, items: list[Frames], together: Together, *, raw: bool) -> str:
    """Why `items` are not encoded alike together; "" when they are, and the encoder is set to do so."""
    _set(encoder, modality, None, raw=False)
    try:
        geometries = [_geometry(encoder, modality, item) for item in items]
        alone = encoder.encode(modality, items, geometries, {})
        _set(encoder, modality, together, raw=raw)
        difference = _difference(alone, encoder.encode(modality, items, geometries, {}), encoder.device)
    except torch.OutOfMemoryError:
        raise  # says something of the device, nothing of the family
    except (
        ItemError,
        CannotSplitError,
        RuntimeError,
        ValueError,
        TypeError,
        IndexError,
        KeyError,
        AttributeError,
    ) as error:
        difference = f"{type(error).__name__}: {error}"
    if difference:
        _set(encoder, modality, None, raw=False)
    return difference


def _set(encoder: VisionEncoder, modality: Modality, together: Together | None, *, raw: bool) -> None:
    encoder.together.pop(modality, None)
    encoder.raw.discard(modality)
    if together is not None:
        encoder.together[modality] = together
        if raw:
            encoder.raw.add(modality)


def _difference(alone: list[EncodedItem], together: list[EncodedItem], device: torch.device) -> str:
    for one, other in zip(alone, together, strict=True):
        if (one.slot, one.container, one.placeholder) != (other.slot, other.container, other.placeholder):
            return "another container or placeholder"
        if one.tensors.keys() != other.tensors.keys() or one.inputs.keys() != other.inputs.keys():
            return "other tensors"
        if not all(torch.equal(value, other.inputs[name]) for name, value in one.inputs.items()):
            return "other inputs of the language model"
        if not all(_close(value, other.tensors[name], device) for name, value in one.tensors.items()):
            return "other features"
    return ""


def _close(one: torch.Tensor, other: torch.Tensor, device: torch.device) -> bool:
    tolerance = _TOLERANCES[one.dtype]
    if device.type == "cuda" and one.dtype == torch.float32:
        tolerance = _CUDA_FLOAT32_TOLERANCE
    bound = tolerance * float(one.abs().max())
    return one.shape == other.shape and torch.allclose(one.float(), other.float(), rtol=0, atol=bound)


def _noise(seed: int, num_frames: int, height: int, width: int) -> Frames:
    pixels = np.random.default_rng(seed).integers(0, 256, (num_frames, height, width, 3), dtype=np.uint8)
    return Frames(pixels=pixels, pts_seconds=tuple(0.5 * k for k in range(num_frames)))


def _geometry(encoder: VisionEncoder, modality: Modality, item: Frames) -> Geometry:
    num_frames, height, width, _ = item.pixels.shape
    probe = Probe(
        modality=modality,
        container="",
        codec="",
        width=width,
        height=height,
        num_bytes=0,
        duration_seconds=0.5 * num_frames if modality == "video" else 0.0,
    )
    return encoder.facts.geometry(probe, SamplePlan(pts_seconds=item.pts_seconds))
