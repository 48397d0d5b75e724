"""Vision-language models of transformers, run as two halves that meet in the feature store.

`VisionEncoder` holds tower and projector and turns frames into feature records; `LanguageModel` holds the language
model and turns token ids and those records into tokens. `VisionLanguageFacts` is what planning needs, without weights.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoProcessor, BatchFeature
from transformers.utils.generic import ModelOutput
from transformers.video_utils import VideoMetadata

from pipeline.errors import ConfigError, ItemError
from pipeline.features.codec import FeatureRecord, TensorView
from pipeline.features.identity import canonical_json
from pipeline.language.sampling import SeededSampler, StepClock
from pipeline.models.halves import load_half
from pipeline.models.processor_check import check_processor
from pipeline.planning.geometry import PatchRule, image_geometry, video_geometry
from pipeline.schema import Frames, Geometry, Modality, Probe, SamplePlan

DEMO_PREFIX = "demo:"
_NUM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def resolve_model(model: str) -> str:
    """A folder or hub name; `demo:NAME` is a model that ships with headrace, wherever it is installed."""
    if not model.startswith(DEMO_PREFIX):
        return model
    folder = Path(__file__).parent.parent / "demo" / "models" / model.removeprefix(DEMO_PREFIX)
    if not folder.is_dir():
        known = sorted(p.name for p in folder.parent.iterdir() if p.is_dir())
        raise ConfigError(f"model {model!r} is not one of the demo models: {', '.join(known)}")
    return str(folder)


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

    @classmethod
    def load(cls, model: str) -> VisionLanguageFacts:
        """Raises `ConfigError` when the checkpoint cannot be read or its processor is of an unknown kind."""
        path = resolve_model(model)
        try:
            processor: Any = AutoProcessor.from_pretrained(path)  # type: ignore[no-untyped-call]
            config = AutoConfig.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model {model!r} cannot be loaded: {error}") from error
        facts = cls(model=model, processor=processor, config=config)
        check_processor(facts)
        return facts

    @cached_property
    def rules(self) -> dict[Modality, PatchRule]:
        """How each modality's sizes become patch grids."""
        rules: dict[Modality, PatchRule] = {"image": _patch_rule(self.model, self.processor.image_processor)}
        video = getattr(self.processor, "video_processor", None)
        if video is not None:
            rules["video"] = _patch_rule(self.model, video)
        return rules

    def geometry(self, probe: Probe, plan: SamplePlan, timestamps: tuple[float, ...] = ()) -> Geometry:
        """Where the item's features will lie. Raises `ItemError` for sizes the processor refuses."""
        if probe.modality not in self.rules:
            raise ItemError("plan", "modality_not_supported", f"{self.model} takes no {probe.modality}s")
        rule = self.rules[probe.modality]
        if probe.modality == "image":
            return image_geometry(rule, probe.height, probe.width)
        return replace(video_geometry(rule, len(plan), probe.height, probe.width), timestamps=timestamps)

    @property
    def min_frames(self) -> int:
        """Frames a video needs at least; a shorter plan shows its last frame again."""
        return self.rules["video"].temporal_patch_size if "video" in self.rules else 1

    @cached_property
    def processor_digest(self) -> str:
        """Digest over everything the pixel processors are configured with."""
        parts = {"class": type(self.processor).__name__}
        for name in ("image_processor", "video_processor"):
            part = getattr(self.processor, name, None)
            if part is not None:
                parts[name] = part.to_json_string()
        return hashlib.sha256(canonical_json(parts)).hexdigest()[:16]

    @cached_property
    def placeholder_digest(self) -> str:
        """Digest over the placeholder ids of one fixed geometry: another layout or vocabulary gives another digest."""
        geometry = Geometry(
            grid=(1, 4, 4), merge_size=2, feature_length=4, original_size=(8, 8), resized_size=(8, 8), timestamps=(0.0,)
        )
        ids = {m: self.placeholder_ids(m, geometry) for m in self.rules}
        return hashlib.sha256(canonical_json(ids)).hexdigest()[:16]

    def placeholder_ids(self, modality: Modality, geometry: Geometry) -> list[int]:
        """The token ids that stand for one item in a prompt, as the model's processor lays them out."""
        grid = torch.tensor([geometry.grid])
        if modality == "image":
            text = self.processor.replace_image_token({"image_grid_thw": grid}, 0)
        else:
            # Times as indices at one frame a second, so that the true presentation times reach the prompt.
            times = list(geometry.timestamps)
            metadata = VideoMetadata(total_num_frames=len(times), fps=1.0, frames_indices=times)  # type: ignore[arg-type]
            text = self.processor.replace_video_token({"video_grid_thw": grid, "video_metadata": [metadata]}, 0)
        return self.processor.tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[no-any-return]

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Key-value cache bytes of one token: 2 * L * n_kv * d_h * b."""
        text = self.config.get_text_config()
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return int(2 * text.num_hidden_layers * heads * size * _NUM_BYTES[dtype])


def _patch_rule(model: str, processor: Any) -> PatchRule:
    needed = ("patch_size", "merge_size", "temporal_patch_size")
    missing = [name for name in needed if getattr(processor, name, None) is None]
    if missing:
        raise ConfigError(
            f"model {model!r}: {type(processor).__name__} has no {', '.join(missing)}; "
            "this version plans for dynamic-resolution processors (Qwen-VL style) only"
        )
    capped = getattr(processor, "cap_pixels_per_frame", None)
    return PatchRule(
        patch_size=processor.patch_size,
        merge_size=processor.merge_size,
        temporal_patch_size=processor.temporal_patch_size,
        min_pixels=processor.size["shortest_edge"],
        max_pixels=processor.size["longest_edge"],
        max_tokens_per_frame=processor.max_video_tokens if capped else None,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedItem:
    """What the tower made of one item: tensors by name, their container, the geometry with times, placeholder ids."""

    tensors: dict[str, torch.Tensor]
    geometry: Geometry
    placeholder_ids: list[int]

    def record(self, key_terms: dict[str, Any]) -> FeatureRecord:
        """The storable form."""
        return FeatureRecord(
            key_terms=key_terms,
            tensors={name: _tensor_view(tensor) for name, tensor in self.tensors.items()},
            container="tuple",
            unit="item",
            geometry=self.geometry,
            placeholder_ids=torch.tensor(self.placeholder_ids).numpy(),
        )


class VisionEncoder:
    """Tower and projector of a checkpoint on one device."""

    def __init__(self, facts: VisionLanguageFacts, *, dtype: str, device: str, attention: str | None = None) -> None:
        self.facts = facts
        self.device = torch.device(resolve_device(device))
        path = resolve_model(facts.model)
        self.model: Any = load_half(path, "encoder", dtype=dtype, device=str(self.device), attention=attention)

    def weights_digest(self) -> str:
        """Digest over names, types, shapes and bytes of tower and projector, at the loaded precision."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()[:16]

    @torch.inference_mode()
    def encode(
        self, modality: Modality, items: Sequence[Frames], geometries: Sequence[Geometry], seconds: dict[str, float]
    ) -> list[EncodedItem]:
        """Features of resized frames of one modality, in order; adds `mm_processor` and `vision_encode` seconds.

        Raises `RuntimeError` when the processor's grid is not the planned one, `torch.OutOfMemoryError` as it comes.
        """
        started = time.perf_counter()
        inputs = self._preprocess(modality, items)
        processed = time.perf_counter()
        features = getattr(self.model, f"get_{modality}_features")
        accepted = inspect.signature(features).parameters
        output = features(**{k: v for k, v in inputs.items() if k in accepted}, return_dict=True)
        encoded = self._split(output, modality, items, geometries, inputs[f"{modality}_grid_thw"].tolist())
        seconds["mm_processor"] = seconds.get("mm_processor", 0.0) + processed - started
        seconds["vision_encode"] = seconds.get("vision_encode", 0.0) + time.perf_counter() - processed
        return encoded

    def _preprocess(self, modality: Modality, items: Sequence[Frames]) -> BatchFeature:
        tensors = [self._on_device(torch.from_numpy(frames.pixels).permute(0, 3, 1, 2)) for frames in items]
        options: dict[str, Any] = {"do_resize": False, "input_data_format": "channels_first", "return_tensors": "pt"}
        if modality == "image":
            batch = self.facts.processor.image_processor(images=[t[0] for t in tensors], **options)
        else:
            batch = self.facts.processor.video_processor(videos=tensors, do_sample_frames=False, **options)
        return batch.to(self.device)  # type: ignore[no-any-return]

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.device.type == "cpu":
            return tensor.contiguous()
        return tensor.contiguous().pin_memory().to(self.device, non_blocking=True)

    def _split(
        self,
        output: Any,
        modality: Modality,
        items: Sequence[Frames],
        geometries: Sequence[Geometry],
        grids: list[list[int]],
    ) -> list[EncodedItem]:
        per_item: list[dict[str, torch.Tensor]] = [{} for _ in items]
        for name, pieces in _feature_pieces(output):
            for tensors, piece in zip(per_item, pieces, strict=True):
                # A copy of its own: a view would keep the whole batch alive and be stored whole.
                tensors[name] = piece.detach().to("cpu", copy=True).contiguous()
        encoded = []
        for frames, planned, grid, tensors in zip(items, geometries, grids, per_item, strict=True):
            if tuple(grid) != planned.grid:
                raise RuntimeError(f"the processor made a grid of {grid} where {planned.grid} was planned")
            times = frames.pts_seconds if modality == "video" else ()
            geometry = replace(planned, timestamps=times)
            ids = self.facts.placeholder_ids(modality, geometry)
            encoded.append(EncodedItem(tensors=tensors, geometry=geometry, placeholder_ids=ids))
        return encoded


def _feature_pieces(output: Any) -> list[tuple[str, Sequence[torch.Tensor]]]:
    """(name, one tensor an item): projected features and deep-stack levels, all that the language model is handed."""
    pieces: list[tuple[str, Sequence[torch.Tensor]]] = [("pooler_output", output.pooler_output)]
    for level, features in enumerate(getattr(output, "deepstack_features", None) or ()):
        pieces.append((f"deepstack_features.{level}", features))
    return pieces


def _tensor_view(tensor: torch.Tensor) -> TensorView:
    raw = tensor.reshape(-1).view(torch.uint8).numpy()
    return TensorView(dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape), data=raw.data)


def _tensor(view: TensorView, device: torch.device) -> torch.Tensor:
    with warnings.catch_warnings():
        # The records lie in a read-only memory map; nothing here writes to them.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        tensor = torch.frombuffer(view.data, dtype=getattr(torch, view.dtype)).reshape(view.shape)
    return tensor.to(device)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptedItem:
    """One request ready to be answered: token ids with placeholders expanded, its media's records in their order."""

    input_ids: Sequence[int]
    media: tuple[tuple[Modality, FeatureRecord], ...]
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationOptions:
    """Limits and sampling. Greedy when `temperature` is 0."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratedText:
    """One answer. `token_ids` includes the end-of-sequence token when there is one."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str


class LanguageModel:
    """The language model of a checkpoint on one device."""

    def __init__(self, facts: VisionLanguageFacts, *, dtype: str, device: str, attention: str | None = None) -> None:
        self.facts = facts
        self.device = torch.device(resolve_device(device))
        path = resolve_model(facts.model)
        self.model: Any = load_half(path, "language", dtype=dtype, device=str(self.device), attention=attention)
        ends = self.model.generation_config.eos_token_id
        self.end_ids = set(ends if isinstance(ends, list) else [ends])

    @torch.inference_mode()
    def generate(
        self, items: Sequence[PromptedItem], options: GenerationOptions, seconds: dict[str, float]
    ) -> list[GeneratedText]:
        """Answers in order; adds `feature_transfer`, `llm_prefill` and `llm_decode` seconds.

        Lengths must have been checked: a placeholder count that differs from the records' is an error of the batch.
        """
        started = time.perf_counter()
        inputs = self._inputs(items)
        moved = time.perf_counter()
        clock = StepClock(self.device)
        steps: list[Any] = [clock]
        if options.temperature > 0:
            seeds = [item.seed for item in items]
            steps.append(SeededSampler(seeds, temperature=options.temperature, top_p=options.top_p))
        output = self.model.generate(
            **inputs,
            generation_config=self._generation_config(options),
            logits_processor=steps,
            **self._stopping(options),
        )
        ended = time.perf_counter()
        prompt_length = inputs["input_ids"].shape[1]
        answers = [self._answer(row, options) for row in output[:, prompt_length:].tolist()]
        for name, value in (
            ("feature_transfer", moved - started),
            ("llm_prefill", clock.first - moved),
            ("llm_decode", ended - clock.first),
        ):
            seconds[name] = seconds.get(name, 0.0) + value
        return answers

    def _inputs(self, items: Sequence[PromptedItem]) -> dict[str, Any]:
        longest = max(len(item.input_ids) for item in items)
        pad = self.facts.processor.tokenizer.pad_token_id
        ids = torch.full((len(items), longest), pad if pad is not None else 0)
        mask = torch.zeros_like(ids)
        for row, item in enumerate(items):
            ids[row, longest - len(item.input_ids) :] = torch.tensor(item.input_ids)
            mask[row, longest - len(item.input_ids) :] = 1
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        media = [pair for item in items for pair in item.media]
        if media:
            types = torch.tensor(self.facts.processor.create_mm_token_type_ids(ids.tolist()))
            inputs["mm_token_type_ids"] = types * mask
        inputs = {name: tensor.to(self.device) for name, tensor in inputs.items()}
        encoder_outputs = {}
        for modality in ("image", "video"):
            records = [record for kind, record in media if kind == modality]
            if records:
                grids = [record.geometry.grid for record in records]
                inputs[f"{modality}_grid_thw"] = torch.tensor(grids, device=self.device)
                encoder_outputs[modality] = self._rebuild(records)
        if encoder_outputs:
            inputs["mm_encoder_outputs"] = encoder_outputs
        return inputs

    def _rebuild(self, records: Sequence[FeatureRecord]) -> ModelOutput:
        fields: dict[str, Any] = {}
        for name in records[0].tensors:
            pieces = tuple(_tensor(record.tensors[name], self.device) for record in records)
            base, _, level = name.partition(".")
            if level:
                fields.setdefault(base, []).append(pieces)
            else:
                fields[base] = pieces
        return ModelOutput(**fields)  # type: ignore[no-untyped-call]

    def _generation_config(self, options: GenerationOptions) -> Any:
        config = copy.deepcopy(self.model.generation_config)
        # Sampling, when asked for, is done by SeededSampler on top of a greedy choice.
        config.update(do_sample=False, temperature=None, top_p=None, top_k=None, num_beams=1)
        config.update(max_new_tokens=options.max_new_tokens, max_length=None)
        if config.pad_token_id is None:
            config.pad_token_id = min(self.end_ids)
        return config

    def _stopping(self, options: GenerationOptions) -> dict[str, Any]:
        if not options.stop:
            return {}
        return {"stop_strings": list(options.stop), "tokenizer": self.facts.processor.tokenizer}

    def _answer(self, row: list[int], options: GenerationOptions) -> GeneratedText:
        tokenizer = self.facts.processor.tokenizer
        end = next((i for i, token in enumerate(row) if token in self.end_ids), None)
        kept = row if end is None else row[: end + 1]
        text = tokenizer.decode(kept, skip_special_tokens=True)
        cuts = [at for at in (text.find(stop) for stop in options.stop) if at >= 0]
        if cuts:
            text = text[: min(cuts)]
            kept = [token for token in kept if token != tokenizer.pad_token_id]
        reason = "stop" if end is not None or cuts else "length"
        return GeneratedText(text=text, token_ids=tuple(kept), finish_reason=reason)
