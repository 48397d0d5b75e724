"""Operations, bytes and times against arithmetic done by hand."""

import pytest

from pipeline.language.kv_cache import KvCache
from pipeline.planning.estimate import (
    EncodedMedia,
    Network,
    Work,
    break_even_months,
    encode_work,
    prompt_work,
    second_question,
    text_work,
)

TOWER = Network(parameters=1_000, layers=2, width=8)


def test_operations_of_a_sequence() -> None:
    # 2 * 1,000 * 3 = 6,000; attention: 4 * 2 layers * 3 tokens * 3 positions * 8 = 576
    assert TOWER.forward_flops(3) == 6_576
    assert TOWER.forward_flops(3, causal=True) == 6_288
    assert Network(parameters=1_000).forward_flops(3) == 6_000


def test_operations_of_an_answer() -> None:
    # Behind a prompt of 5, the two tokens attend to 6 and 7 positions: 2 * 1,000 * 2 + 4 * 2 * 8 * 13
    assert TOWER.answer_flops(5, 2) == 4_000 + 832


def test_palm_540b() -> None:
    # Appendix B of the paper: L = 118, H = 48, Q = 256, T = 2,048, N = 540.35e9; 6 N + 12 L H Q T a token trained on
    palm = Network(parameters=540_350_000_000, layers=118, width=48 * 256)
    training = 6 * 540_350_000_000 + 12 * 118 * 48 * 256 * 2_048
    assert 3 * palm.forward_flops(2_048) == 2_048 * training


def media(grid: tuple[int, int, int], **changes: float) -> EncodedMedia:
    known = {"feature_length": 6, "frame_bytes": 300, "store_bytes": 4_096, "decode_seconds": 0.25}
    return EncodedMedia(grid=grid, **{**known, **changes})  # type: ignore[arg-type]


def test_work_of_encoder_batches() -> None:
    image, video = media((1, 4, 6)), media((2, 3, 2), feature_length=3, decode_seconds=1.5)
    found = encode_work([(48, [image, image]), (16, [video])], TOWER)
    image_flops = 2_000 * 24 + 64 * 24**2
    video_flops = 2 * (2_000 * 6 + 64 * 6**2)  # each of its two parts attends to itself
    assert found == Work(
        encodes=3,
        encode_batches=2,
        feature_tokens=15,
        patches=60,
        computed_tokens=64,
        frame_bytes=900,
        store_bytes=12_288,
        decode_core_ms=2_000,
        encoder_flops=2 * image_flops + video_flops * 16 // 12,  # 12 patches are computed as 16
    )


def test_work_of_prompts() -> None:
    found = prompt_work([[10, 7], [3]], TOWER, max_new_tokens=4, kv_cache=KvCache(100))
    prefill = 2 * (2_000 * 10 + 32 * 100) + (2_000 * 3 + 32 * 9)
    answers = 2 * (2_000 * 4 + 64 * (11 + 12 + 13 + 14)) + (2_000 * 4 + 64 * (4 + 5 + 6 + 7))
    assert found == Work(
        prompts=3,
        prompt_batches=2,
        prompt_tokens=20,
        prompt_padded_tokens=3,
        most_answer_tokens=12,
        kv_bytes=2 * 14 * 100 + 7 * 100,
        prefill_flops=prefill,
        answer_flops=answers,
    )


def test_key_values_of_the_worked_example() -> None:
    # 32 layers, 8 heads, 128 dimensions, 2 bytes: 2 * 32 * 8 * 128 * 2 = 131,072 bytes a token; of 576 tokens 72 MiB
    assert prompt_work([[576]], TOWER, max_new_tokens=0, kv_cache=KvCache(131_072)).kv_bytes == 72 * 2**20


def test_work_of_texts() -> None:
    found = text_work([[4, 2]], TOWER)
    assert (found.texts, found.text_tokens, found.text_padded_tokens) == (2, 6, 2)
    assert found.text_flops == 2 * (2_000 * 4 + 64 * 16)


def test_work_adds_up_and_comes_back() -> None:
    both = Work(encodes=2, text_tokens=5) + Work(encodes=3, kv_bytes=7)
    assert both == Work(encodes=5, text_tokens=5, kv_bytes=7)
    assert Work.from_counts({**both.as_dict(), "something_else": 1}) == both
    assert Work.from_counts({"encodes": 5}) == Work(encodes=5)


def test_the_second_question_of_the_fields_trace() -> None:
    trace = {
        "media_decode": 35.0,
        "mm_processor": 28.0,
        "encoder_queue": 40.0,
        "vision_encode": 115.0,
        "feature_transfer": 12.0,
        "llm_prefill": 190.0,
        "llm_decode": 45.0,
    }
    # 465 - (28 + 40 + 115) = 282; 282 - 35 = 247
    assert second_question(trace) == {"first": 465.0, "features_reused": 282.0, "media_reused": 247.0}


def test_how_long_features_are_worth_holding() -> None:
    # 500 GB at 0.02 cost 10 a month; computing them again costs 25
    assert break_even_months(500_000_000_000, 25.0, 0.02) == pytest.approx(2.5)
    assert break_even_months(0, 25.0, 0.02) is None
