"""Media files: every format decodes to what was drawn; a demo set is whole, repeatable and written once."""

import io
import json
import random
import uuid
from pathlib import Path

import av
import fsspec
import numpy as np
import pytest
from PIL import Image

from pipeline.demo import media, scenes
from pipeline.demo.scenes import Scene

STILL = Scene(kind="image", shape="circle", colour="red", size="large", background="white", place="at the right")
MOVING = Scene(kind="video", shape="circle", colour="blue", size="large", background="white", place="moving down")


def decode_video(data: bytes) -> tuple[list[np.ndarray], list[float], list[int]]:
    """(frames, seconds since the first, picture types), all frames."""
    with av.open(io.BytesIO(data)) as container:
        frames = list(container.decode(video=0))
    return (
        [frame.to_ndarray(format="rgb24") for frame in frames],
        [frame.time - frames[0].time for frame in frames],
        [int(frame.pict_type) for frame in frames],
    )


@pytest.mark.parametrize("format", media.IMAGE_FORMATS)
def test_images_survive_their_format(format: media.ImageFormat) -> None:
    drawn = scenes.draw_image(STILL, random.Random(1))
    data = media.encode_image(drawn, format, random.Random(2))
    image = Image.open(io.BytesIO(data))
    assert image.format == format.upper()
    decoded = np.asarray(image.convert("RGB"))
    assert decoded.shape == drawn.shape
    height, width, _ = drawn.shape
    x, y = scenes.POSITIONS["at the right"]
    at_centre = decoded[int(y * height), int(min(x * width, width - 0.25 * min(height, width)))]
    assert np.abs(at_centre.astype(int) - scenes.COLOURS["red"]).max() < 40
    if format == "png":
        np.testing.assert_array_equal(decoded, drawn)
    assert data == media.encode_image(drawn, format, random.Random(2))


@pytest.mark.parametrize("codec", media.VIDEO_CODECS)
def test_clips_survive_their_codec(codec: media.VideoCodec) -> None:
    drawn, fps = scenes.draw_clip(MOVING, random.Random(1))
    data = media.encode_video(drawn, fps, codec)
    frames, seconds, _ = decode_video(data)
    assert len(frames) == len(drawn)
    np.testing.assert_allclose(seconds, np.arange(len(drawn)) / fps, atol=0.001)
    assert np.abs(np.stack(frames).astype(int) - drawn).mean() < 8
    assert data == media.encode_video(drawn, fps, codec)
    with av.open(io.BytesIO(data)) as container:
        assert container.streams.video[0].codec_context.name == codec


def test_b_frames_are_asked_for() -> None:
    drawn, fps = scenes.draw_clip(MOVING, random.Random(1))
    b_picture = int(av.video.frame.PictureType.B)
    assert b_picture not in decode_video(media.encode_video(drawn, fps, "h264"))[2]
    assert b_picture in decode_video(media.encode_video(drawn, fps, "h264", b_frames=2))[2]


def test_what_cannot_be_encoded_is_refused() -> None:
    drawn, fps = scenes.draw_clip(MOVING, random.Random(1))
    with pytest.raises(ValueError, match="even sides"):
        media.encode_video(drawn[:, :-1], fps, "h264")
    with pytest.raises(ValueError, match="at least one frame"):
        media.encode_video([], fps, "h264")
    with pytest.raises(ValueError, match="one of h264"):
        media.encode_video(drawn, fps, "theora")
    with pytest.raises(ValueError, match="one of jpeg"):
        media.encode_image(drawn[0], "bmp", random.Random(1))


def files_under(folder: str) -> dict[str, bytes]:
    fs, path = fsspec.core.url_to_fs(folder)
    return {name.removeprefix(path).lstrip("/"): fs.cat_file(name) for name in fs.find(path)}


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "demo") if request.param == "local" else f"memory://demo-{uuid.uuid4().hex}"


def test_a_demo_set_is_whole_and_true(folder: str) -> None:
    media.make_demo_media(f"{folder}/manifest.jsonl", images=6, videos=3, seed=4)
    files = files_under(folder)
    manifest = [json.loads(line) for line in files["manifest.jsonl"].splitlines()]
    truth = [json.loads(line) for line in files["truth.jsonl"].splitlines()]
    assert [row["id"] for row in manifest] == [row["id"] for row in truth]
    listings = {"manifest.jsonl", "truth.jsonl", "labels.jsonl"}
    assert {row["media"][0]["uri"] for row in manifest} == files.keys() - listings
    kinds = [row["media"][0]["modality"] for row in manifest]
    assert kinds == ["image", "video", "image"] * 3
    suffixes = sorted(row["media"][0]["uri"].rpartition(".")[2] for row in manifest)
    assert suffixes == ["jpg", "jpg", "mp4", "mp4", "png", "png", "webm", "webp", "webp"]
    for row, kind in zip(truth, kinds, strict=True):
        assert row.keys() == {"id", *scenes.QUESTIONS[kind]}
        assert row["id"].startswith(kind)
        assert row[scenes.COLOUR] in row[scenes.DESCRIBE]
    labels = [json.loads(line) for line in files["labels.jsonl"].splitlines()]
    assert [row["id"] for row in labels] == [row["id"] for row in truth]
    for label, row in zip(labels, truth, strict=True):
        assert len(label["expected"]) == 4
        assert all(phrase in row[scenes.DESCRIBE] for phrase in label["expected"].values())


def test_a_seed_fixes_the_demo_sets_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 4), ("b", 4), ("c", 5)):
        media.make_demo_media(f"{tmp_path / name}/manifest.jsonl", images=4, videos=4, seed=seed)
    first, again, other = (files_under(str(tmp_path / name)) for name in "abc")
    assert first == again
    assert first != other


def test_an_existing_manifest_is_left_alone(folder: str) -> None:
    fs, path = fsspec.core.url_to_fs(f"{folder}/manifest.jsonl")
    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    fs.pipe_file(path, b"mine")
    media.make_demo_media(f"{folder}/manifest.jsonl", images=2, videos=1, seed=4)
    assert files_under(folder) == {"manifest.jsonl": b"mine"}


def test_a_set_left_half_made_is_made_again(folder: str) -> None:
    media.make_demo_media(f"{folder}/manifest.jsonl", images=3, videos=1, seed=4)
    whole = files_under(folder)
    fs, path = fsspec.core.url_to_fs(folder)
    fs.rm_file(f"{path}/manifest.jsonl")
    fs.pipe_file(f"{path}/truth.jsonl", b"")
    media.make_demo_media(f"{folder}/manifest.jsonl", images=3, videos=1, seed=4)
    assert files_under(folder) == whole
