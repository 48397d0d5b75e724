"""A request's prompt as token ids, and how long it will be before its media are encoded."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from pipeline.errors import ItemError
from pipeline.language.prompt import PromptWriter, chat_messages
from pipeline.schema import Geometry, Modality, Placeholder, Request
from pipeline.stages.context import StageContext
from pipeline.stages.outcomes import failure_row
from pipeline.stages.rows import PlannedMedia

_REMEMBERED = 4096


class RequestPrompts:
    """Prompts of one job. Loads the model's processor."""

    def __init__(self, context: StageContext) -> None:
        self._config = context.config
        self._facts = context.facts
        self._writer = PromptWriter(
            self._facts.processor,
            media_token_ids=self._facts.media_token_ids,
            max_tokens=context.config.generate.max_prompt_tokens,
        )
        # Images of a size share what stands for them; a video's has its times.
        self._by_rule = functools.lru_cache(_REMEMBERED)(self._facts.placeholder)

    def token_ids(self, request: Request, parts: Sequence[tuple[Modality, Placeholder]]) -> list[int]:
        """With what stands for each of the request's media. Raises `ItemError` as `chat_messages` and `PromptWriter`
        do, and for a request that says nothing."""
        prompt = self._config.prompt if self._config.job == "caption_videos" else request.text or ""
        if not (prompt or parts or request.messages or request.prompt):
            raise ItemError("prompt", "nothing_to_embed", "the item has neither media nor text")
        modalities = [modality for modality, _ in parts]
        messages = chat_messages(request, modalities, prompt=prompt, system=self._config.generate.system)
        return self._writer.token_ids(messages, parts)

    def planned_lengths(
        self, requests: Iterable[Request], media: Iterable[PlannedMedia]
    ) -> tuple[dict[int, int], list[dict[str, Any]]]:
        """Item → tokens of its prompt, if its `media` show what was planned; failure rows of what cannot be asked."""
        shown: dict[int, list[PlannedMedia]] = defaultdict(list)
        for item in media:
            shown[item.item_index].append(item)
        lengths: dict[int, int] = {}
        failures: list[dict[str, Any]] = []
        for request in requests:
            parts = [(m.probe.modality, self._planned(m)) for m in sorted(shown[request.item_index], key=_media_index)]
            try:
                lengths[request.item_index] = len(self.token_ids(request, parts))
            except ItemError as error:
                failures.append(failure_row(request.item_index, None, error))
        return lengths, failures

    def _planned(self, item: PlannedMedia) -> Placeholder:
        modality, geometry = item.probe.modality, item.geometry
        if modality not in self._facts.rules:
            return self._facts.learn(modality, len(item.requested), *geometry.original_size).placeholder
        shown: Geometry = dataclasses.replace(
            geometry,
            timestamps=item.requested.pts_seconds if modality == "video" else (),
            original_size=(0, 0),
            duration_seconds=0.0,
        )
        return self._by_rule(modality, shown)


def _media_index(item: PlannedMedia) -> int:
    return item.media_index
