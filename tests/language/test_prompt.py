from typing import Any

import pytest
from transformers import AutoProcessor

from pipeline.errors import ItemError
from pipeline.language.prompt import PromptWriter, chat_messages, item_seed
from pipeline.models.location import resolve_model
from pipeline.schema import MediaItem, Placeholder, Request

IMAGE = MediaItem(uri="a.jpg")


@pytest.fixture(scope="module")
def processor() -> Any:
    return AutoProcessor.from_pretrained(resolve_model("demo:captioner"))


def test_media_come_before_the_prompt_and_a_request_s_prompt_wins() -> None:
    request = Request(item_index=0, id="a", media=(IMAGE,), prompt="Mine?")
    [message] = chat_messages(request, ["image"], prompt="The job's?", system=None)
    assert message == {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Mine?"}]}


def test_a_system_prompt_leads_unless_the_chat_brings_its_own() -> None:
    request = Request(item_index=0, id="a")
    assert chat_messages(request, [], prompt="p", system="Be brief.")[0]["role"] == "system"
    own = Request(item_index=0, id="a", messages=({"role": "system", "content": "x"}, {"role": "user", "content": "y"}))
    assert [m["role"] for m in chat_messages(own, [], prompt="p", system="Be brief.")] == ["system", "user"]


@pytest.mark.parametrize("shown", [[], ["video"], ["image", "image"]])
def test_messages_must_show_the_request_s_media(shown: list[str]) -> None:
    messages = ({"role": "user", "content": [{"type": kind} for kind in shown]},)
    request = Request(item_index=0, id="a", media=(IMAGE,), messages=messages)
    with pytest.raises(ItemError, match="media_mismatch"):
        chat_messages(request, ["image"], prompt="p", system=None)


IMAGE_PAD, VIDEO_PAD = "<|image_pad|>", "<|video_pad|>"


def ids_of(processor: Any, messages: list[dict[str, Any]], media: list[Any], max_tokens: int = 500) -> list[int]:
    pads = processor.tokenizer.convert_tokens_to_ids([IMAGE_PAD, VIDEO_PAD])
    return PromptWriter(processor, media_token_ids=pads, max_tokens=max_tokens).token_ids(messages, media)


def test_placeholders_are_shown_in_order_as_the_processor_writes_them(processor: Any) -> None:
    content = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "video"}]
    messages = [{"role": "user", "content": content}]
    clip = Placeholder(text=f"<0.5 seconds>{VIDEO_PAD}<1.5 seconds>{VIDEO_PAD}", runs=(2, 3))
    ids = ids_of(processor, messages, [("image", Placeholder(text=IMAGE_PAD, runs=(4,))), ("video", clip)])
    rendered = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    written = f"<0.5 seconds>{VIDEO_PAD * 2}<1.5 seconds>{VIDEO_PAD * 3}"
    expected = rendered.replace(IMAGE_PAD, IMAGE_PAD * 4).replace(VIDEO_PAD, written)
    assert ids == processor.tokenizer(expected)["input_ids"]


def test_a_prompt_is_never_cut(processor: Any) -> None:
    messages = [{"role": "user", "content": [{"type": "image"}]}]
    with pytest.raises(ItemError, match="prompt_too_long"):
        ids_of(processor, messages, [("image", Placeholder(text=IMAGE_PAD, runs=(99,)))], max_tokens=99)


@pytest.mark.parametrize("content", [f"see {IMAGE_PAD}", [{"type": "text", "text": VIDEO_PAD}]])
def test_a_placeholder_in_the_user_s_text_is_refused(processor: Any, content: Any) -> None:
    with pytest.raises(ItemError, match="placeholder_in_text"):
        ids_of(processor, [{"role": "user", "content": content}], [])


def test_a_chat_that_the_template_refuses_is_named(processor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "chat_template", "{{ raise_exception('roles must take turns') }}")
    with pytest.raises(ItemError, match=r"chat_refused: .*roles must take turns"):
        ids_of(processor, [{"role": "assistant", "content": "a"}], [])


def test_a_seed_belongs_to_job_and_item() -> None:
    seeds = {item_seed(job, item) for job in (0, 1) for item in ("a", "b")}
    assert len(seeds) == 4
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert item_seed(0, "a") == item_seed(0, "a")
