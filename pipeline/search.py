"""Searching what a run has embedded: in the vector store that it filled, or in its own parts."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.language.prompt import PromptWriter, chat_messages
from pipeline.models.embedder import TextSide, embed_texts
from pipeline.models.language_model import PromptedItem
from pipeline.models.prompt_embedder import PromptEmbedder, is_vision_language, prompt_contract
from pipeline.models.vision_language import VisionLanguageFacts
from pipeline.runs.run_folder import read_config
from pipeline.schema import Request
from pipeline.sinks.contract import Filter, Hit, point_id
from pipeline.sinks.delivery import chunk_text_of, texts_section
from pipeline.sinks.parquet import part_name
from pipeline.sinks.registry import open_sink, sections
from pipeline.sinks.vectors import read_described
from pipeline.storage import Folder

_COLUMNS = ["id", "tenant", "status", "modality", "uri", "page", "source_id", "text", "vector", "chunks"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """What was found, best first, `of` media or texts, by the vector that `model` made of the query."""

    of: str
    model: str
    hits: list[Hit]


def search(run: Folder, query: str, *, limit: int = 10, tenant: str = "") -> list[Answers]:
    """A tenant's `limit` media and texts nearest to `query`, by cosine.

    Raises `ConfigError` when the run embeds nothing or has not ended.
    """
    if not run.exists("summary.json"):
        raise ConfigError(f"{run.url}: the run has not ended, there is nothing to search yet")
    config = read_config(run)
    spaces = _spaces(run)
    searches = list(_searches(config, spaces))
    vectors = {model: _query_vector(config, model, query) for model in {model for _, model, _ in searches}}
    found = []
    for of, model, kinds in searches:
        hits = _hits(config, run, of, kinds, vectors[model], limit=limit, tenant=tenant)
        found.append(Answers(of=of, model=model, hits=hits))
    return found


def _searches(config: Config, spaces: dict[str, Any]) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """(what of, the model that makes the query's vector, kinds of points), a search each; of documents, texts first."""
    # Apart also where one model has both: texts are nearer to a text than any picture of what it says.
    texts = ("texts", config.text_model, ("text", "chunk"))
    media = [("media", config.model, ("image", "video", "page"))] if spaces["media"] is not None else []
    yield from [texts, *media] if config.job == "index_documents" else [*media, texts]


def _query_vector(config: Config, model: str, query: str) -> npt.NDArray[np.float32]:
    if is_vision_language(model):
        return _prompt_vector(config, query)
    section = config.text
    own = model == config.text_model
    pooling = config.text_pooling() if own else config.pooling.contract()
    side = TextSide.load(model, pooling, section.query_prompt_name if own else None)
    [ids] = side.tokenize([query])
    if not ids:
        raise ConfigError(f"nothing can be searched for by {query!r}: it has no tokens")
    network = side.load_model(dtype=section.dtype, device=section.device, attention=section.attention)
    return np.asarray(embed_texts(network, [ids], side.prompt_name)[0])


def _prompt_vector(config: Config, query: str) -> npt.NDArray[np.float32]:
    """As the run's own texts are embedded, in the chat that they are."""
    facts, section = VisionLanguageFacts.load(config.model), config.generate
    writer = PromptWriter(facts.processor, media_token_ids=facts.media_token_ids, max_tokens=section.max_prompt_tokens)
    messages = chat_messages(Request(item_index=0, id=""), [], prompt=query, system=section.system)
    item = PromptedItem(input_ids=writer.token_ids(messages, []), media=(), seed=0)
    embedder = PromptEmbedder(
        facts,
        prompt_contract(config.pooling.contract()),
        dtype=section.dtype,
        device=section.device,
        attention=section.attention,
    )
    return np.asarray(embedder.embed([item], {})[0])


def _hits(
    config: Config,
    run: Folder,
    of: str,
    kinds: Sequence[str],
    vector: npt.NDArray[np.float32],
    *,
    limit: int,
    tenant: str,
) -> list[Hit]:
    stores = sections(config.sinks)
    if not stores:
        return _nearest(run, kinds, vector, limit=limit, tenant=tenant)
    section = texts_section(stores[0]) if of == "texts" and config.text.model is not None else stores[0]
    where: Any = Filter(kinds=tuple(kinds))  # type: ignore[arg-type]
    return open_sink(section).search(section.collection, vector, limit, tenant=tenant, where=where)


def _nearest(
    run: Folder, kinds: Sequence[str], vector: npt.NDArray[np.float32], *, limit: int, tenant: str
) -> list[Hit]:
    """By comparing with every vector of the run's parts, one part at a time."""
    query = vector / (np.linalg.norm(vector) or 1.0)
    best: list[tuple[float, int, Hit]] = []
    number = 0
    for rows in _parts(run):
        points = [point for row in rows if _is_of(row, tenant) for point in _points(row) if point[0] in kinds]
        if not points:
            continue
        vectors = np.array([point[2] for point in points], np.float32)  # (N, D)
        norms = np.linalg.norm(vectors, axis=1)
        scores = np.divide(vectors @ query, norms, out=np.zeros(len(points), np.float32), where=norms > 0)
        for position in np.argsort(-scores, kind="stable")[:limit]:
            kind, part, _, row = points[position]
            score = float(scores[position])
            number += 1
            # Of equal scores the first stays: `number` falls.
            heapq.heappush(best, (score, -number, _hit(kind, part, row, score)))
            if len(best) > limit:
                heapq.heappop(best)
    return [hit for _, _, hit in sorted(best, key=lambda each: each[:2], reverse=True)]


def _parts(run: Folder) -> Iterator[list[dict[str, Any]]]:
    for name in run.list(suffix=".parquet"):
        with run.open(name) as file:
            yield pq.read_table(file, columns=_COLUMNS).to_pylist()


def _is_of(row: dict[str, Any], tenant: str) -> bool:
    return bool(row["status"] == "ok" and row["tenant"] == tenant)


def _points(row: dict[str, Any]) -> Iterator[tuple[str, int, Any, dict[str, Any]]]:
    """(kind, part, vector, row) of an item's vectors."""
    if row["vector"] is not None:
        yield row["modality"], 0, row["vector"], row
    for chunk in row["chunks"] or ():
        yield "chunk", chunk["part"], chunk["vector"], row


def _hit(kind: Any, part: int, row: dict[str, Any], score: float) -> Hit:
    chunk = row["chunks"][part] if kind == "chunk" else None
    return Hit(
        id=point_id(row["tenant"], row["id"], kind, part),
        score=score,
        item_id=row["id"],
        tenant=row["tenant"],
        kind=kind,
        uri=row["uri"],
        page=row["page"],
        start_char=None if chunk is None else chunk["start_char"],
        end_char=None if chunk is None else chunk["end_char"],
        text=row["text"] if kind == "text" else None if chunk is None else chunk_text_of(row, chunk),
        source_id=row["source_id"],
    )


def _spaces(run: Folder) -> dict[str, Any]:
    with run.open(part_name(0)) as file:
        described = read_described(file)
    if described is None:
        raise ConfigError(f"{run.url}: the run made no vectors; only jobs that embed can be searched")
    return described
