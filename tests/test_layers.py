"""The dependency rules of the design, held by reading every import of `pipeline/` and `jobs/`."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted(path.relative_to(ROOT).as_posix() for top in ("pipeline", "jobs") for path in (ROOT / top).rglob("*.py"))

# Library → where it may be imported. Everything else is to stay testable, and quick to start, without it.
_NETWORKS = ("pipeline/models/", "pipeline/language/", "pipeline/pooling/")
HOMES: dict[str, tuple[str, ...]] = {
    "ray": (
        "pipeline/engine.py",
        "pipeline/pool_watch.py",
        "pipeline/ray_meter.py",
        "pipeline/flow.py",
        "pipeline/api.py",
        "jobs/",
    ),  # api: it takes and returns datasets
    "lmdb": ("pipeline/features/shard.py",),
    "av": ("pipeline/media/", "pipeline/demo/"),
    "PIL": ("pipeline/media/", "pipeline/demo/"),
    "aiohttp": ("pipeline/media/http_files.py",),
    "pillow_heif": ("pipeline/media/",),
    "pypdf": ("tests/",),  # what documents are compared with
    "pypdfium2": ("pipeline/media/",),
    "reportlab": ("pipeline/demo/",),
    "torch": (*_NETWORKS, "pipeline/stages/computing.py"),
    "torchvision": _NETWORKS,
    "transformers": _NETWORKS,
    "lancedb": ("pipeline/sinks/lancedb.py",),
    "psycopg": ("pipeline/sinks/pgvector.py",),
    "pgvector": ("pipeline/sinks/pgvector.py",),
    "qdrant_client": ("pipeline/sinks/qdrant.py",),
    "sentence_transformers": ("pipeline/models/reference.py",),  # what vectors are compared with, and nothing to run by
}

# Arithmetic on metadata: the standard library, numpy, and each other.
PURE = (
    "pipeline/errors.py",
    "pipeline/schema.py",
    "pipeline/planning/geometry.py",
    "pipeline/planning/balance.py",
    "pipeline/planning/bounds.py",
    "pipeline/planning/tiling.py",
    "pipeline/planning/buckets.py",
    "pipeline/planning/calibration.py",
    "pipeline/planning/estimate.py",
    "pipeline/planning/placement.py",
    "pipeline/planning/decode_cost.py",
    "pipeline/planning/windows.py",
    "pipeline/media/av1.py",
    "pipeline/media/bits.py",
    "pipeline/media/h264.py",
    "pipeline/media/avif.py",
    "pipeline/media/archive_index.py",
    "pipeline/media/budget.py",
    "pipeline/media/claims.py",
    "pipeline/media/packets.py",
    "pipeline/media/sampling.py",
    "pipeline/media/url_policy.py",
    "pipeline/media/part.py",
    "pipeline/media/sniff.py",
    "pipeline/planning/sound.py",
    "pipeline/features/identity.py",
    "pipeline/language/batching.py",
    "pipeline/language/kv_cache.py",
    "pipeline/planning/image_size.py",
    "pipeline/pooling/contract.py",
    "pipeline/pooling/rank.py",
    "pipeline/pooling/frames.py",
)
# Besides those, Arrow's tables: what stands between the jobs and any vector store.
WITH_ARROW = ("pipeline/sinks/contract.py",)

# Imports go to the same layer or a lower one. What is not named here is the lowest: media, features, models, …
LAYERS = (
    "",
    "pipeline.stages",
    "pipeline.engine",
    "pipeline.scratch",
    "pipeline.flow",
    "pipeline.trial",
    "pipeline.cache_profile",
    "pipeline.api",
    "jobs",
)
# The package names what its API has, and imports that when it is used: `import pipeline` itself imports nothing.
FRONT_DOOR = "pipeline/__init__.py"


def imports(source: str) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of everything imported, wherever it stands in the file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import; imports here are absolute"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def violations(file: str, source: str) -> list[str]:
    """`file:line: import name: the rule it breaks`, one an import."""
    found = []
    for line, name in imports(source):
        broken = _broken_rule(file, name)
        if broken is not None:
            found.append(f"{file}:{line}: import {name}: {broken}")
    return found


def _broken_rule(file: str, name: str) -> str | None:
    library = name.partition(".")[0]
    homes = HOMES.get(library)
    if homes is not None and not file.startswith(homes):
        return f"{library} is imported in {', '.join(homes)} only"
    if file in PURE and not _is_pure(name):
        return "a pure module imports the standard library, numpy and pure modules only"
    if file in WITH_ARROW and not (_is_pure(name) or library == "pyarrow"):
        return "it imports the standard library, numpy, pyarrow and pure modules only"
    if library in ("scripts", "tests"):
        return f"{library}/ is not installed"
    own, used = _layer("pipeline.api" if file == FRONT_DOOR else _module(file)), _layer(name)
    return f"{LAYERS[used]} lies above {LAYERS[own] or 'the stages'}" if used > own else None


def _is_pure(name: str) -> bool:
    library = name.partition(".")[0]
    if library != "pipeline":
        return library == "numpy" or library in sys.stdlib_module_names
    return any(name == module or name.startswith(f"{module}.") for module in map(_module, PURE))


def _layer(name: str) -> int:
    return max(i for i, layer in enumerate(LAYERS) if not layer or name == layer or name.startswith(f"{layer}."))


def _module(file: str) -> str:
    return file.removesuffix(".py").replace("/", ".")


@pytest.mark.parametrize("file", FILES)
def test_imports_keep_the_layers(file: str) -> None:
    found = violations(file, (ROOT / file).read_text(encoding="utf-8"))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "file",
    [
        *PURE,
        *WITH_ARROW,
        "pipeline/engine.py",
        "pipeline/flow.py",
        "pipeline/features/shard.py",
        "pipeline/api.py",
        FRONT_DOOR,
    ],
)
def test_the_files_that_rules_name_exist(file: str) -> None:
    assert file in FILES


def test_importing_the_package_imports_nothing_else() -> None:
    look = "import sys; before = set(sys.modules); import pipeline; print(*set(sys.modules) - before)"
    found = subprocess.run([sys.executable, "-c", look], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {name for name in found.stdout.split() if name.partition(".")[0] not in sys.stdlib_module_names} == {
        "pipeline"
    }


def test_what_drives_plans_and_decodes_imports_no_network() -> None:
    modules = ("flow", "stages.encode_plan", "stages.decode", "stages.encode_finish", "stages.identity")
    look = "import sys; " + "; ".join(f"import pipeline.{name}" for name in modules) + "; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", look], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {"torch", "torchvision", "transformers"}.isdisjoint(found.stdout.split())


def test_no_client_of_a_store_is_imported_before_it_is_used() -> None:
    look = "import sys; import pipeline.sinks.registry; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", look], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {"lancedb", "psycopg", "pgvector", "qdrant_client"}.isdisjoint(found.stdout.split())


def test_jobs_run_the_flow() -> None:
    names = [name for file in FILES if file.startswith("jobs/") for _, name in imports((ROOT / file).read_text())]
    assert any(name.startswith("pipeline.flow") for name in names)


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("pipeline/stages/decode.py", "import ray"),
        ("pipeline/media/probe.py", "from ray.data import Dataset"),
        ("pipeline/features/store.py", "import lmdb"),
        ("pipeline/stages/decode.py", "import av.container"),
        ("pipeline/runs/report.py", "from PIL import Image"),
        ("pipeline/stages/decode.py", "import torch"),
        ("pipeline/media/resize.py", "import torch"),
        ("pipeline/runs/pages.py", "from pypdfium2 import PdfDocument"),
        ("pipeline/media/resize.py", "from torchvision.transforms import v2"),
        ("pipeline/engine.py", "import transformers"),
        ("pipeline/models/text.py", "from sentence_transformers import SentenceTransformer"),
        ("pipeline/pooling/rank.py", "import torch"),
        ("pipeline/sinks/registry.py", "import lancedb"),
        ("pipeline/sinks/contract.py", "import psycopg"),
        ("pipeline/sinks/lancedb.py", "from pgvector.psycopg import register_vector"),
        ("pipeline/sinks/pgvector.py", "from qdrant_client import models"),
        ("pipeline/sinks/contract.py", "from pipeline.config import Sinks"),
        ("pipeline/sinks/contract.py", "import pydantic"),
        ("pipeline/planning/buckets.py", "import pyarrow as pa"),
        ("pipeline/planning/buckets.py", "from pipeline.media.probe import probe_media"),
        ("pipeline/planning/buckets.py", "from pipeline.media import probe"),
        ("pipeline/language/batching.py", "import torch"),
        ("pipeline/runs/run.py", "from pipeline import flow"),
        ("pipeline/stages/encode.py", "from pipeline.engine import Workers"),
        ("pipeline/engine.py", "import pipeline.flow"),
        ("pipeline/flow.py", "from pipeline.api import caption"),
        ("pipeline/scratch.py", "from pipeline.flow import run"),
        ("pipeline/engine.py", "from pipeline import scratch"),
        ("pipeline/stages/context.py", "from pipeline import api"),
        ("pipeline/flow.py", "from jobs.running import run_config"),
        ("pipeline/media/probe.py", "from pipeline.stages.rows import BATCH_SCHEMA"),
        ("pipeline/demo/media.py", "from scripts.demo_models import captioner"),
    ],
)
def test_a_broken_rule_is_found_and_named(file: str, line: str) -> None:
    [found] = violations(file, f"def late() -> None:\n    {line}\n")
    assert found.startswith(f"{file}:2: import {line.split()[1]}")


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("pipeline/planning/buckets.py", "from pipeline.planning import geometry"),
        ("pipeline/planning/buckets.py", "import numpy.typing as npt"),
        ("pipeline/flow.py", "from pipeline import engine"),
        ("pipeline/media/streams.py", "import available_elsewhere"),
        ("jobs/cli.py", "from pipeline.flow import run"),
        ("pipeline/__init__.py", "from pipeline.api import caption"),
        ("pipeline/api.py", "import ray"),
        ("pipeline/sinks/contract.py", "import pyarrow as pa"),
        ("pipeline/sinks/lancedb.py", "import lancedb"),
    ],
)
def test_what_points_down_is_let_through(file: str, line: str) -> None:
    assert violations(file, line) == []
