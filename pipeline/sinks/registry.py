"""From a section of the configuration to the sink it describes."""

from __future__ import annotations

from pipeline.config import LanceDBSection, PgvectorSection, QdrantSection, Sinks
from pipeline.sinks.contract import Sink
from pipeline.sinks.lancedb import LanceDBSink
from pipeline.sinks.pgvector import PgvectorSink
from pipeline.sinks.qdrant import QdrantSink

SinkSection = LanceDBSection | PgvectorSection | QdrantSection


def open_sink(section: SinkSection) -> Sink:
    """The sink of a section; connects when it is first used. Raises `ConfigError` when its client is not installed."""
    match section:
        case LanceDBSection():
            return LanceDBSink(section)
        case PgvectorSection():
            return PgvectorSink(section)
        case QdrantSection():
            return QdrantSink(section)


def sections(sinks: Sinks) -> list[SinkSection]:
    """Those that are given."""
    return [section for section in (sinks.lancedb, sinks.pgvector, sinks.qdrant) if section is not None]
