"""A run: its id, its folder, and what is written there before the first window starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.media.sandbox import Probers, open_probers
from pipeline.runs.base import LATEST_ENDED_NAME, choose_base
from pipeline.runs.listing import check_input
from pipeline.runs.lock import RunLock, run_lock
from pipeline.runs.manifest import (
    FROZEN_INDEX,
    FrozenManifest,
    StagedManifest,
    freeze_manifest,
    publish_manifest,
    stage_manifest,
)
from pipeline.runs.run_folder import CONFIG_NAME, LATEST_NAME
from pipeline.storage import Folder

# job → what its runs are called, and the columns of texts that it reads.
_NAMES = {
    "caption_videos": "caption",
    "embed_backfill": "embed",
    "index_documents": "documents",
    "rerank": "rerank",
    "score_texts": "score",
    "score_media": "score-media",
}
TEXTS: dict[str, tuple[str, ...]] = {
    "embed_backfill": ("text",),
    "rerank": ("query", "documents"),
    "score_texts": ("text",),
}


def derive_run_id(config_digest: str, manifest_digest: str, *, job: str) -> str:
    """The id of a run nobody named: the same configuration and listing always find the same run."""
    return f"{_NAMES[job]}-{config_digest[:8]}-{manifest_digest[:8]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run that this process holds: what to read, and where to write. `base` is the run that it goes on from."""

    run_id: str
    folder: Folder
    config_digest: str
    manifest: FrozenManifest
    lock: RunLock
    base: Folder | None = None


@contextmanager
def start_run(config: Config) -> Iterator[Run]:
    """Find or make the run's folder under `config.output`, hold its lock, freeze the listing, write `latest`.

    A named run that has its listing reads only that: `config.input` is not looked at again. Raises `ConfigError` when
    the folder belongs to another configuration or listing, and what `run_lock` and `freeze_manifest` raise.
    """
    if config.run_id is not None:
        if not output_folder(config).sub(config.run_id).exists(FROZEN_INDEX):
            check_input(config.input)  # before anything is written
        with _held(config, config.run_id) as (folder, lock):
            with _reader(config) as reader:
                frozen = freeze_manifest(config.input, folder, **_listing_options(config), reader=reader)
            yield _started(config, config.run_id, folder, lock, frozen)
        return
    with stage_listing(config) as staged:
        run_id = derive_run_id(config.digest(), staged.digest, job=config.job)
        with _held(config, run_id) as (folder, lock):
            manifest = publish_manifest(staged, folder)
            staged.discard()
            yield _started(config, run_id, folder, lock, manifest)


def stage_listing(config: Config) -> StagedManifest:
    """The listing that a run of `config` would freeze, as `stage_manifest` gives it; raises what that does."""
    with _reader(config) as reader:
        return stage_manifest(config.input, **_listing_options(config), reader=reader)


def _listing_options(config: Config) -> dict[str, Any]:
    return {
        "limit": config.limit,
        "sample_fraction": config.sample_fraction,
        "texts": TEXTS.get(config.job, ()),
        "expand_pages": config.job == "index_documents",
        "policy": config.source_policy(),
    }


@contextmanager
def _reader(config: Config) -> Iterator[Probers | None]:
    """What counts the pages of documents; its children are started for the first one, and end with the listing."""
    probers = open_probers(config.decode.sandbox, config.decode.item_seconds)
    try:
        yield probers
    finally:
        if probers is not None:
            probers.close()


@contextmanager
def _held(config: Config, run_id: str) -> Iterator[tuple[Folder, RunLock]]:
    folder = output_folder(config).sub(run_id)
    with run_lock(folder) as lock:
        _claim(folder, config)
        yield folder, lock


def output_folder(config: Config) -> Folder:
    """The root of all runs. A local path is made absolute: workers have other working directories."""
    return Folder(config.anchored().output)


def _claim(folder: Folder, config: Config) -> None:
    """Write the resolved configuration, or see that what is there has the same digest."""
    if not folder.exists(CONFIG_NAME):
        folder.write_json(CONFIG_NAME, {"digest": config.digest(), "config": config.model_dump(mode="json")}, indent=2)
        return
    known = folder.read_json(CONFIG_NAME)
    if known["digest"] != config.digest():
        raise ConfigError(
            f"{folder.url}: belongs to a run of another configuration (digest {known['digest']}, this one has "
            f"{config.digest()}); use another run_id or output"
        )
    # The listing is frozen: without this, a nightly run that keeps its name would answer with the first night's items.
    if config.run_id is not None and known["config"]["input"] != config.input:
        raise ConfigError(
            f"{folder.url}: belongs to a run of another input ({known['config']['input']!r}, this one has "
            f"{config.input!r}); use another run_id or output"
        )


def _started(config: Config, run_id: str, folder: Folder, lock: RunLock, manifest: FrozenManifest) -> Run:
    output, base = output_folder(config), None
    if config.incremental.base is not None:
        base_id = choose_base(folder, output, config.incremental.base)
        base = None if base_id is None else output.sub(base_id)
    output.write_bytes(LATEST_NAME, f"{run_id}\n".encode())
    return Run(run_id=run_id, folder=folder, config_digest=config.digest(), manifest=manifest, lock=lock, base=base)


def note_ended(config: Config, run_id: str) -> None:
    """Have the run be what `incremental.base: latest` means; a sample, which lacks most of the listing, is not."""
    if config.sample_fraction is not None:
        return
    output_folder(config).write_bytes(LATEST_ENDED_NAME, f"{run_id}\n".encode())
