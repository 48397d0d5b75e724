"""What the configuration files of a sentence-transformers folder say; what they say that is not supported is refused.

The formats are those that `sentence_transformers` 6.2 writes and still reads (`base/model.py`, `base/modules/*.py`,
`sentence_transformer/modules/pooling.py`); the library itself is not needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipeline.errors import ConfigError
from pipeline.models.checkpoint import read_json
from pipeline.pooling.contract import Method

_METHODS: dict[str, Method] = {"mean": "mean", "cls": "cls", "lasttoken": "last_token"}
# The names before 5.4, which all but new folders have: one flag a mode.
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# These leave their prompts out of the pool and do not say so: sentence-transformers knows them by name.
_PROMPTS_EXCLUDED = ("hkunlp/instructor-base", "hkunlp/instructor-large", "hkunlp/instructor-xl")
_TRANSFORMER_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# Options of the Transformer module that change the numbers and are not followed here.
_REFUSED_OPTIONS = (
    *("model_args", "model_kwargs", "config_args", "config_kwargs", "tokenizer_args", "processor_kwargs"),
    *("processing_kwargs", "query_length", "document_length", "query_expansion", "tokenizer_name_or_path"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseLayer:
    """A linear layer after the pooling, in its own subfolder; `activation` is the dotted name of a torch module."""

    subfolder: str
    in_features: int
    out_features: int
    bias: bool
    activation: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerModule:
    """The Transformer module: `subfolder` has its weights and tokenizer, `task` is what it was saved for."""

    subfolder: str
    task: str
    max_seq_length: int | None
    do_lower_case: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class SentenceFolder:
    """Transformer, pooling, dense layers and normalisation of a sentence embedding model, in this order.

    `dimensions` are those that are kept of its vectors; None keeps all.
    """

    transformer: TransformerModule
    method: Method
    include_prompt: bool
    dense: tuple[DenseLayer, ...]
    normalised: bool
    dimensions: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompts:
    """What is put before a text, by name. `default_name` is the prompt that is used when none is named."""

    by_name: Mapping[str, str]
    default_name: str | None

    def text(self, name: str | None) -> str:
        """The prompt of that name, or the default one. Raises `ConfigError` for a name that the model does not have."""
        chosen = name if name is not None else self.default_name
        if chosen is None:
            return ""
        if chosen not in self.by_name:
            raise ConfigError(f"prompt {chosen!r} is not one of the model's: {', '.join(sorted(self.by_name))}")
        return self.by_name[chosen]


def read_prompts(path: str) -> Prompts:
    """The prompts a folder was saved with. "query" and "document" exist everywhere, empty where nothing is said."""
    saved = read_json(path, "config_sentence_transformers.json") if read_modules(path) is not None else None
    saved = saved or {}
    texts = {name: text or "" for name, text in (saved.get("prompts") or {}).items()}
    return Prompts(by_name={"query": "", "document": ""} | texts, default_name=saved.get("default_prompt_name"))


def read_transformer(path: str, subfolder: str) -> TransformerModule:
    """The Transformer module in `subfolder`. Raises `ConfigError` for options that are not followed here."""
    files = (read_json(path, name, subfolder) for name in _TRANSFORMER_FILES)
    options: dict[str, Any] = next((found for found in files if found), {})
    unsupported = [name for name in _REFUSED_OPTIONS if options.get(name)]
    if unsupported:
        raise ConfigError(f"model {path}: its Transformer module sets {', '.join(unsupported)}, which is not supported")
    modalities = sorted(options.get("modality_config", {"text": None}))
    if modalities != ["text"]:
        raise ConfigError(
            f"model {path}: its Transformer module takes {', '.join(modalities)}, and puts texts into a chat template "
            "or beside media; only plain texts are supported"
        )
    return TransformerModule(
        subfolder=subfolder,
        task=options.get("transformer_task", "feature-extraction"),
        max_seq_length=options.get("max_seq_length"),
        do_lower_case=bool(options.get("do_lower_case", False)),
    )


def read_modules(path: str) -> list[tuple[str, str]] | None:
    """(class name, subfolder) of each module in order; None when the model is no sentence-transformers folder.

    Raises `ConfigError` for a module that is not the library's own: it would need the folder's code.
    """
    modules = read_json(path, "modules.json")
    if modules is None:
        return None
    for module in modules:
        if not module["type"].startswith("sentence_transformers."):
            raise ConfigError(f"model {path}: module {module['type']} is code of the model's own, which is not run")
    return [(module["type"].rpartition(".")[2], module["path"]) for module in modules]


def read_sentence_folder(path: str) -> SentenceFolder | None:
    """The modules of a sentence embedding model; None when the model is no sentence-transformers folder.

    Raises `ConfigError`, with the reason, for modules, modes and options other than: Transformer, Pooling by mean, cls
    or lasttoken, then Dense layers, then Normalize.
    """
    modules = read_modules(path)
    if modules is None:
        return None
    names = [name for name, _ in modules]
    num_dense = names.count("Dense")
    expected = ["Transformer", "Pooling", *["Dense"] * num_dense]
    if names not in (expected, [*expected, "Normalize"]):
        raise ConfigError(
            f"model {path}: its modules are {', '.join(names)}; supported is Transformer, Pooling, any number of "
            "Dense, and Normalize at the end"
        )
    transformer = read_transformer(path, modules[0][1])
    if transformer.task != "feature-extraction":
        raise ConfigError(f"model {path}: it was saved for {transformer.task}, which makes no vectors")
    pooling = read_json(path, "config.json", modules[1][1]) or {}
    if names[-1] == "Normalize":
        _check_input(path, read_json(path, "config.json", modules[-1][1]) or {})
    return SentenceFolder(
        transformer=transformer,
        method=_pooling_method(path, pooling),
        include_prompt=pooling.get("include_prompt", True) and path not in _PROMPTS_EXCLUDED,
        dense=tuple(_dense_layer(path, subfolder) for name, subfolder in modules if name == "Dense"),
        normalised=names[-1] == "Normalize",
        dimensions=(read_json(path, "config_sentence_transformers.json") or {}).get("truncate_dim"),
    )


def _pooling_method(path: str, options: Mapping[str, Any]) -> Method:
    flagged = [mode for flag, mode in _FLAGS.items() if options.get(flag)] or ["mean"]
    named = options.get("pooling_mode", flagged)
    modes = [named] if isinstance(named, str) else list(named)
    if len(modes) != 1 or modes[0] not in _METHODS:
        raise ConfigError(
            f"model {path}: pooling by {' and '.join(modes)} is not supported, only by one of {list(_METHODS)}"
        )
    return _METHODS[modes[0]]


def _dense_layer(path: str, subfolder: str) -> DenseLayer:
    options = read_json(path, "config.json", subfolder) or {}
    _check_input(path, options)
    if options.get("use_residual"):
        raise ConfigError(
            f"model {path}: {subfolder} adds its input to its output (use_residual), which is not supported"
        )
    activation = options.get("activation_function", "torch.nn.modules.activation.Tanh")
    torch_module(path, activation)
    return DenseLayer(
        subfolder=subfolder,
        in_features=options["in_features"],
        out_features=options["out_features"],
        bias=options.get("bias", True),
        activation=activation,
    )


def _check_input(path: str, options: Mapping[str, Any]) -> None:
    names = {
        options.get("module_input_name") or "sentence_embedding",
        options.get("module_output_name") or "sentence_embedding",
    }
    if names != {"sentence_embedding"}:
        raise ConfigError(
            f"model {path}: a module works on {', '.join(sorted(names))}, only pooled vectors are supported"
        )


def torch_module(path: str, dotted_name: str) -> nn.Module:
    """A module without parameters of `torch.nn`, such as an activation, from its dotted name.

    Raises `ConfigError` for every other name: it would be code that a checkpoint chooses.
    """
    kind = getattr(torch.nn, dotted_name.rpartition(".")[2], None)
    if not dotted_name.startswith("torch.nn.") or not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise ConfigError(f"model {path}: activation {dotted_name!r} is not a module of torch.nn")
    try:
        return kind()
    except TypeError as error:
        raise ConfigError(f"model {path}: activation {dotted_name!r} cannot be made: {error}") from error
