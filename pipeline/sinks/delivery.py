"""From a window's part to the vector stores that a run fills."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.config import Sinks
from pipeline.features.identity import canonical_json
from pipeline.schema import VectorSpace, VectorSpaces
from pipeline.sinks.contract import Collection, ItemKey, Sink, point_id, points_schema
from pipeline.sinks.registry import SinkSection, open_sink, sections

TEXTS_SUFFIX = "_texts"


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """One sink, and the collections in it: of vectors of media, and of those of texts. One may be both.

    Vectors of two models do not compare, so they are in two collections, the texts' with `_texts` after its name.
    """

    section: SinkSection
    media: Collection | None
    texts: Collection | None

    @property
    def ledger_name(self) -> str:
        """What the run's ledger calls this sink: another place, collection or version is another sink."""
        versions = [None if each is None else each.physical for each in (self.media, self.texts)]
        terms = [type(self.section).__name__, self.section.model_dump(mode="json"), versions]
        return f"sink_{hashlib.sha256(canonical_json(terms)).hexdigest()[:12]}"

    @property
    def collections(self) -> list[Collection]:
        """Each once."""
        return list(dict.fromkeys(each for each in (self.media, self.texts) if each is not None))

    def open(self) -> Sink:
        """The sink; it connects when it is first used."""
        return open_sink(self.section)


def deliveries(sinks: Sinks, spaces: VectorSpaces) -> list[Delivery]:
    """Where the vectors of these spaces go."""
    return [_delivery(section, spaces) for section in sections(sinks)]


def _delivery(section: SinkSection, spaces: VectorSpaces) -> Delivery:
    media, texts = spaces.media, spaces.text
    one = media is None or texts is None or (media.model == texts.model and media.dimensions == texts.dimensions)
    version = hashlib.sha256(canonical_json([each.digest for each in (media, texts) if each is not None])).hexdigest()
    first = None if media is None else _collection(section.collection, media, version if one else media.digest)
    if texts is None:
        return Delivery(section=section, media=first, texts=None)
    name = section.collection if one else f"{section.collection}{TEXTS_SUFFIX}"
    return Delivery(section=section, media=first, texts=_collection(name, texts, version if one else texts.digest))


def _collection(name: str, space: VectorSpace, version: str) -> Collection:
    return Collection(name=name, dimensions=space.dimensions, metric="cosine", version=version)


def deliver(delivery: Delivery, part: pa.Table) -> None:
    """Make the points of a part's items those of the sink: returns when it has acknowledged them.

    Items that are quarantined have none. Raises what `Sink.replace_items` raises.
    """
    sink = delivery.open()
    keys = zip(part["tenant"].to_pylist(), part["id"].to_pylist(), strict=True)
    items = [ItemKey(tenant=tenant, item_id=item_id) for tenant, item_id in keys]
    points: dict[Collection, list[dict[str, Any]]] = {collection: [] for collection in delivery.collections}
    for row in part.filter(pc.equal(part["status"], "ok")).to_pylist():
        own = delivery.texts if row["modality"] == "text" else delivery.media
        if row["vector"] is not None:
            assert own is not None
            points[own].append(_point(row, row["modality"], 0, row["text"] if row["modality"] == "text" else None))
        for chunk in row["chunks"] or ():
            assert delivery.texts is not None
            points[delivery.texts].append(_chunk_point(row, chunk))
    for collection, rows in points.items():
        table = pa.Table.from_pylist(rows, points_schema(collection.dimensions))
        sink.replace_items(collection, table, items)


def _point(row: dict[str, Any], kind: Any, part: int, text: str | None) -> dict[str, Any]:
    return {
        "id": point_id(row["tenant"], row["id"], kind, part),
        "item_id": row["id"],
        "tenant": row["tenant"],
        "kind": kind,
        "uri": row["uri"],
        "page": row["page"],
        "text": text,
        "source_id": row["source_id"],
        "vector": row["vector"],
    }


def _chunk_point(row: dict[str, Any], chunk: dict[str, Any]) -> dict[str, Any]:
    start, end = chunk["start_char"], chunk["end_char"]
    point = _point(row, "chunk", chunk["part"], chunk_text_of(row, chunk))
    return {**point, "start_char": start, "end_char": end, "vector": chunk["vector"]}


def chunk_text_of(row: dict[str, Any], chunk: dict[str, Any]) -> str:
    """The text of a chunk of a part's row."""
    return str(row["text"][chunk["start_char"] : chunk["end_char"]])


def finish(delivery: Delivery) -> dict[str, int]:
    """Build the indexes, and have the names mean these versions; points by collection."""
    sink = delivery.open()
    for collection in delivery.collections:
        sink.finish(collection)
    for collection in delivery.collections:
        sink.switch(collection)
    return {collection.physical: sink.count(collection) for collection in delivery.collections}


def prepare(all_deliveries: Sequence[Delivery]) -> None:
    """Before any work starts: every sink can be reached and written to, and takes these vectors."""
    for delivery in all_deliveries:
        sink = delivery.open()
        for collection in delivery.collections:
            sink.prepare(collection)
