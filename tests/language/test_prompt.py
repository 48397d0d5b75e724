from typing import Any

import pytest
from transformers import AutoProcessor

from pipeline.errors import ItemError
from pipeline.language.prompt import chat_messages, item_seed, prompt_ids
from pipeline.models.vision_language import resolve_model
from pipeline.schema import MediaItem, Request

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


def test_placeholders_are_replaced_in_order(processor: Any) -> None:
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "video"}]},
    ]
    ids = prompt_ids(processor, messages, [("image", [901, 902]), ("video", [903])], max_tokens=100)
    assert [token for token in ids if token > 900] == [901, 902, 903]
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    plain = processor.tokenizer(text)["input_ids"]
    assert len(ids) == len(plain) + 1


def test_a_prompt_is_never_cut(processor: Any) -> None:
    messages = [{"role": "user", "content": [{"type": "image"}]}]
    with pytest.raises(ItemError, match="prompt_too_long"):
        prompt_ids(processor, messages, [("image", [7] * 99)], max_tokens=99)


@pytest.mark.parametrize("content", ["see <|image_pad|>", [{"type": "text", "text": "<|video_pad|>"}]])
def test_a_placeholder_in_the_user_s_text_is_refused(processor: Any, content: Any) -> None:
    with pytest.raises(ItemError, match="placeholder_in_text"):
        prompt_ids(processor, [{"role": "user", "content": content}], [], max_tokens=99)


def test_a_seed_belongs_to_job_and_item() -> None:
    seeds = {item_seed(job, item) for job in (0, 1) for item in ("a", "b")}
    assert len(seeds) == 4
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert item_seed(0, "a") == item_seed(0, "a")
