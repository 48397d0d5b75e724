"""What a finished batch leaves under `OUTPUT/_work`: a Parquet file, whole or not at all, its receipt inside."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import ItemError
from pipeline.runs.receipts import receipt_from_json, receipt_to_json
from pipeline.schema import Receipt
from pipeline.stages.spending import SPENT
from pipeline.storage import Folder

ENCODE_OUTCOME = pa.schema(
    [
        ("position", pa.int32()),
        ("key", pa.string()),
        ("shard", pa.string()),
        ("content", pa.string()),
        ("stage", pa.string()),
        ("code", pa.string()),
        ("message", pa.string()),
        ("media_fetch_ms", pa.float64()),
        ("media_decode_ms", pa.float64()),
        ("encoder_queue_ms", pa.float64()),
        ("mm_processor_ms", pa.float64()),
        ("vision_encode_ms", pa.float64()),
        ("decode_started_at", pa.float64()),
        ("decode_seconds", pa.float64()),
        ("decode_cpu_seconds", pa.float64()),
        ("bytes_fetched", pa.int64()),
        *SPENT,  # of encoding
    ]
)
GENERATE_OUTCOME = pa.schema(
    [
        ("item_index", pa.int64()),
        ("stage", pa.string()),
        ("code", pa.string()),
        ("message", pa.string()),
        ("text", pa.string()),
        ("finish_reason", pa.string()),
        ("prompt_tokens", pa.int32()),
        ("generated_tokens", pa.int32()),
        ("llm_queue_ms", pa.float64()),
        ("feature_transfer_ms", pa.float64()),
        ("llm_prefill_ms", pa.float64()),
        ("tpot_ms", pa.float64()),
        *SPENT,
    ]
)
VECTOR_OUTCOME = pa.schema(
    [
        ("item_index", pa.int64()),
        ("part", pa.int32()),
        ("vector", pa.list_(pa.float32())),
        ("text_embed_ms", pa.float64()),
        *SPENT,
    ]
)
PROMPT_VECTOR_OUTCOME = pa.schema(
    [
        ("item_index", pa.int64()),
        ("stage", pa.string()),
        ("code", pa.string()),
        ("message", pa.string()),
        ("vector", pa.list_(pa.float32())),
        ("llm_queue_ms", pa.float64()),
        ("feature_transfer_ms", pa.float64()),
        ("llm_prefill_ms", pa.float64()),
        *SPENT,
    ]
)
SCORE_OUTCOME = pa.schema([("item_index", pa.int64()), ("document", pa.int32()), ("score", pa.float32()), *SPENT])
# Of a text `scores`, a number a label; of its tokens, where the job asks for those, `tokens`.
SCORED_TOKENS = pa.list_(
    pa.struct(
        [
            ("token_id", pa.int32()),
            ("start_char", pa.int32()),
            ("end_char", pa.int32()),
            ("scores", pa.list_(pa.float32())),
        ]
    )
)
TEXT_SCORE_OUTCOME = pa.schema(
    [
        ("item_index", pa.int64()),
        ("scores", pa.list_(pa.float32())),
        ("tokens", SCORED_TOKENS),
        ("text_score_ms", pa.float64()),
        *SPENT,
    ]
)
_RECEIPT = b"headrace.receipt"


def write_outcome(folder: Folder, receipt: Receipt, rows: list[dict[str, Any]], schema: pa.Schema) -> None:
    """Publish a batch's rows and its receipt; doing it twice changes nothing but the times."""
    table = pa.Table.from_pylist(rows, schema.with_metadata({_RECEIPT: receipt_to_json(receipt)}))
    with folder.writing(f"{_directory(receipt.stage, receipt.window)}/{_name(receipt)}") as file:
        pq.write_table(table, file)


def remove_outcome(folder: Folder, receipt: Receipt) -> None:
    """Take a batch's rows and receipt back: it is to be done again."""
    folder.remove(f"{_directory(receipt.stage, receipt.window)}/{_name(receipt)}")


def read_outcomes(folder: Folder, stage: str, window: int, digests: list[str]) -> Iterator[pa.Table]:
    """The rows of the batches of a plan, in its order. Raises `FileNotFoundError` when one is not there."""
    for batch, digest in enumerate(digests):
        with folder.open(f"{_directory(stage, window)}/batch-{batch:06d}-{digest}.parquet") as file:
            yield pq.read_table(file)


def read_finished(folder: Folder, stage: str, window: int) -> Iterator[pa.Table]:
    """The rows of the batches that are finished, as `read_outcomes` gives those of all."""
    directory = _directory(stage, window)
    for name in folder.list(directory, suffix=".parquet"):
        with folder.open(f"{directory}/{name}") as file:
            yield pq.read_table(file)


def encode_batch_receipts(folder: Folder, window: int) -> dict[tuple[int, str], tuple[Receipt, str]]:
    """(batch, digest) → receipt and its JSON, of the encode batches that are finished already."""
    return _batch_receipts(folder, "encode", window)


def generate_batch_receipts(folder: Folder, window: int) -> dict[tuple[int, str], tuple[Receipt, str]]:
    """As `encode_batch_receipts`, of the generate pass."""
    return _batch_receipts(folder, "generate", window)


def pool_batch_receipts(folder: Folder, window: int) -> dict[tuple[int, str], tuple[Receipt, str]]:
    """As `encode_batch_receipts`, of the pool pass."""
    return _batch_receipts(folder, "pool", window)


def failure_row(item_index: int, media_index: int | None, error: ItemError) -> dict[str, Any]:
    """Why an item is out, as written plans hold it; `media_index` is None when the whole item is at fault."""
    return {
        "item_index": item_index,
        "media_index": media_index,
        "stage": error.stage,
        "code": error.code,
        "message": error.message,
    }


def count_codes(codes: Iterable[str | None]) -> dict[str, int]:
    """Code → how many; None is no failure."""
    return dict(Counter(code for code in codes if code is not None))


def _batch_receipts(folder: Folder, stage: str, window: int) -> dict[tuple[int, str], tuple[Receipt, str]]:
    directory = _directory(stage, window)
    receipts = {}
    for name in folder.list(directory, suffix=".parquet"):
        if match := re.fullmatch(r"batch-(\d+)-([0-9a-f]+)\.parquet", name):
            with folder.open(f"{directory}/{name}") as file:
                text = pq.read_schema(file).metadata[_RECEIPT].decode()
            receipts[int(match[1]), match[2]] = (receipt_from_json(text), text)
    return receipts


def _directory(stage: str, window: int) -> str:
    return f"_work/{stage}/window-{window:06d}"


def _name(receipt: Receipt) -> str:
    return f"batch-{receipt.batch:06d}-{receipt.digest}.parquet"
