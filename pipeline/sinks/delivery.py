"""From a window's part to the vector stores that a run fills."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.config import Sinks
from pipeline.features.identity import canonical_json
from pipeline.schema import VectorSpace, VectorSpaces
from pipeline.sinks.contract import Collection, ItemKey, Selector, Sink, point_id, points_schema
from pipeline.sinks.registry import SinkSection, open_sink, sections

_TEXTS_SUFFIX = "_texts"


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """One collection of a sink, and which vectors go there: those of media, those of texts, or both.

    `section.collection` is the collection's name.
    """

    section: SinkSection
    collection: Collection
    media: bool
    texts: bool

    @property
    def ledger_name(self) -> str:
        """What the run's ledger calls it: another place, collection or version is another."""
        terms = [type(self.section).__name__, self.section.model_dump(mode="json"), self.collection.physical]
        return f"sink_{hashlib.sha256(canonical_json(terms)).hexdigest()[:12]}"

    def open(self) -> Sink:
        """The sink; it connects when it is first used."""
        return open_sink(self.section)


def deliveries(sinks: Sinks, spaces: VectorSpaces) -> list[Delivery]:
    """Where the vectors of these spaces go."""
    return [delivery for section in sections(sinks) for delivery in _deliveries(section, spaces)]


def texts_section(section: SinkSection) -> SinkSection:
    """The section of texts whose vectors do not compare with those of media: another collection."""
    return section.model_copy(update={"collection": f"{section.collection}{_TEXTS_SUFFIX}"})


def _deliveries(section: SinkSection, spaces: VectorSpaces) -> Iterator[Delivery]:
    media, texts = spaces.media, spaces.text
    if media is not None and texts is not None and media.model == texts.model:
        version = hashlib.sha256(canonical_json([media.digest, texts.digest])).hexdigest()
        yield Delivery(section=section, collection=_collection(section, media, version), media=True, texts=True)
        return
    if media is not None:
        yield Delivery(section=section, collection=_collection(section, media, media.digest), media=True, texts=False)
    if texts is not None:
        own = section if media is None else texts_section(section)
        yield Delivery(section=own, collection=_collection(own, texts, texts.digest), media=False, texts=True)


def _collection(section: SinkSection, space: VectorSpace, version: str) -> Collection:
    return Collection(name=section.collection, dimensions=space.dimensions, metric="cosine", version=version)


def deliver(delivery: Delivery, part: pa.Table) -> None:
    """Make the points of a part's items those of the collection: returns when it has acknowledged them.

    Items that are quarantined have none. Raises what `Sink.replace_items` raises.
    """
    keys = zip(part["tenant"].to_pylist(), part["id"].to_pylist(), strict=True)
    items = [ItemKey(tenant=tenant, item_id=item_id) for tenant, item_id in keys]
    written = part.filter(pc.equal(part["status"], "ok")).to_pylist()
    points = [point for row in written for point in _points(delivery, row)]
    table = pa.Table.from_pylist(points, points_schema(delivery.collection.dimensions))
    delivery.open().replace_items(delivery.collection, table, items)


def _points(delivery: Delivery, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    is_text = row["modality"] == "text"
    if row["vector"] is not None and (delivery.texts if is_text else delivery.media):
        yield _point(row, row["modality"], 0, row["text"] if is_text else None)
    if delivery.texts:
        yield from (_chunk_point(row, chunk) for chunk in row["chunks"] or ())


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
    """Build the indexes, and have the name mean this version; its points, by table."""
    sink, collection = delivery.open(), delivery.collection
    sink.finish(collection)
    sink.switch(collection)
    return {collection.physical: sink.count(collection)}


def forget(delivery: Delivery, items: Mapping[str, Sequence[str]]) -> None:
    """Delete items (tenant → ids) from the sink, whatever version has them."""
    sink = delivery.open()
    for tenant, ids in items.items():
        sink.delete(Selector(tenant=tenant, item_ids=tuple(ids)))


def prepare(all_deliveries: Sequence[Delivery]) -> None:
    """Before any work starts: every sink can be reached and written to, and takes these vectors."""
    for delivery in all_deliveries:
        delivery.open().prepare(delivery.collection)
