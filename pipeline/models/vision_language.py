"""What planning needs to know of a vision-language checkpoint: its processor and configuration, without weights."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from transformers import AutoConfig, AutoProcessor
from transformers.video_utils import VideoMetadata

from pipeline.errors import ConfigError, ItemError
from pipeline.features.identity import canonical_json
from pipeline.language.kv_cache import KvCache
from pipeline.language.placeholder import collapse
from pipeline.media.sampling import indices_plan
from pipeline.models.kv_layers import read_kv_cache
from pipeline.models.location import resolve_model
from pipeline.models.own_size import possible_rules
from pipeline.models.processing import ProcessedItem, process_item
from pipeline.planning.geometry import (
    FramePatchRule,
    OwnSizeRule,
    PatchRule,
    own_size_geometry,
    probed_geometry,
    rule_geometry,
)
from pipeline.planning.tiling import Grid
from pipeline.schema import Geometry, Modality, Placeholder, Probe, SamplePlan

_NOT_FOR_SAMPLING = {"input_data_format", "do_convert_rgb", "do_sample_frames", "device", "video_metadata"}
# Small, large, odd, upright, wide; two, three and many frames. (frames, height, width)
_CHECKED_SIZES: dict[Modality, tuple[tuple[int, int, int], ...]] = {
    "image": ((1, 61, 83), (1, 480, 640), (1, 1999, 1201), (1, 300, 2400)),
    "video": ((2, 61, 83), (3, 480, 640), (8, 721, 1283), (20, 1280, 720)),
}
# Besides, of frames in their own size: photographs, screens, strips, squares, and next to nothing.
_CHECKED_OWN_SIZES: dict[Modality, tuple[tuple[int, int, int], ...]] = {
    "image": tuple(
        (1, height, width)
        for height, width in ((3024, 4032), (1920, 1080), (2400, 300), (96, 1000), (900, 900), (337, 336), (20, 33))
    ),
    "video": ((5, 1080, 1920), (64, 96, 300), (240, 480, 640)),
}
# What a processor raises for a size that it cannot take; of what it cannot do at all it may raise more.
_REFUSALS = (RuntimeError, ValueError, TypeError, IndexError, ArithmeticError)
_MAX_LEARNT = 4096


def resolve_device(device: str) -> str:
    """`auto` is CUDA where there is a device, else the CPU."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


@dataclass(frozen=True, kw_only=True)
class VisionLanguageFacts:
    """Processor and configuration of a checkpoint; loads no weights."""

    model: str
    processor: Any
    config: Any
    _learnt: dict[tuple[Modality, int, int, int], ProcessedItem] = field(default_factory=dict, repr=False)

    @classmethod
    def load(cls, model: str) -> VisionLanguageFacts:
        """Raises `ConfigError` when the checkpoint cannot be read or its processor takes no images."""
        path = resolve_model(model)
        try:
            processor: Any = AutoProcessor.from_pretrained(path)  # type: ignore[no-untyped-call]
            config = AutoConfig.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model {model!r} cannot be loaded: {error}") from error
        facts = cls(model=model, processor=processor, config=config)
        if "image" not in facts.modalities:
            raise ConfigError(f"model {model!r}: {type(processor).__name__} has no placeholder for images")
        return facts

    @cached_property
    def modalities(self) -> tuple[Modality, ...]:
        """What the processor takes."""
        kinds: tuple[Modality, ...] = ("image", "video")
        return tuple(
            kind
            for kind in kinds
            if getattr(self.processor, f"{kind}_token", None) is not None
            and getattr(self.processor, f"{kind}_processor", None) is not None
        )

    @cached_property
    def media_token_ids(self) -> tuple[int, ...]:
        """The token ids that features are put in the place of."""
        names = ("image_token_id", "video_token_id", "image_token_index", "video_token_index")
        ids = {getattr(self.config, name, None) for name in names}
        return tuple(sorted(token_id for token_id in ids if token_id is not None))

    @cached_property
    def media_tokens(self) -> tuple[str, ...]:
        """`media_token_ids` as text."""
        return tuple(self.processor.tokenizer.convert_ids_to_tokens(list(self.media_token_ids)))

    @cached_property
    def token_types(self) -> str | None:
        """The name under which the model is told which tokens are media, if it is."""
        return self.learn("image", 1, 64, 64).token_types

    @cached_property
    def rules(self) -> dict[Modality, PatchRule]:
        """Modalities whose patch grids follow from sizes by known arithmetic: their frames are resized when decoded.

        The arithmetic is believed only where the processor, run on blanks, does the same. All other modalities reach
        the processor in their original size.
        """
        rules: dict[Modality, PatchRule] = {}
        for modality in self.modalities:
            rule = _patch_rule(getattr(self.processor, f"{modality}_processor"))
            if rule is not None and all(self._agrees(rule, modality, *size) for size in _CHECKED_SIZES[modality]):
                rules[modality] = rule
        return rules

    def _agrees(self, rule: PatchRule, modality: Modality, num_frames: int, height: int, width: int) -> bool:
        geometry = rule_geometry(rule, modality, num_frames, height, width)
        times = tuple(float(k) for k in range(num_frames))
        item = self.learn(modality, num_frames, height, width)
        grid = item.inputs.get(f"{modality}_grid_thw")
        return (
            item.slot == modality
            and item.inputs.keys() == {f"{modality}_grid_thw"}
            and grid is not None
            and tuple(grid[0].tolist()) == geometry.grid
            and item.placeholder == self.placeholder(modality, replace(geometry, timestamps=times))
        )

    @cached_property
    def own_size_rules(self) -> dict[Modality, OwnSizeRule]:
        """Of modalities that are not in `rules`, those whose features can be counted by known arithmetic all the same.

        As there, the arithmetic is believed only where the processor, run on blanks, does the same.
        """
        found: dict[Modality, OwnSizeRule] = {}
        for modality in self.modalities:
            if modality not in self.rules:
                try:
                    rule = self._own_size_rule(modality)
                except (*_REFUSALS, KeyError, AttributeError):
                    continue  # the check of the whole model says what is wrong with it
                if rule is not None:
                    found[modality] = rule
        return found

    def _own_size_rule(self, modality: Modality) -> OwnSizeRule | None:
        def learn(num_frames: int, height: int, width: int) -> tuple[Grid, int]:
            item = self.learn(modality, num_frames, height, width)
            return self._grid(item), item.placeholder.num_tokens

        checked = _CHECKED_SIZES[modality] + _CHECKED_OWN_SIZES[modality]
        for rule in possible_rules(self.processor, modality, learn):
            if all(_counts(rule, *size) == learn(*size) for size in checked):
                return rule
        return None

    def learn(self, modality: Modality, num_frames: int, height: int, width: int) -> ProcessedItem:
        """What the processor makes of a blank of that size, a frame a second; remembered."""
        size = (modality, num_frames, height, width)
        if size not in self._learnt:
            if len(self._learnt) >= _MAX_LEARNT:
                self._learnt.clear()  # sizes repeat within a corpus, and a corpus may have millions of them
            self._learnt[size] = self._process_blank(modality, num_frames, height, width)
        return self._learnt[size]

    def _process_blank(self, modality: Modality, num_frames: int, height: int, width: int) -> ProcessedItem:
        times = [float(k) for k in range(num_frames)]

        def process(device: str) -> ProcessedItem:
            blank = torch.zeros(num_frames, 3, height, width, dtype=torch.uint8, device=device)
            return process_item(self.processor, self.media_tokens, modality, blank, times, float(num_frames))

        try:
            # A meta tensor has a shape and no pixels: the processor does its arithmetic and nothing else.
            return process("meta")
        except NotImplementedError:  # of one that asks for pixels to know their shape, as LLaVA's does
            return process("cpu")

    def check_sampling(self) -> None:
        """Raise `ConfigError` when the model's video processor does not choose frames by itself."""
        video = self.processor.video_processor if "video" in self.modalities else None
        if video is None or not video.do_sample_frames:
            raise ConfigError(
                f"model {self.model!r}: its processor does not choose frames of videos (do_sample_frames); set "
                "sampling.policy to fps or uniform"
            )

    def sample(self, probe: Probe) -> SamplePlan:
        """The frames that the model's video processor takes, by the header's count and rate.

        Raises `ItemError` (stage `plan`) `no_frame_sampled` for a video that it refuses, such as one without a rate.
        """
        video = self.processor.video_processor
        metadata = VideoMetadata(
            total_num_frames=probe.num_frames,
            fps=probe.rate_fps or None,
            width=probe.width,
            height=probe.height,
            duration=probe.duration_seconds,
        )
        # As `BaseVideoProcessor.preprocess` hands them on (transformers, `video_processing_utils.py`).
        names = video.valid_kwargs.__annotations__.keys() - _NOT_FOR_SAMPLING
        try:
            if not probe.rate_fps:
                raise ValueError("its header gives no rate")
            indices = video.sample_frames(metadata=metadata, **{name: getattr(video, name, None) for name in names})
        except ValueError as error:
            raise ItemError("plan", "no_frame_sampled", f"the model's processor takes no frame: {error}") from error
        return indices_plan(probe, [int(index) for index in indices])

    def geometry(self, probe: Probe, plan: SamplePlan) -> Geometry:
        """Where the item's features will lie. Raises `ItemError` for what the processor refuses."""
        modality, num_frames, height, width = probe.modality, len(plan), probe.height, probe.width
        if modality in self.rules:
            return probed_geometry(self.rules[modality], probe, num_frames)
        if modality in self.own_size_rules:
            return own_size_geometry(self.own_size_rules[modality], probe, num_frames)
        try:
            item = self.learn(modality, num_frames, height, width)
        except _REFUSALS as error:
            raise ItemError("plan", "size_not_supported", f"{num_frames} x {height} x {width}: {error}") from error
        return Geometry(
            grid=self._grid(item),
            merge_size=1,
            feature_length=item.placeholder.num_tokens,
            original_size=(height, width),
            resized_size=(height, width),
            duration_seconds=probe.duration_seconds,
        )

    def _grid(self, item: ProcessedItem) -> Grid:
        """Patches of what the tower is handed: those that the processor counted, or tiles by their own size."""
        for name, value in item.inputs.items():
            if name.endswith("_grid_thw"):
                t, h, w = value[0].tolist()
                return int(t), int(h), int(w)
        pixels = next(value for name, value in item.pixels.items() if name.startswith("pixel_values"))
        *_, channels, height, width = pixels.shape
        patch = getattr(self.config.vision_config, "patch_size", 14)
        side = patch if isinstance(patch, int) else patch[0]
        # Towers cut patches by a convolution without padding: what is left over is not seen (384 pixels by 14: 27).
        return pixels.numel() // (channels * height * width), height // side, width // side

    @cached_property
    def processor_digest(self) -> str:
        """Digest over everything the pixel processors are configured with, and the library that resizes for them."""
        parts = {"class": type(self.processor).__name__}
        for modality in self.modalities:
            parts[modality] = getattr(self.processor, f"{modality}_processor").to_json_string()
            if modality not in self.rules:
                parts[f"{modality}_resize"] = f"torchvision-{importlib.metadata.version('torchvision')}"
        return hashlib.sha256(canonical_json(parts)).hexdigest()[:16]

    @cached_property
    def placeholder_digest(self) -> str:
        """Digest over the token ids of fixed placeholders: another layout or vocabulary gives another digest."""
        ids = {}
        for modality in self.modalities:
            placeholder = self.learn(modality, 1 if modality == "image" else 4, 64, 64).placeholder
            tokens = self.processor.tokenizer(placeholder.text, add_special_tokens=False)["input_ids"]
            ids[modality] = [tokens, placeholder.runs]
        return hashlib.sha256(canonical_json(ids)).hexdigest()[:16]

    def placeholder(self, modality: Modality, geometry: Geometry) -> Placeholder:
        """What stands for an item that was planned by rule, its times shown as the model's processor writes them."""
        grid = torch.tensor([geometry.grid])
        if modality == "image":
            return collapse(self.processor.replace_image_token({"image_grid_thw": grid}, 0), self.media_tokens)
        # Times as indices at one frame a second, so that the true presentation times reach the prompt.
        times: Sequence[Any] = list(geometry.timestamps)
        metadata = VideoMetadata(total_num_frames=len(times), fps=1.0, frames_indices=list(times))
        inputs = {"video_grid_thw": grid, "video_metadata": [metadata]}
        return collapse(self.processor.replace_video_token(inputs, 0), self.media_tokens)

    def kv_cache(self, dtype: str) -> KvCache:
        """What the language model keeps of a request."""
        return read_kv_cache(self.config, dtype)


def _counts(rule: OwnSizeRule, num_frames: int, height: int, width: int) -> tuple[Grid, int]:
    if isinstance(rule, FramePatchRule):
        geometry = rule.geometry(num_frames, height, width)
        return geometry.grid, geometry.feature_length
    return rule.counts(num_frames, height, width)


def _patch_rule(processor: Any) -> PatchRule | None:
    """The rule that a dynamic-resolution processor (Qwen-VL style) states; None for any other kind."""
    needed = ("patch_size", "merge_size", "temporal_patch_size")
    if any(getattr(processor, name, None) is None for name in needed):
        return None
    capped = getattr(processor, "cap_pixels_per_frame", None)
    return PatchRule(
        patch_size=processor.patch_size,
        merge_size=processor.merge_size,
        temporal_patch_size=processor.temporal_patch_size,
        min_pixels=processor.size["shortest_edge"],
        max_pixels=processor.size["longest_edge"],
        max_tokens_per_frame=processor.max_video_tokens if capped else None,
    )
