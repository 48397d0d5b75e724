"""Pages of one document among the stages: each has a source, a content, a key and pixels of its own."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pillow_heif
import pytest
from PIL import Image

from pipeline.config import Config
from pipeline.media.backend import HEIF_BACKEND, IMAGE_BACKEND, PAGE_BACKEND
from pipeline.media.document import probe_page, render_page
from pipeline.media.resize import resize_frames
from pipeline.planning.windows import Window
from pipeline.runs.run import start_run
from pipeline.schema import Geometry, ImageRules, MediaItem, SamplePlan
from pipeline.stages.checked_model import checked_model
from pipeline.stages.context import StageContext
from pipeline.stages.decode import DecodeBatches
from pipeline.stages.encode_plan import written_plan
from pipeline.stages.identity import EncoderIdentity, media_content, media_source, sha256_content
from pipeline.stages.rows import PlannedMedia, batch_table
from tests.media.pdf_files import Page, make_pdf, rectangle

DATA = make_pdf([Page(content=rectangle(0, 0, 300, 300, (60 * n, 0, 0))) for n in range(3)])
SIZE = (96, 72)
IDENTITY = EncoderIdentity(weights="w", processor="p", placeholder="l", precision="float32")


def saved(image: Image.Image, format: str) -> bytes:
    file = io.BytesIO()
    image.save(file, format)
    return file.getvalue()


def planned(page: int | None) -> PlannedMedia:
    media = MediaItem(data=DATA, modality="page", page=page)
    return PlannedMedia(
        position=page or 0,
        item_index=page or 0,
        media_index=0,
        tenant="",
        media=media,
        source_id=media_source(media, "etag:x", 144.0),
        content=media_content(media, sha256_content(DATA)),
        probe=probe_page(DATA, page or 0, num_bytes=len(DATA), dpi=144.0, name="a.pdf"),
        requested=SamplePlan(pts_seconds=(0.0,)),
        geometry=Geometry(
            grid=(1, 6, 4), merge_size=2, feature_length=6, original_size=(1584, 1224), resized_size=SIZE
        ),
    )


def test_each_page_is_a_source_and_a_content_of_its_own() -> None:
    pages = [planned(n) for n in range(3)]
    assert len({page.source_id for page in pages}) == len({page.content for page in pages}) == 3
    assert media_source(pages[0].media, "etag:x", 72.0) != pages[0].source_id  # another size was probed
    image = MediaItem(uri="a.png")
    assert media_source(image, "etag:x", 144.0) == "etag:x"
    assert media_content(image, sha256_content(DATA)) == sha256_content(DATA)


def test_each_page_has_a_key_of_its_own_that_names_what_draws() -> None:
    terms = [IDENTITY.key_terms(page, cast(str, page.content)) for page in (planned(0), planned(1))]
    assert terms[0].digest() != terms[1].digest()
    assert {each.decode_backend for each in terms} == {f"{PAGE_BACKEND},1224x1584"}
    image = dataclasses.replace(planned(None), probe=dataclasses.replace(planned(None).probe, modality="image"))
    assert IDENTITY.key_terms(image, "sha256:x").decode_backend == IMAGE_BACKEND


def test_the_keys_of_jpegs_say_whether_their_decoder_scaled() -> None:
    fast = dataclasses.replace(IDENTITY, dct_scaled=True)
    plain = planned(None)
    for container, same in (("jpeg", False), ("png", True), ("mp4", True)):
        modality = "video" if container == "mp4" else "image"
        probe = dataclasses.replace(plain.probe, modality=modality, container=container)
        item = dataclasses.replace(plain, probe=probe)
        keys = {identity.key_terms(item, "sha256:x").digest() for identity in (IDENTITY, fast)}
        assert len(keys) == (1 if same else 2)
    assert fast.digest() != IDENTITY.digest()  # of vectors, which are of one space only if they are made alike


def key_of(container: str, rules: ImageRules) -> str:
    """Of an item in that container, under those rules."""
    plain = planned(None)
    probe = dataclasses.replace(plain.probe, modality="video" if container == "mp4" else "image", container=container)
    identity = dataclasses.replace(IDENTITY, image=rules)
    return identity.key_terms(dataclasses.replace(plain, probe=probe), "sha256:x").digest()


@pytest.mark.parametrize(
    ("rules", "changed"),
    [
        (ImageRules(), set()),
        (ImageRules(background="#000000"), {"png", "heif"}),
        (ImageRules(keep_truncated=True), {"jpeg", "png", "heif"}),
    ],
)
def test_the_keys_of_images_say_by_which_rules_they_were_decoded(rules: ImageRules, changed: set[str]) -> None:
    for container in ("jpeg", "png", "heif", "mp4"):
        assert (key_of(container, rules) != key_of(container, ImageRules())) is (container in changed)
    assert (dataclasses.replace(IDENTITY, image=rules).digest() != IDENTITY.digest()) is bool(changed)


def test_the_key_of_a_heic_names_what_decodes_it() -> None:
    assert f"{IMAGE_BACKEND},pillow-heif-{pillow_heif.__version__}" == HEIF_BACKEND
    assert key_of("heif", ImageRules()) != key_of("png", ImageRules())


def test_captioning_quarantines_pages_and_documents_by_name(
    tmp_path: Path, make_config: Callable[..., Config], write_manifest: Callable[..., Path]
) -> None:
    (tmp_path / "a.pdf").write_bytes(DATA)
    (tmp_path / "cut.pdf").write_bytes(DATA[:300])
    manifest = write_manifest(
        [
            {"id": "a page", "media": [{"uri": "a.pdf", "page": 1}]},
            {"id": "a page behind the last", "media": [{"uri": "a.pdf", "page": 3}]},
            {"id": "a page of what is left", "media": [{"uri": "cut.pdf", "page": 0}]},
            {"id": "a document", "uri": "a.pdf"},
            {"id": "not an image", "image": "a.pdf"},
        ]
    )
    config = make_config(manifest)
    with start_run(config) as run:
        context = StageContext(config=config, run_url=run.folder.url, checked=checked_model(config, "cpu"))
        plan = written_plan(context, Window(index=0, start=0, stop=run.manifest.num_items))
    assert [(failure["stage"], failure["code"]) for failure in plan.failures] == [
        ("admit", "modality_not_supported"),
        ("probe", "no_such_page"),
        ("probe", "truncated"),
        ("probe", "unknown_format"),
        ("probe", "modality_mismatch"),
    ]


def test_planned_pages_come_back_from_their_rows() -> None:
    assert PlannedMedia.from_row(planned(2).to_row()) == planned(2)


@pytest.mark.parametrize("height", [1584, 1583])
def test_a_batch_of_images_is_decoded_by_the_rules_and_at_the_size_that_was_admitted(
    height: int, make_config: Callable[..., Config]
) -> None:
    clear = saved(Image.new("RGBA", (1224, height)), "PNG")
    media = MediaItem(data=clear, modality="image")
    probe = dataclasses.replace(planned(None).probe, modality="image", container="png")
    item = dataclasses.replace(planned(None), media=media, content=sha256_content(clear), probe=probe)
    identity = dataclasses.replace(IDENTITY, image=ImageRules(background="#0a0b0c"))
    context = decoding(identity, make_config("images"))
    row: dict[str, Any] = {"window": 0, "batch": 0, "digest": "d", "items": [item.to_row()]}
    [decoded] = DecodeBatches(context)(batch_table([row]))
    [failure] = [each["failure"] for each in decoded.to_pylist()[0]["items"]]
    pixels = np.frombuffer(decoded["pixels"][0].as_buffer(), np.uint8).reshape(-1, 3)
    if height == 1584:
        assert failure is None and len(pixels) == SIZE[0] * SIZE[1] and np.all(pixels == (10, 11, 12))
    else:
        assert failure["code"] == "wrong_size" and len(pixels) == 0


def decoding(identity: EncoderIdentity, config: Config) -> StageContext:
    """What decoding needs of a context, without a model."""
    return cast(
        StageContext,
        SimpleNamespace(identity=identity, config=config, sandbox=None, logging=lambda **ids: nullcontext()),
    )


def test_a_batch_of_pages_is_decoded(make_config: Callable[..., Config]) -> None:
    items = [planned(n).to_row() for n in (2, 0, 1)]
    row: dict[str, Any] = {"window": 0, "batch": 0, "digest": "d", "items": items}
    items[2]["media"]["page"] = 9
    context = decoding(IDENTITY, make_config("pages"))
    [decoded] = DecodeBatches(context)(batch_table([row]))
    pixels = np.frombuffer(decoded["pixels"][0].as_buffer(), np.uint8).reshape(2, *SIZE, 3)
    for found, page in zip(pixels, (2, 0), strict=True):
        assert np.array_equal(found, resize_frames(render_page(DATA, page, (1584, 1224))[None], SIZE)[0])
    [batch] = decoded.to_pylist()
    assert [item["failure"] and item["failure"]["code"] for item in batch["items"]] == [None, None, "no_such_page"]
