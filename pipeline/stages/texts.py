"""Which texts a request has, cut into the pieces that are embedded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.errors import ItemError
from pipeline.language.chunking import chunk_text
from pipeline.stages.context import StageContext

if TYPE_CHECKING:
    from pipeline.models.embedder import TextSide


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """`text[start_char:end_char]` of an item, by its number there, and its token ids; a whole text has one piece."""

    part: int
    start_char: int
    end_char: int
    input_ids: list[int]


def cut(context: StageContext, text: str) -> Iterator[Piece]:
    """The pieces of an item's text, in order: chunks in a job that indexes documents, else the whole of it, truncated.

    Raises `ItemError` for a text without tokens that is to be embedded whole, and what `chunk_text` raises.
    """
    side = context.text_side
    if context.config.job == "index_documents":
        return _chunks(context, side, text)
    [ids] = side.tokenize([text])
    if not ids or not text.strip():
        raise ItemError("tokenize", "empty_text", "there is nothing to embed: the text has no tokens")
    return iter([Piece(part=0, start_char=0, end_char=len(text), input_ids=ids)])


def _chunks(context: StageContext, side: TextSide, text: str) -> Iterator[Piece]:
    section = context.config.text
    limit = min(section.chunk_tokens or side.max_tokens, side.max_tokens)
    chunks = chunk_text(side.tokenizer, text, limit, section.chunk_overlap_tokens, side.prompt)
    ids = side.tokenize([text[chunk.start_char : chunk.end_char] for chunk in chunks])
    for part, (chunk, input_ids) in enumerate(zip(chunks, ids, strict=True)):
        yield Piece(part=part, start_char=chunk.start_char, end_char=chunk.end_char, input_ids=input_ids)
