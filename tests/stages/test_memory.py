"""What workers declare. The bars are arithmetic over sizes named here."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from pipeline.config import Config
from pipeline.planning.buckets import BatchBudget, ShapedMedia, plan_window
from pipeline.planning.geometry import PatchRule
from pipeline.schema import Geometry
from pipeline.stages import memory
from pipeline.stages.context import StageContext
from pipeline.stages.identity import CheckedModel, EncoderIdentity

MB = 2**20
RULE = PatchRule(patch_size=16, merge_size=2, temporal_patch_size=2, min_pixels=4096, max_pixels=2**20)
# A patch of 16 x 16 pixels in three colours, of two frames in a video.
IMAGE_PATCH, VIDEO_PATCH = 768, 1536
ITEM = 3 * 2**20


@pytest.fixture
def context(make_config: Callable[..., Config]) -> Callable[..., StageContext]:
    """A run of a model whose encoder has 10 and whose language model has 1,000 weights."""

    def make(*modalities: str, ruled: tuple[str, ...] | None = None, **changes: Any) -> StageContext:
        checked = CheckedModel(
            identity=EncoderIdentity(weights="", processor="", placeholder="", precision=""),
            verdicts=dict.fromkeys(modalities, ""),
            rules=dict.fromkeys(modalities if ruled is None else ruled, RULE),
            sizes={},
            parameters={"encoder": 10, "language": 1_000},
        )
        return StageContext(config=make_config("", **changes), run_url="memory://run", checked=checked)

    return make


@pytest.mark.parametrize(
    ("modalities", "ruled", "tokens", "items", "expected"),
    [
        (("image",), ("image",), 10_000, 16, 10_000 * IMAGE_PATCH),
        (("image", "video"), ("image", "video"), 10_000, 16, 10_000 * VIDEO_PATCH),
        (("image", "video"), ("image", "video"), 10_000, 2, 2 * ITEM),
        (("image", "video"), ("image", "video"), 100, 16, ITEM),  # more than a batch by itself
        (("image", "video"), ("image", "video"), 100_000, 32, 64 * MB),
        (("image", "video"), ("image",), 100, 1, 64 * MB),  # videos come at any size
    ],
)
def test_a_batch_is_bounded_by_its_limits_and_the_processor_s(
    context: Callable[..., StageContext],
    modalities: tuple[str, ...],
    ruled: tuple[str, ...],
    tokens: int,
    items: int,
    expected: int,
) -> None:
    of = context(*modalities, ruled=ruled, encode={"max_batch_tokens": tokens, "max_batch_items": items})
    assert memory.batch_bytes(of) == expected
    assert memory.decode_bytes(of) == 300 * MB + 6 * expected
    changes = {"max_batch_tokens": tokens, "max_batch_items": items}
    alone = context(*modalities, ruled=ruled, encode=changes, decode={"sandbox": "off"})
    assert memory.decode_bytes(alone) == 300 * MB + 4 * expected


def test_planned_batches_stay_below_what_is_declared(context: Callable[..., StageContext]) -> None:
    for modality, num_frames, t in (("image", 1, 1), ("video", 6, 3)):
        geometry = Geometry(
            grid=(t, 20, 30), merge_size=2, feature_length=t * 150, original_size=(9, 9), resized_size=(320, 480)
        )
        items = [
            ShapedMedia(position=i, modality=modality, num_frames=num_frames, geometry=geometry, identity=str(i))
            for i in range(300)
        ]
        for max_tokens, max_items in itertools.product((100, 2_000, 20_000, 1_000_000), (1, 5, 1_000)):
            of = context("image", "video", encode={"max_batch_tokens": max_tokens, "max_batch_items": max_items})
            batches = plan_window(0, items, BatchBudget(max_items=max_items, max_tokens=max_tokens))
            assert max(sum(item.frame_bytes for item in batch.items) for batch in batches) <= memory.batch_bytes(of)


def test_actors_declare_the_weights_of_their_half(context: Callable[..., StageContext]) -> None:
    full = context("image", encode={"dtype": "float32"}, generate={"dtype": "float32"})
    half = context("image", encode={"dtype": "bfloat16"}, generate={"dtype": "float16"})
    assert memory.encode_bytes(full) - memory.encode_bytes(half) == 10 * 2
    assert memory.generate_bytes(full) - memory.generate_bytes(half) == 1_000 * 2


@pytest.mark.parametrize(("items", "inline", "carried"), [(100, 1_000, 100_000), (4096, 2**20, 512 * MB)])
def test_planning_declares_the_bytes_that_it_carries(
    make_config: Callable[..., Config], items: int, inline: int, carried: int
) -> None:
    config = make_config("", ray={"window_items": items}, decode={"max_inline_bytes": inline})
    assert memory.plan_bytes(config) == 450 * MB + carried
    alone = make_config("", ray={"window_items": items}, decode={"max_inline_bytes": inline, "sandbox": "off"})
    assert memory.plan_bytes(alone) == 250 * MB + carried


def test_planning_texts_declares_the_sandbox_that_reads_pages(make_config: Callable[..., Config]) -> None:
    of = {
        (job, mode): memory.text_plan_bytes(make_config("", job=job, decode={"sandbox": mode}))
        for job in ("embed_backfill", "index_documents")
        for mode in ("auto", "off")
    }
    assert of.pop(("index_documents", "auto")) == 700 * MB
    assert set(of.values()) == {600 * MB}
