"""Finding a run, and the configuration that it was started with, in what it wrote."""

from __future__ import annotations

from pipeline.config import Config, parse_config
from pipeline.errors import ConfigError
from pipeline.storage import Folder

CONFIG_NAME = "_run/config.json"
LATEST_NAME = "latest"  # of an output folder


def find_run(path: str) -> Folder:
    """The run at `path`: its own folder, or an output root, whose last one is meant. Raises `ConfigError`."""
    folder = Folder(path)
    if folder.exists(CONFIG_NAME):
        return folder
    if folder.exists(LATEST_NAME):
        return folder.sub(folder.read_bytes(LATEST_NAME).decode().strip())
    raise ConfigError(f"{path}: neither a run nor an output folder with runs in it")


def read_config(run: Folder) -> Config:
    """The configuration of the run, as resolved at its first start."""
    return parse_config(run.read_json(CONFIG_NAME)["config"], origin=run.url)
