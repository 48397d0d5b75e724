"""What a checkpoint's folder, or its repository on the hub, holds: configuration files, whole weights, their digest."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoTokenizer
from transformers.utils.hub import cached_file
from transformers.utils.logging import disable_progress_bar

from pipeline.errors import ConfigError
from pipeline.features.identity import canonical_json
from pipeline.models.location import folder_digest


def load_quietly() -> None:
    """Without transformers' bars of weights being loaded, in this process."""
    disable_progress_bar()  # type: ignore[no-untyped-call]


def checkpoint_name(path: str) -> str:
    """16 hex digits that change when the files do: `folder_digest`, or of a hub's name over its commit."""
    digest = folder_digest(path)
    if digest is None:
        terms = [path, getattr(AutoConfig.from_pretrained(path), "_commit_hash", None)]
        digest = hashlib.sha256(repr(terms).encode()).hexdigest()[:16]
    return digest


def checkpoint_file(path: str, filename: str, subfolder: str = "") -> str | None:
    """The local path of a file of a folder or hub repository; None where there is none.

    Raises `ConfigError` when the hub cannot be asked: without the file another model might be made of the rest.
    """
    options: dict[str, Any] = {"subfolder": subfolder, "_raise_exceptions_for_missing_entries": False}
    try:
        return cached_file(path, filename, **options)
    except OSError as error:
        raise ConfigError(f"model {path}: {filename} cannot be read: {error}") from error


def read_json(path: str, filename: str, subfolder: str = "") -> Any:
    """A parsed JSON file of a folder or hub repository; None where there is none. Raises `ConfigError` for bad JSON."""
    found = checkpoint_file(path, filename, subfolder)
    if found is None:
        return None
    try:
        return json.loads(Path(found).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(
            f"model {path}: {subfolder and subfolder + '/'}{filename} is not valid JSON: {error}"
        ) from error


def load_tokenizer(model: str, path: str, subfolder: str = "") -> Any:
    """The tokenizer. Raises `ConfigError` when it cannot be read or gives no character offsets."""
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path, subfolder=subfolder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {model!r}: its tokenizer cannot be loaded: {error}") from error
    if not tokenizer.is_fast:
        raise ConfigError(f"model {model!r}: {type(tokenizer).__name__} is not a fast tokenizer, which is needed")
    return tokenizer


def load_config(model: str, path: str, subfolder: str = "") -> Any:
    """The configuration. Raises `ConfigError` when it cannot be read."""
    try:
        return AutoConfig.from_pretrained(path, subfolder=subfolder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {model!r}: its configuration cannot be loaded: {error}") from error


def tokenizer_digest(tokenizer: Any) -> str:
    """16 hex digits over vocabulary, rules and chat template; how texts are cut and padded is the contract's."""
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    terms = {name: value for name, value in rules.items() if name not in ("truncation", "padding")}
    return hashlib.sha256(canonical_json([terms, tokenizer.chat_template])).hexdigest()[:16]


def load_whole(
    model_class: Any,
    path: str,
    config: Any,
    *,
    dtype: str,
    device: str,
    attention: str | None = None,
    unused: tuple[str, ...] = (),
    subfolder: str = "",
) -> Any:
    """The model, in evaluation mode on `device`, without a key-value cache.

    Raises `ConfigError` when the checkpoint lacks weights (transformers would fill them with random numbers) other than
    those whose names begin with one of `unused`.
    """
    options: dict[str, Any] = {"dtype": getattr(torch, dtype), "output_loading_info": True, "subfolder": subfolder}
    if attention is not None:
        options["attn_implementation"] = attention
    if getattr(config, "use_cache", False):
        config.use_cache = False
    try:
        model, info = model_class.from_pretrained(path, config=config, **options)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {path} cannot be loaded: {error}") from error
    missing = sorted(name for name in info["missing_keys"] if not name.startswith(unused))
    if missing:
        raise ConfigError(f"model {path}: {type(model).__name__} needs weights that it lacks: {missing[:5]}")
    return model.to(device).eval()


def weights_digest(*modules: nn.Module) -> str:
    """16 hex digits over names, types, shapes and bytes of all weights, at the loaded precision."""
    digest = hashlib.sha256()
    for number, module in enumerate(modules):
        for name, tensor in sorted(module.state_dict().items()):
            prefix = f"{number}." if number else ""
            digest.update(f"{prefix}{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]
