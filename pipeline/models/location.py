"""Where a checkpoint lies, by its name. Imports neither torch nor transformers."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

from pipeline.errors import ConfigError

DEMO_PREFIX = "demo:"
PACKAGE_PREFIX = "package:"


def resolve_model(model: str) -> str:
    """A folder or hub name; `demo:NAME` is a model that ships with headrace, wherever it is installed.

    `package:MODULE/FOLDER` is a folder of an installed Python package, which is not imported.
    """
    if model.startswith(PACKAGE_PREFIX):
        return _package_folder(model)
    if not model.startswith(DEMO_PREFIX):
        return model
    folder = Path(__file__).parent.parent / "demo" / "models" / model.removeprefix(DEMO_PREFIX)
    if not folder.is_dir():
        known = sorted(p.name for p in folder.parent.iterdir() if p.is_dir())
        raise ConfigError(f"model {model!r} is not one of the demo models: {', '.join(known)}")
    return str(folder)


def _package_folder(model: str) -> str:
    module, _, folder = model.removeprefix(PACKAGE_PREFIX).partition("/")
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"model {model!r}: no Python package {module!r} is installed; pip install the one that has it"
        )
    path = Path(spec.origin).parent / folder
    if not path.is_dir():
        raise ConfigError(f"model {model!r}: the package {module!r} has no folder {folder!r}")
    return str(path)


def folder_digest(path: str) -> str | None:
    """16 hex digits that change when a folder's files do, by their names, sizes and times; None for a hub name."""
    folder = Path(path)
    if not folder.is_dir():
        return None
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    terms = [(str(f.relative_to(folder)), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return hashlib.sha256(repr(terms).encode()).hexdigest()[:16]
