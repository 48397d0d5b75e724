"""Requests as token ids: the chat template rendered once, each placeholder replaced by its item's stored ids."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

from pipeline.errors import ItemError
from pipeline.language.placeholder import expand
from pipeline.schema import Modality, Placeholder, Request


def chat_messages(
    request: Request, modalities: Sequence[Modality], *, prompt: str, system: str | None
) -> list[dict[str, Any]]:
    """The chat of a request: its own `messages`, or its media followed by its own (or the job's) prompt.

    Raises `ItemError` when the media parts of `messages` are not the request's media, in order.
    """
    if request.messages is not None:
        messages = [dict(message) for message in request.messages]
        asked = [
            part["type"] for message in messages for part in _parts(message) if part.get("type") in ("image", "video")
        ]
        if asked != list(modalities):
            raise ItemError(
                "prompt",
                "media_mismatch",
                f"messages show {asked or 'no media'}, the request carries {list(modalities) or 'none'}",
            )
    else:
        text = request.prompt if request.prompt is not None else prompt
        content = [{"type": modality} for modality in modalities] + [{"type": "text", "text": text}]
        messages = [{"role": "user", "content": content}]
    if system is not None and messages[0].get("role") != "system":
        messages.insert(0, {"role": "system", "content": [{"type": "text", "text": system}]})
    return messages


def prompt_ids(
    processor: Any,
    messages: list[dict[str, Any]],
    media: Sequence[tuple[Modality, Placeholder]],
    *,
    media_token_ids: Sequence[int],
    max_tokens: int,
) -> list[int]:
    """Token ids of the rendered chat with each placeholder token replaced by its item's placeholder, in order.

    Raises `ItemError` when the text itself contains a placeholder, and when the prompt is longer than `max_tokens`: a
    prompt is never cut, since a cut through a placeholder would be silent and wrong.
    """
    tokens = {getattr(processor, f"{m}_token"): m for m in ("image", "video") if getattr(processor, f"{m}_token", None)}
    reserved = [*tokens, *processor.tokenizer.convert_ids_to_tokens(list(media_token_ids))]
    for message in messages:
        for part in _parts(message):
            if any(token in part.get("text", "") for token in reserved):
                raise ItemError("prompt", "placeholder_in_text", f"the text contains one of {', '.join(reserved)}")
    rendered = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    pieces = re.split("|".join(f"({re.escape(token)})" for token in tokens), rendered)
    shown = [piece for piece in pieces if piece is not None]
    if [tokens[piece] for piece in shown if piece in tokens] != [modality for modality, _ in media]:
        raise ItemError(
            "prompt", "template_mismatch", "the chat template does not show every media item once, in order"
        )
    placeholders = iter(media)
    text = "".join(next(placeholders)[1].text if piece in tokens else piece for piece in shown)
    runs = [run for _, placeholder in media for run in placeholder.runs]
    spliced = expand(processor.tokenizer(text)["input_ids"], set(media_token_ids), runs)
    if len(spliced) > max_tokens:
        raise ItemError(
            "prompt", "prompt_too_long", f"{len(spliced):,} tokens, generate.max_prompt_tokens allows {max_tokens:,}"
        )
    return spliced


def item_seed(seed: int, item_id: str) -> int:
    """A 63-bit seed from the job's seed and the item's id."""
    digest = hashlib.sha256(f"{seed}\n{item_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return list(content or [])
