"""A batch of prompts that the device has no room for is worked on in parts, and the next as large is cut beforehand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from pipeline.config import Config
from pipeline.models.language_model import PromptedItem
from pipeline.schema import Receipt
from pipeline.stages.context import StageContext
from pipeline.stages.generate import Fetched, PromptBatches
from pipeline.stages.identity import CheckedModel, EncoderIdentity

NEW_TOKENS = 20


class Lengths(PromptBatches):
    """Answers with prompts' lengths, on a device with room for `most` padded tokens, output limit included."""

    def __init__(self, context: StageContext, most: int) -> None:
        super().__init__(context, "cpu")
        self.most = most
        self.tried: list[int] = []

    def _done(self, batch: dict[str, Any], fetched: Fetched) -> Callable[[], Receipt]:
        raise NotImplementedError

    def answer(self, lengths: Sequence[int]) -> tuple[list[int], int]:
        """Results, and how often a batch was cut; `tried` holds the sizes of the parts, in rows."""
        self.tried = []
        counts: dict[str, int] = {}
        items = [PromptedItem(input_ids=[7] * length, media=(), seed=0) for length in lengths]
        return self._in_room(self._work, items, counts), counts.get("oom_splits", 0)

    def _work(self, items: Sequence[PromptedItem]) -> list[int]:
        self.tried.append(len(items))
        if len(items) * (max(len(item.input_ids) for item in items) + NEW_TOKENS) > self.most:
            raise torch.OutOfMemoryError("no room")
        return [len(item.input_ids) for item in items]


@pytest.fixture
def stage(make_config: Callable[..., Config]) -> Lengths:
    checked = CheckedModel(
        identity=EncoderIdentity(weights="", processor="", placeholder="", precision=""),
        verdicts={},
        rules={},
        sizes={},
        parameters={},
    )
    config = make_config("", generate={"max_new_tokens": NEW_TOKENS})
    return Lengths(StageContext(config=config, run_url="memory://run", checked=checked), most=4 * (100 + NEW_TOKENS))


def test_what_had_no_room_is_not_tried_again(stage: Lengths) -> None:
    first = [100, 99, 98, 97, 96, 95, 94, 93]
    assert stage.answer(first) == (first, 1)
    assert stage.tried == [8, 4, 4]
    assert stage.answer(first) == (first, 1)
    assert stage.tried == [4, 4]
    larger = [180, 100, 100, 100]  # 800 tokens when padded: between the 480 that had room and the 960 that had not
    assert stage.answer(larger) == (larger, 1)
    assert stage.tried == [4, 2, 2]
    assert stage.answer([30] * 8) == ([30] * 8, 0)
    assert stage.tried == [8]
    assert stage.answer([]) == ([], 0)


def test_one_prompt_without_room_stops_the_run(stage: Lengths) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        stage.answer([1000, 10])
