"""The Python API inside a program of its own, on a Ray that the program started."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray

import pipeline
from pipeline.config import Config
from pipeline.engine import Cluster, Memory, fit, map_windows, parts_dataset, tables, windows_dataset
from pipeline.errors import ConfigError, ManifestError
from pipeline.planning.windows import Window
from pipeline.sinks.parquet import PART_SCHEMA, write_part
from pipeline.storage import Folder
from tests.ray.conftest import files

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings(r"ignore::DeprecationWarning:ray\."),  # of its own options, which it sets itself
]
README = Path(__file__).parents[2] / "README.md"
HIDDEN = 128  # of the demo model
NUM_PICTURES, MISSING = 7, 5


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The program's working directory, with a small Ray of its own that was started there."""
    folder = tmp_path_factory.mktemp("program")
    scratch = tempfile.mkdtemp(prefix="hr", dir="/tmp")  # short: Ray's sockets lie below it
    with contextlib.chdir(folder):
        ray.init(
            num_cpus=2,
            object_store_memory=200_000_000,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=scratch,
        )
        ray.data.DataContext.get_current().execution_options.preserve_order = True  # as no pass of a run would have it
        settings = settings_of_ray_data()
        yield folder
        left_as_it_was = ray.is_initialized() and settings_of_ray_data() == settings
        ray.shutdown()
    shutil.rmtree(scratch, ignore_errors=True)
    assert left_as_it_was


def settings_of_ray_data() -> tuple[Any, ...]:
    """What a run has otherwise while it lasts."""
    context = ray.data.DataContext.get_current()
    return context.enable_progress_bars, context.execution_options.preserve_order, logging.getLogger("ray.data").level


def programs_in_readme() -> list[str]:
    """The code of the section on Ray Data programs."""
    [section] = re.findall(r"^## In a Ray Data program\n(.*?)^## ", README.read_text(), re.MULTILINE | re.DOTALL)
    return re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def products(demo_media: Path, place: Path) -> list[str]:
    """What the program in the README reads: pictures, and the path of one that is missing. Returns their names."""
    lines = (demo_media / "manifest.jsonl").read_text().splitlines()
    media = [demo_media / json.loads(line)["media"][0]["uri"] for line in lines]
    pictures = [str(path) for path in media if path.suffix in (".jpg", ".png", ".webp")][:NUM_PICTURES]
    pictures.insert(MISSING, str(place / "nowhere.jpg"))
    skus = [f"sku-{i}" for i in range(len(pictures))]
    pq.write_table(
        pa.table({"sku": skus, "picture": pictures, "price": [10 * i for i in range(len(skus))]}), "products.parquet"
    )
    return skus


@dataclass(frozen=True)
class Encoded:
    """What `encode` answered, and the ledger of its run then."""

    config: dict[str, Any]
    rows: list[dict[str, Any]]
    folder: Path
    ledger: dict[str, tuple[bytes, int]]


@pytest.fixture(scope="module")
def encoded(products: list[str], place: Path) -> Encoded:
    """The encode pass of the program in the README, whose rows come as an Arrow table."""
    config = names_of(programs_in_readme()[0].partition("products =")[0])["config"]
    table = pq.read_table("products.parquet").select(["sku", "picture"]).rename_columns(["id", "image"])
    rows = pipeline.encode(table, config).take_all()
    [folder] = (place / "captions").glob("caption-*")
    return Encoded(config=config, rows=rows, folder=folder, ledger=files(folder, "_run/ledger/*"))


def names_of(*programs: str) -> dict[str, Any]:
    """The names that programs give, run one after another."""
    names: dict[str, Any] = {"__name__": "__main__"}  # functions of a main program are sent to workers by value
    for program in programs:
        exec(program, names)
    return names


def rows_in(folder: Path, pattern: str = "*.parquet") -> list[dict[str, Any]]:
    """The rows of the Parquet files in a folder, in the order of their names."""
    return [row for path in sorted(folder.glob(pattern)) for row in pq.read_table(path).to_pylist()]


def test_encode_says_where_each_item_s_features_are(encoded: Encoded, products: list[str]) -> None:
    assert [(row["item_index"], row["id"], row["media_index"]) for row in encoded.rows] == [
        (i, sku, 0) for i, sku in enumerate(products)
    ]
    failed = encoded.rows.pop(MISSING)
    assert (failed["status"], failed["code"], failed["feature_key"]) == ("quarantined", "not_found", None)
    reader = pipeline.FeatureReader(encoded.config["store"]["path"])
    for row in encoded.rows:
        assert row["status"] == "ok"
        assert row["feature_length"] == np.prod(row["grid"]) // 4  # merged two by two
        tensors = reader.read(row["shard"], row["feature_key"])
        assert tensors["pooler_output"].shape == (row["feature_length"], HIDDEN)
    assert list(encoded.ledger) == ["_run/ledger/encode-000000.json"]
    assert not list(encoded.folder.glob("part-*"))


def test_the_programs_in_the_readme(encoded: Encoded, products: list[str], place: Path) -> None:
    with pytest.raises(ConfigError, match="has not ended"):
        pipeline.summary(encoded.config)
    names_of(*programs_in_readme())

    assert list((place / "captions").glob("caption-*")) == [encoded.folder]  # the same rows in the same order
    written = rows_in(encoded.folder, "part-*.parquet")
    assert [(row["item_index"], row["id"]) for row in written] == list(enumerate(products))
    assert [(row["item_index"], row["code"]) for row in written if row["status"] != "ok"] == [(MISSING, "not_found")]
    summary = pipeline.summary(encoded.config)
    assert (summary["run_id"], summary["items_in"], summary["items_written"], summary["encodes"]) == (
        encoded.folder.name,
        len(products),
        len(products) - 1,
        len(products) - 1,
    )
    assert encoded.ledger.items() <= files(encoded.folder, "_run/ledger/*").items()  # nothing was encoded again

    answered = [row for row in written if row["status"] == "ok"]
    described = rows_in(place / "described")
    assert [(row["sku"], row["price"], row["text"]) for row in described] == [
        (row["id"], 10 * row["item_index"], row["text"]) for row in answered
    ]
    assert len({row["text"] for row in described}) > 3  # or texts could change places unseen
    vectors = {row["id"]: np.array(row["vector"]) for row in rows_in(place / "vectors")}
    assert vectors.keys() == {row["id"] for row in answered}
    assert {vector.shape for vector in vectors.values()} == {(HIDDEN,)}
    assert len({vector.tobytes() for vector in vectors.values()}) == len(vectors)


@contextlib.contextmanager
def blocks_may_overtake() -> Iterator[None]:
    """Datasets that are made meanwhile are not in order by themselves, as Ray Data has it."""
    options = ray.data.DataContext.get_current().execution_options
    options.preserve_order = False
    yield
    options.preserve_order = True


@pytest.fixture(scope="module")
def parts(place: Path) -> Folder:
    """Eight parts of a run, ten rows each, below a folder whose name is no column."""
    output = Folder(str(place / "day=1"))
    for window in range(8):
        rows = [{**dict.fromkeys(PART_SCHEMA.names), "item_index": 10 * window + i} for i in range(10)]
        write_part(output, window, pa.Table.from_pylist(rows, PART_SCHEMA))
    return output


def test_results_come_in_order(parts: Folder) -> None:
    with blocks_may_overtake():
        results = parts_dataset(parts)
    assert results.schema().names == PART_SCHEMA.names
    assert [row["item_index"] for row in results.map_batches(slow_at_first()).take_all()] == list(range(80))


def test_a_caller_s_rows_are_read_in_order(parts: Folder) -> None:
    with blocks_may_overtake():
        dataset = ray.data.read_parquet(parts.path, partitioning=None).map_batches(slow_at_first())
    assert [i for table in tables(dataset) for i in table["item_index"].to_pylist()] == list(range(80))
    reading = tables(dataset)
    next(reading)
    reading.close()
    assert not dataset.context.execution_options.preserve_order  # it was lent, not given


@pytest.mark.parametrize(("flops", "planners"), [(None, None), (1e9, 1)])
def test_a_window_is_planned_and_cut_into_blocks_in_one_task(
    place: Path, flops: float | None, planners: int | None
) -> None:
    def rows(window: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for _ in range(10):
            yield {"index": window["index"]}

    windows = windows_dataset([Window(index=0, start=0, stop=1)])
    workers = fit(Cluster(num_cpus=2, num_gpus=0), "cpu", None, batch_flops=flops, memory=Memory(window_task=2**20))
    assert workers.planners == planners
    blocks = map_windows(windows, rows, replace(workers, batches_per_block=4)).materialize()
    assert blocks.num_blocks() == 3
    assert re.search(r"Operator 1 MapBatches\(rows\)->StreamingRepartition\[.*\]: 1 tasks", blocks.stats())


def slow_at_first() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A function, sent to workers by value, that keeps the first block back."""

    def wait(batch: dict[str, Any]) -> dict[str, Any]:
        time.sleep(1 if batch["item_index"][0] == 0 else 0)
        return batch

    return wait


def test_what_is_refused_is_refused_before_anything_runs(
    place: Path, make_config: Callable[..., Config], tmp_path: Path
) -> None:
    rows = pa.table({"id": ["a", "b"], "uri": ["/a.jpg", "/b.jpg"]})
    with pytest.raises(ConfigError, match=r"encode.max_batch_item: unknown key; did you mean 'max_batch_items'"):
        pipeline.caption(rows, {"job": "caption_videos", "model": "demo:captioner", "encode": {"max_batch_item": 3}})
    with pytest.raises(ConfigError, match=r"store.retention is 'segment'"):
        pipeline.encode(rows, make_config("", store={"retention": "segment"}))
    with pytest.raises(ManifestError, match="the table: row 2, column 'id': null"):
        pipeline.caption(ray.data.from_items([{"id": "a", "uri": "/a"}, {"id": None, "uri": "/b"}]), make_config(""))
    with pytest.raises(TypeError, match="got list"):
        pipeline.caption([{"id": "a"}], make_config(""))  # type: ignore[arg-type]
    assert not list((tmp_path / "output").glob("caption-*"))
