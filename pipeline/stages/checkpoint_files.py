"""What changes when a checkpoint's files do: the name under which the store remembers what was found of it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from pipeline.models.vision_language import resolve_model


def checkpoint_name(model: str) -> str:
    """16 hex digits over the hub's commit, or over names, sizes and times of a folder's files."""
    path = resolve_model(model)
    if os.path.isdir(path):
        terms: Any = [(str(f.relative_to(path)), f.stat().st_size, f.stat().st_mtime_ns) for f in _files(path)]
    else:
        terms = [path, getattr(AutoConfig.from_pretrained(path), "_commit_hash", None)]
    return hashlib.sha256(repr(terms).encode()).hexdigest()[:16]


def _files(path: str) -> list[Path]:
    return sorted(f for f in Path(path).rglob("*") if f.is_file())
