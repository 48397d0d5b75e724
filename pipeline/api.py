"""What a program calls: the runs of the command, started from rows it has and answered with Ray datasets."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import ray

from pipeline import engine, flow
from pipeline.config import Config, load_config, parse_config
from pipeline.errors import ConfigError
from pipeline.features.codec import TensorView
from pipeline.features.store import FeatureStore
from pipeline.runs.run import TEXTS, output_folder
from pipeline.runs.summary import SUMMARY_NAME
from pipeline.runs.tables import write_manifest
from pipeline.stages.encoded import DescribeEncoded

Manifest: TypeAlias = str | os.PathLike[str] | pa.Table | ray.data.Dataset
Configuration: TypeAlias = Config | Mapping[str, Any] | str | os.PathLike[str]


def caption(manifest: Manifest, config: Configuration) -> ray.data.Dataset:
    """Run or resume what `headrace run` does; the rows of its parts, in order, every item once.

    `manifest` takes the place of `config`'s `input`: a path or URL of the same kinds, or rows with a manifest's columns
    (a Ray dataset or an Arrow table), which are written to `output/_manifests` first. `config` is a `Config`, a mapping
    with the keys of a configuration file, or the path of one. Blocks until the run has ended; a Ray that this process
    has is used, one that it has not is started, and either is left running. Raises what `flow.run` raises, and
    `QuarantineLimitError` only after the results are written.
    """
    return _run(manifest, config, ("caption_videos",))


def embed(manifest: Manifest, config: Configuration) -> ray.data.Dataset:
    """As `caption`, of the jobs `embed_backfill` and `index_documents`: rows with the vectors of media and texts."""
    return _run(manifest, config, ("embed_backfill", "index_documents"))


def rerank(manifest: Manifest, config: Configuration) -> ray.data.Dataset:
    """As `caption`, of the job `rerank`: rows with the scores of a request's documents and their ranking."""
    return _run(manifest, config, ("rerank",))


def score(manifest: Manifest, config: Configuration) -> ray.data.Dataset:
    """As `caption`, of the jobs `score_texts` and `score_media`: rows with a classifier's or reward model's scores."""
    return _run(manifest, config, ("score_texts", "score_media"))


def _run(manifest: Manifest, config: Configuration, jobs: tuple[str, ...]) -> ray.data.Dataset:
    checked = _with_input(manifest, config)
    if checked.job not in jobs:
        raise ConfigError(f"job is {checked.job!r}, this runs {' and '.join(jobs)}")
    engine.start_ray(checked.ray)
    ended = flow.run(checked)
    return engine.parts_dataset(output_folder(checked).sub(ended["run_id"]))


def encode(manifest: Manifest, config: Configuration) -> ray.data.Dataset:
    """The encode pass alone: features in the store, and a row a media item (`FEATURES_SCHEMA`) that says where.

    Arguments are those of `caption`, which, called with them, goes on from here. No language model is loaded, but for
    the check of a checkpoint that the store does not know. Raises `ConfigError` unless `store.retention` is `keep`.
    `max_quarantined_fraction` is not judged: no item is written yet.
    """
    checked = _with_input(manifest, config)
    engine.start_ray(checked.ray)
    context, windows = flow.encode(checked)
    return engine.rows_dataset(windows, DescribeEncoded(context))


def summary(config: Configuration) -> dict[str, Any]:
    """`summary.json` of the run that `config` names by `run_id`, or else of the last one started under its `output`.

    Raises `ConfigError` when that run has none: it has not ended.
    """
    checked = _checked(config, input="")
    output = output_folder(checked)
    try:
        run_id = checked.run_id or output.read_bytes("latest").decode().strip()
        return dict(output.sub(run_id).read_json(SUMMARY_NAME))
    except FileNotFoundError as error:
        raise ConfigError(f"{output.url}: the run has not ended, or there is none: {error}") from error


def _with_input(manifest: Manifest, config: Configuration) -> Config:
    if isinstance(manifest, str | os.PathLike):
        return _checked(config, input=os.fspath(manifest))
    if not isinstance(manifest, pa.Table | ray.data.Dataset):
        raise TypeError(f"a manifest is a path, a Ray dataset or an Arrow table, got {type(manifest).__name__}")
    checked = _checked(config, input="")  # a refused configuration is said before the rows are read
    with contextlib.closing(_tables(manifest)) as tables:  # what a refused row has read so far ends here
        return checked.model_copy(
            update={"input": write_manifest(tables, output_folder(checked), TEXTS.get(checked.job, ()))}
        )


def _tables(manifest: pa.Table | ray.data.Dataset) -> Generator[pa.Table]:
    if isinstance(manifest, pa.Table):
        yield manifest
    else:
        yield from engine.tables(manifest)


def _checked(config: Configuration, *, input: str) -> Config:
    if isinstance(config, Config):
        return config.model_copy(update={"input": input})
    if isinstance(config, Mapping):
        return parse_config({**config, "input": input})
    return load_config(os.fspath(config), [f"input={input}"])


class FeatureReader:
    """Reads the features that rows of `encode` name; small to pickle, so that functions given to Ray Data may use it.

    `store_path` and `local_path` are the configuration's `store.path` and `store.local_path`.
    """

    def __init__(self, store_path: str, local_path: str | None = None) -> None:
        # Absolute: a worker that unpickles this has another working directory.
        self._store = FeatureStore(store_path, None if local_path is None else os.path.abspath(local_path))

    def read(self, shard: str, feature_key: str) -> dict[str, npt.NDArray[Any]]:
        """Tensors by name, as the language model is handed them; read-only, bfloat16 as the float32 of equal value.

        `pooler_output` are the projected features, `deepstack_features.0`, `.1`, … the levels of a tower that has them;
        (feature_length, hidden) each in families that are planned by rule, in others of the shape in which the model's
        `get_image_features` or `get_video_features` returns one item. Raises `LookupError` when the store does not have
        the record.
        """
        record = self._store.get(shard, feature_key)
        if record is None:
            raise LookupError(f"{self._store.folder.url}: no features {feature_key} in shard {shard}")
        return {name: _floats(tensor) for name, tensor in record.tensors.items()}


def _floats(tensor: TensorView) -> npt.NDArray[Any]:
    if tensor.dtype != "bfloat16":
        return tensor.numpy()
    # A bfloat16 is the upper half of a float32.
    return (tensor.numpy().astype(np.uint32) << 16).view(np.float32)
