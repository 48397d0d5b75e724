"""Which texts a window's items have, cut into the pieces that are embedded."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.errors import ItemError
from pipeline.language.chunking import chunk_text
from pipeline.media.in_process import InProcess
from pipeline.media.shared_source import SharedSources
from pipeline.media.source import FetchCounter, stat_source
from pipeline.media.source_id import SourceFacts
from pipeline.planning.windows import Window
from pipeline.runs.base import Place
from pipeline.runs.manifest import read_range
from pipeline.schema import MediaItem, Request
from pipeline.stages.context import StageContext
from pipeline.stages.encode_finish import read_encoded
from pipeline.stages.identity import is_trusted, media_source, sha256_content
from pipeline.stages.outcomes import failure_row
from pipeline.stages.window_plan import load_plan

if TYPE_CHECKING:
    from pipeline.models.embedder import TextSide


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """`text[start_char:end_char]` of an item, by its number there, and its token ids; a whole text has one piece."""

    part: int
    start_char: int
    end_char: int
    input_ids: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemText:
    """An item's text, where it is from, and its pieces in order."""

    text: str
    source_id: str
    pieces: list[Piece]


@dataclass(kw_only=True, slots=True)
class WindowTexts:
    """By item, what there is to embed; failure rows of items that are out; what was fetched to find it.

    `bytes_fetched` are those of the counter by item. `carried` items are unchanged since the run that this one goes on
    from.
    """

    items: dict[int, ItemText] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)
    counter: FetchCounter
    bytes_fetched: dict[int, int] = field(default_factory=dict)
    carried: dict[int, Place] = field(default_factory=dict)


def read_texts(context: StageContext, window: Window) -> WindowTexts:
    """The window's texts: of rows, whole and truncated; in a job that indexes documents, of pages, in chunks.

    Items that failed in the encode pass have none.
    """
    counter = FetchCounter()
    texts = _reader(context, counter)
    requests = read_range(context.folder, window.start, window.stop)
    found = WindowTexts(carried=_carried(context, window, requests, texts), counter=counter)
    out = set(found.carried)
    if context.checked.verdicts:
        encoded = read_encoded(context, window)
        out.update(row["item_index"] for row in encoded.select(["item_index", "code"]).to_pylist() if row["code"])
    texts.read([request for request in requests if request.item_index not in out], found)
    found.failures.sort(key=lambda failure: int(failure["item_index"]))
    return found


def texts_of(context: StageContext, requests: list[Request]) -> WindowTexts:
    """As `read_texts`, of these requests, none of which is known to have failed."""
    counter = FetchCounter()
    texts = _reader(context, counter)
    carried = {} if context.base_url is None else _unchanged(context, requests, texts)
    found = WindowTexts(carried=carried, counter=counter)
    texts.read([request for request in requests if request.item_index not in found.carried], found)
    return found


def _reader(context: StageContext, counter: FetchCounter) -> _RowTexts | _DocumentTexts:
    return _DocumentTexts(context, counter) if context.config.job == "index_documents" else _RowTexts(context)


def _carried(
    context: StageContext, window: Window, requests: list[Request], texts: _RowTexts | _DocumentTexts
) -> dict[int, Place]:
    """As the encode pass found it of media; here of texts, and of media where there was no encode pass."""
    if context.base_url is None:
        return {}
    plan = load_plan(context, window) if context.checked.verdicts else None
    carried = {} if plan is None else plan.carried
    return {**carried, **_unchanged(context, [r for r in requests if r.item_index not in carried], texts)}


def _unchanged(context: StageContext, requests: list[Request], texts: _RowTexts | _DocumentTexts) -> dict[int, Place]:
    named = ((request, texts.source_id(request)) for request in requests)
    return context.unchanged({r.item_index: (r.tenant, r.id, id_) for r, id_ in named if id_ is not None})


def _empty_text() -> ItemError:
    return ItemError("tokenize", "empty_text", "there is nothing to embed: the text has no tokens")


@contextmanager
def _failures_of(request: Request, found: WindowTexts) -> Iterator[None]:
    try:
        yield
    except ItemError as error:
        found.failures.append(failure_row(request.item_index, None, error))


class _RowTexts:
    """Texts that stand in the manifest: an item is embedded by its text, or by its one media item."""

    def __init__(self, context: StageContext) -> None:
        self.context = context

    def source_id(self, request: Request) -> str | None:
        """Of a row that is embedded by its text."""
        return None if request.text is None or request.media else sha256_content(request.text.encode())

    def read(self, requests: list[Request], found: WindowTexts) -> None:
        """Adds what there is to embed, and who is out."""
        texts: dict[int, str] = {}
        for request in requests:
            with _failures_of(request, found):
                text = self._text(request)
                if text is not None:
                    texts[request.item_index] = text
        if not texts:
            return  # importing what tokenizes takes seconds
        # All at once: one by one they cost several times as much.
        ids = self.context.text_side.tokenize(list(texts.values()))
        for (index, text), input_ids in zip(texts.items(), ids, strict=True):
            if not input_ids:
                found.failures.append(failure_row(index, None, _empty_text()))
                continue
            piece = Piece(part=0, start_char=0, end_char=len(text), input_ids=input_ids)
            found.items[index] = ItemText(text=text, source_id=sha256_content(text.encode()), pieces=[piece])

    def _text(self, request: Request) -> str | None:
        text = request.text
        if text is not None and request.media:
            raise ItemError("tokenize", "media_and_text", "an item is embedded by its text or its media, it has both")
        if text is None and len(request.media) != 1:
            found = f"{len(request.media)} media items" if request.media else "neither text nor media"
            raise ItemError("tokenize", "not_one_vector", f"an item has one vector, and this one has {found}")
        if text is None:
            _check_media(self.context)
            return None
        if not text.strip():
            raise _empty_text()
        return text


class _DocumentTexts:
    """Text layers of pages; a document is fetched once for all its pages in the window."""

    def __init__(self, context: StageContext, counter: FetchCounter) -> None:
        self.context = context
        self.counter = counter
        self.policy = context.config.source_policy()
        self.sources = SharedSources(self.policy)
        self.reader = context.probers or InProcess()
        self.stat: dict[tuple[str | None, str | None], SourceFacts] = {}

    def source_id(self, request: Request) -> str | None:
        """Of a page, where the encode pass does not say it; None for what cannot be reached, or has to be read."""
        if self.context.checked.verdicts or len(request.media) != 1:
            return None
        [media] = request.media
        try:
            is_known = is_trusted(self._facts(media).strength, self.context.config.store.identity)
            return self._source_id(media) if is_known else None
        except ItemError:
            return None

    def read(self, requests: list[Request], found: WindowTexts) -> None:
        """Adds what there is to embed, and who is out."""
        for request in requests:
            before = found.counter.bytes_fetched
            with _failures_of(request, found):
                text = self._text(request)
                if text is not None:
                    found.items[request.item_index] = text
            found.bytes_fetched[request.item_index] = found.counter.bytes_fetched - before

    def _text(self, request: Request) -> ItemText | None:
        if len(request.media) != 1:
            raise ItemError("tokenize", "not_a_page", f"a row is one document or image, it has {len(request.media)}")
        [media] = request.media
        if media.page is None:
            if media.modality == "page":
                self._check_document(media)
            _check_media(self.context)
            return None
        text = self.reader.page_text(self.sources.read(media, self.counter), media.page)
        pieces = _chunks(self.context, self.context.text_side, text)
        if not pieces and not self.context.checked.verdicts:
            raise ItemError("tokenize", "empty_text", f"{media.name} has no text, and the job no model for its picture")
        return ItemText(text=text, source_id=self._source_id(media), pieces=pieces)

    def _check_document(self, media: MediaItem) -> None:
        """Raise why it has no pages: of one that hung or broke what counted them, as it does once more."""
        data = self.sources.read(media, self.counter)
        self.reader.page_count(io.BytesIO(data), num_bytes=len(data), name=media.name)
        raise ItemError("tokenize", "not_a_page", f"the pages of {media.name} could not be counted when it was listed")

    def _source_id(self, media: MediaItem) -> str:
        """As the encode pass has it."""
        return media_source(media, self._facts(media).source_id, self.context.config.document.dpi)

    def _facts(self, media: MediaItem) -> SourceFacts:
        """Each document is asked for once."""
        key = (media.uri, media.version) if media.uri is not None else (None, sha256_content(media.data or b""))
        if key not in self.stat:
            self.stat[key] = stat_source(media, self.policy, self.counter)
        return self.stat[key]


def _check_media(context: StageContext) -> None:
    if not context.checked.verdicts:
        model = context.config.model
        raise ItemError("admit", "modality_not_supported", f"{model} embeds texts, and the item is an image or video")


def _chunks(context: StageContext, side: TextSide, text: str) -> list[Piece]:
    section = context.config.text
    limit = min(section.chunk_tokens or side.max_tokens, side.max_tokens)
    chunks = chunk_text(side.tokenizer, text, limit, section.chunk_overlap_tokens, side.prompt)
    ids = side.tokenize([text[chunk.start_char : chunk.end_char] for chunk in chunks])
    return [
        Piece(part=part, start_char=chunk.start_char, end_char=chunk.end_char, input_ids=input_ids)
        for part, (chunk, input_ids) in enumerate(zip(chunks, ids, strict=True))
    ]
