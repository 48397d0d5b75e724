"""Documents to chunks that a text model reads whole: cut between tokens, overlapping, with character offsets."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from pipeline.errors import ConfigError, ItemError

# After the sign that ends a sentence and what may close behind it; after a line break.
_SENTENCE_END = re.compile(r"(?:[.!?…][\"'”’)\]]*(?=\s)|[。！？][”’」』）]*|\n)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """`text[start_char:end_char]` of its document; `num_tokens` counts special tokens and the prompt as well."""

    start_char: int
    end_char: int
    num_tokens: int


def chunk_text(tokenizer: Any, text: str, max_tokens: int, overlap_tokens: int, prompt: str = "") -> list[Chunk]:
    """Chunks of `text` in order, that together hold every token of it; none for a text without tokens.

    Each chunk, with `prompt` before it and the special tokens that `tokenizer` adds, has at most `max_tokens` tokens.
    It ends after a sentence where one ends in its second half, else after a word where one does, else after a token.
    The next one begins at most `overlap_tokens` tokens of the document earlier, at a word where one begins there.

    Raises `ConfigError` for a tokenizer without character offsets and for limits that leave no room, `ItemError` (stage
    `chunk`) when a single token of the text does not fit.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(f"{type(tokenizer).__name__} gives no character offsets: chunking needs a fast tokenizer")
    room = max_tokens - _num_tokens(tokenizer, prompt)
    if overlap_tokens < 0 or room <= overlap_tokens:
        raise ConfigError(
            f"chunks of {max_tokens = } hold {room} tokens beside prompt and special tokens: {overlap_tokens = } is "
            "from 0 to fewer than those"
        )
    document = _Document(tokenizer, text, prompt)
    chunks: list[Chunk] = []
    first = covered = 0
    while covered < document.num_pieces:
        end, num_tokens = document.cut(first, covered, room, max_tokens)
        if end == covered:
            first += 1  # the overlap, tokenized again, leaves no room for anything new: less of it
            continue
        start_char, end_char = document.starts[first], document.ends[end - 1]
        chunks.append(Chunk(start_char=start_char, end_char=end_char, num_tokens=num_tokens))
        first, covered = document.next_first(first, end, overlap_tokens), end
    return chunks


def _num_tokens(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text, truncation=False, verbose=False)["input_ids"])


class _Document:
    """A text as pieces: tokens, or runs of them that share a character (byte-level tokenizers cut through characters).

    A token without characters belongs to the piece before it.
    """

    def __init__(self, tokenizer: Any, text: str, prompt: str) -> None:
        self.tokenizer = tokenizer
        self.text = text
        self.prompt = prompt
        options = {"add_special_tokens": False, "truncation": False, "verbose": False}
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.tokens_before: list[int] = [0]
        for start, end in tokenizer(text, return_offsets_mapping=True, **options)["offset_mapping"]:
            if self.ends and (start < self.ends[-1] or start == end):
                self.ends[-1] = max(end, self.ends[-1])
                self.tokens_before[-1] += 1
            else:
                self.starts.append(start)
                self.ends.append(end)
                self.tokens_before.append(self.tokens_before[-1] + 1)
        self.sentence_ends = {match.end() for match in _SENTENCE_END.finditer(text)}

    @property
    def num_pieces(self) -> int:
        return len(self.starts)

    def cut(self, first: int, covered: int, room: int, max_tokens: int) -> tuple[int, int]:
        """Where the chunk that begins with piece `first` ends (exclusive), and how many tokens it has.

        The tokens of a chunk need not be those of the document (a word cut in two, a space at the seam), so it is
        tokenized as it will be embedded, and made smaller until it fits. The answer is `covered` when there is room for
        no more than the pieces before that, which an earlier chunk has.
        """
        end = first
        while end < self.num_pieces and self.tokens_before[end + 1] - self.tokens_before[first] <= room:
            end += 1
        end = max(end, first + 1)
        while end > covered:
            end = self._preferred_end(first, covered, end)
            num_tokens = _num_tokens(self.tokenizer, self.prompt + self.text[self.starts[first] : self.ends[end - 1]])
            if num_tokens <= max_tokens:
                return end, num_tokens
            if end == first + 1:
                shown = self.text[self.starts[first] : self.ends[first]][:40]
                raise ItemError(
                    "chunk", "token_too_long", f"{shown!r} at character {self.starts[first]} takes {num_tokens} tokens"
                )
            end = max(first + 1, end - (num_tokens - max_tokens))
        return covered, 0

    def _preferred_end(self, first: int, covered: int, end: int) -> int:
        if end == self.num_pieces:
            return end
        for is_good in (self._ends_sentence, self._ends_word):
            for candidate in range(end, max(covered, first + (end - first) // 2), -1):
                if is_good(candidate):
                    return candidate
        return end

    def _ends_sentence(self, end: int) -> bool:
        return any(at in self.sentence_ends for at in range(self.ends[end - 1], self.starts[end] + 1))

    def _ends_word(self, end: int) -> bool:
        between = self.text[self.ends[end - 1] : self.starts[end]]
        return bool(between) or self.text[self.starts[end]].isspace() or self.text[self.ends[end - 1] - 1].isspace()

    def next_first(self, first: int, end: int, overlap_tokens: int) -> int:
        """The piece that the chunk after `first` to `end` begins with."""
        start = end
        while start - 1 > first and self.tokens_before[end] - self.tokens_before[start - 1] <= overlap_tokens:
            start -= 1
        return next((piece for piece in range(start, end) if self._ends_word(piece)), start)
