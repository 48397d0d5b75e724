"""Where stages belong, against arithmetic done by hand."""

import pytest

from pipeline.planning.placement import decode_cores_per_accelerator, placement, pools
from tests.planning.test_calibration import SECONDS


def test_cores_that_keep_an_accelerator_busy() -> None:
    assert decode_cores_per_accelerator(SECONDS) == 20
    assert decode_cores_per_accelerator({"vision_encode": 3.0}) is None


@pytest.mark.parametrize(
    ("cores", "separate", "queue", "transfer"),
    [
        (8.0, True, 1.5, 1.0),  # 2,000 / 8 = 250 s for 100 s of encoding: it waits 1.5 s a second; 200 - 100 elsewhere
        (10.0, False, 1.0, 1.0),
        (20.0, False, 0.0, 1.0),
    ],
)
def test_where_to_decode(cores: float, separate: bool, queue: float, transfer: float) -> None:
    found = placement(SECONDS, cores)
    assert found is not None
    assert (found.separate, found.queue_seconds, found.transfer_seconds) == (separate, queue, transfer)
    assert placement({"media_decode": 1.0}, cores) is None


def test_decoding_that_keeps_up_leaves_accelerators_in_turn() -> None:
    # 2,000 / 32 = 62.5 s of decoding, 200 / 4 = 50 s of frames, then 425 / 4 = 106.25 s of answers. Apart, one that
    # encodes takes 200 s and three that answer 435 / 3 = 145; two and two 435 / 2.
    found = pools(SECONDS, 10.0, 4, 32.0)
    assert found is not None and not found.separate
    assert (found.in_turn_seconds, found.queue_seconds) == (168.75, 12.5)
    assert (found.encoders, found.apart_seconds, found.transfer_seconds) == (1, 200.0, 10.0)


def test_accelerators_that_wait_for_decoders_answer_meanwhile() -> None:
    # 2,000 / 8 = 250 s of decoding, however many encode, and then 106.25; apart 145 of them are beside the 250.
    found = pools(SECONDS, 10.0, 4, 8.0)
    assert found is not None and found.separate
    assert (found.in_turn_seconds, found.queue_seconds) == (356.25, 200.0)
    assert (found.encoders, found.apart_seconds) == (1, 250.0)


def test_features_that_are_slow_to_carry_keep_them_in_turn() -> None:
    found = pools(SECONDS, 1_000.0, 4, 8.0)  # 1,425 / 3
    assert found is not None and not found.separate and found.apart_seconds == 475.0


def test_without_both_or_with_one_accelerator_there_is_no_choice() -> None:
    assert pools(SECONDS, 10.0, 1, 8.0) is None
    assert pools(SECONDS, None, 4, 8.0) is None
    assert pools({name: SECONDS[name] for name in ("media_decode", "vision_encode")}, 10.0, 4, 8.0) is None
    assert pools({name: SECONDS[name] for name in ("feature_transfer", "llm_prefill")}, 10.0, 4, 8.0) is None
