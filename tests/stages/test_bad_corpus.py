"""Files and requests that cannot be processed: each in quarantine under its own code, everything else captioned."""

from __future__ import annotations

import json
import random
import struct
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from pipeline.config import Config, parse_config
from pipeline.planning.windows import Window, plan_windows
from pipeline.stages.generate_finish import finish_generate_window
from pipeline.stages.window_plan import load_plan
from tests.media.media_files import Recipe, make_audio, make_image, make_video, riff_wave
from tests.stages.line import Line, read_parts

NUM_MEDIA_ALLOWED, NUM_TOKENS_ALLOWED = 3, 120
WINDOW_ITEMS = {"first_items": 10, "full_items": 20}
FASTSTART = {"movflags": "faststart"}  # the header in front: a file cut off behind it still opens
WEBM = {"container": "webm", "library": "libvpx-vp9", "options": {"cpu-used": "8", "deadline": "realtime"}}

# id → (files or words of the request, stage, code)
BAD_FILES = {
    "empty": ("empty.jpg", "fetch", "empty_file"),
    "missing": ("nowhere.png", "fetch", "not_found"),
    "directory": ("folder.jpg", "fetch", "not_a_file"),
    "jpeg-cut": ("cut.jpg", "decode", "truncated"),
    "png-cut": ("cut.png", "decode", "truncated"),
    "mp4-cut": ("cut.mp4", "decode", "truncated"),
    "webm-cut": ("cut.webm", "decode", "truncated"),
    "mp4-without-header": ("headless.mp4", "probe", "corrupt_header"),
    "jpeg-head-only": ("head.jpg", "probe", "corrupt_header"),
    "text": ("text.jpg", "probe", "unknown_format"),
    "random": ("random.bin", "probe", "unknown_format"),
    "png-named-mp4": ("png.mp4", "probe", "modality_mismatch"),
    "mp4-named-jpg": ("mp4.jpg", "probe", "modality_mismatch"),
    "aac-only": ("sound.mp4", "probe", "no_video_stream"),
    "wave": ("sound.wav", "admit", "modality_not_supported"),
    "bomb": ("bomb.png", "admit", "over_budget_pixels"),
}
GOOD_FILES = ("good.jpg", "good.png", "good.webp", "good.mp4", "good.webm", "png_named.jpg", "webm_named.mp4")


def png_header(width: int, height: int) -> bytes:
    """A PNG of that size as its header says, with pixels for none of it."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(3))) + chunk(b"IEND", b"")


def write_corpus(folder: Path) -> None:
    """Every file that the tables name, but the missing one."""
    jpeg, png = make_image("JPEG"), make_image("PNG")
    mp4, faststart = make_video(Recipe(num_frames=45)), make_video(Recipe(container_options=FASTSTART))
    webm = make_video(Recipe(**WEBM))
    files = {
        "empty.jpg": b"",
        "cut.jpg": jpeg[: len(jpeg) * 4 // 5],  # its tables alone are more than half of it
        "cut.png": png[: len(png) // 2],
        "cut.mp4": faststart[: len(faststart) // 2],
        "cut.webm": webm[: len(webm) // 2],
        "headless.mp4": mp4[: len(mp4) // 2],
        "head.jpg": jpeg[:20],
        "text.jpg": b"Dear photographer,\n\nplease find the picture attached.\n" * 20,
        "random.bin": b"\x07" + random.Random(5).randbytes(5000),
        "png.mp4": png,
        "mp4.jpg": mp4,
        "sound.mp4": make_audio("mp4", "aac"),
        "sound.wav": riff_wave(),
        "bomb.png": png_header(30_000, 30_000),
        "good.jpg": jpeg,
        "good.png": png,
        "good.webp": make_image("WEBP"),
        "good.mp4": faststart,
        "good.webm": webm,
        "png_named.jpg": png,
        "webm_named.mp4": webm,
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)
    (folder / "folder.jpg").mkdir()


def requests(folder: Path) -> tuple[list[dict[str, Any]], dict[str, tuple[str, str]]]:
    """Manifest rows, good and bad in turns, and the (stage, code) of the bad ones by id."""
    shown = {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "What moves?"}]}
    bad = [{"id": name, "media": [str(folder / file)]} for name, (file, _, _) in BAD_FILES.items()]
    expected = {name: (stage, code) for name, (_, stage, code) in BAD_FILES.items()}
    others: list[tuple[str, list[str], dict[str, Any], str, str]] = [
        ("good-and-bad", ["good.jpg", "cut.png"], {}, "decode", "truncated"),
        ("good-and-missing", ["good.jpg", "nowhere.png"], {}, "fetch", "not_found"),
        ("two-bad", ["text.jpg", "nowhere.png"], {}, "probe", "unknown_format"),
        ("too-many", ["good.jpg"] * (NUM_MEDIA_ALLOWED + 1), {}, "admit", "over_budget_media"),
        ("too-long", ["good.jpg"], {"prompt": "What colour is the shape? " * 40}, "prompt", "prompt_too_long"),
        ("placeholder", ["good.jpg"], {"prompt": "Is <|image_pad|> a word?"}, "prompt", "placeholder_in_text"),
        ("placeholder-alone", [], {"prompt": "<|video_pad|>"}, "prompt", "placeholder_in_text"),
        ("wrong-parts", ["good.jpg"], {"messages": [shown]}, "prompt", "media_mismatch"),
        ("parts-of-nothing", [], {"messages": [shown]}, "prompt", "media_mismatch"),
    ]
    for name, files, words, stage, code in others:
        bad.append({"id": name, "media": [str(folder / file) for file in files], **words})
        expected[name] = stage, code
    good = [{"id": f"good-{file}", "media": [str(folder / file)]} for file in GOOD_FILES]
    good += [
        {"id": "good-words", "media": [], "prompt": "Which shape is it?"},
        {"id": "good-many", "media": [str(folder / "good.png")] * NUM_MEDIA_ALLOWED},
    ]
    rows = [row for pair in zip(bad, good * 3, strict=False) for row in pair]
    unique = [{**row, "id": row["id"] if i % 2 == 0 else f"{row['id']}-{i}"} for i, row in enumerate(rows)]
    return unique, expected


@pytest.fixture(scope="module", params=[256 * 1024, 300], ids=["whole", "ranged"])
def corpus(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Line, dict[str, Any]]:
    """The run over the corpus, with objects read whole at once and with headers read by range, and what is expected."""
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder)
    rows, expected = requests(folder)
    (folder / "manifest.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = parse_config(
        {
            "job": "caption_videos",
            "input": str(folder / "manifest.jsonl"),
            "output": str(folder / "output"),
            "model": "demo:captioner",
            "budget": {"limits": {"max_media_per_request": NUM_MEDIA_ALLOWED}},
            "decode": {"max_inline_bytes": request.param},
            "generate": {"max_new_tokens": 4, "max_prompt_tokens": NUM_TOKENS_ALLOWED},
            "store": {"path": str(folder / "store")},
            "ray": {"first_window_items": WINDOW_ITEMS["first_items"], "window_items": WINDOW_ITEMS["full_items"]},
        }
    )
    return Line(config), expected


def test_each_bad_item_has_its_own_code_and_all_else_is_captioned(corpus: tuple[Line, dict[str, Any]]) -> None:
    line, expected = corpus
    codes = {row["id"]: row["code"] for row in line.rows if row["status"] != "ok"}
    assert codes == {name: code for name, (_, code) in expected.items()}
    assert {row["status"] for row in line.rows} == {"ok", "quarantined"}
    for row in line.rows:
        assert (row["message"] is None) == (row["status"] == "ok")
        assert (row["generated_tokens"] is None) == (row["status"] != "ok"), row


def test_dead_letters_name_stage_and_medium(corpus: tuple[Line, dict[str, Any]]) -> None:
    line, expected = corpus
    letters = dead_letters(line)
    first = {letter["id"]: letter for letter in reversed(letters)}
    assert {name: (letter["stage"], letter["code"]) for name, letter in first.items()} == expected
    assert [x["media_index"] for x in letters if x["id"] == "good-and-bad"] == [1]
    assert [(x["media_index"], x["code"]) for x in letters if x["id"] == "two-bad"] == [
        (0, "unknown_format"),
        (1, "not_found"),
    ]
    whole = {"too-many", "too-long", "placeholder", "placeholder-alone", "wrong-parts", "parts-of-nothing"}
    assert {x["id"] for x in letters if x["media_index"] is None} == whole


def test_items_are_in_order_once_each_and_add_up(corpus: tuple[Line, dict[str, Any]]) -> None:
    line, expected = corpus
    num_items = 2 * len(expected)
    assert [row["item_index"] for row in line.rows] == list(range(num_items))
    counts = Counter(row["status"] for row in line.rows)
    assert counts == {"ok": len(expected), "quarantined": len(expected)}
    windows = plan_windows(num_items, **WINDOW_ITEMS)
    finished = [finish_generate_window(line.context, window) for window in windows]
    written, quarantined = (
        sum(each["counts"][name] for each in finished) for name in ("items_written", "items_quarantined")
    )
    assert (written, quarantined) == (counts["ok"], counts["quarantined"])
    assert sum((Counter(each["quarantine"]) for each in finished), Counter()) == Counter(
        code for _, code in expected.values()
    )
    assert read_parts(line.context) == line.rows  # finishing a window again gives the same part


def test_nothing_is_decoded_of_an_item_that_is_out_already(corpus: tuple[Line, dict[str, Any]]) -> None:
    line, _ = corpus
    plans = [load_plan(line.context, window) for window in plan_windows(len(line.rows), **WINDOW_ITEMS)]
    planned = {media.item_index for plan in plans if plan is not None for media in plan.media}
    index = {row["id"]: row["item_index"] for row in line.rows}
    assert index["good-and-bad"] in planned  # only its decode tells
    assert planned.isdisjoint(index[name] for name in ("good-and-missing", "two-bad", "too-many", "bomb"))


def dead_letters(line: Line) -> list[dict[str, Any]]:
    """The rows of all quarantine files, in order."""
    letters: list[dict[str, Any]] = []
    for name in line.context.folder.list("quarantine", suffix=".parquet"):
        with line.context.folder.open(f"quarantine/{name}") as file:
            letters += pq.read_table(file).to_pylist()
    return letters


def test_a_large_truncated_video_is_probed_by_range(
    tmp_path: Path, make_config: Callable[..., Config], write_manifest: Callable[..., Path]
) -> None:
    video = make_video(Recipe(size=(240, 320), options={"crf": "1"}, container_options=FASTSTART))
    limit = 64 * 1024
    assert len(video) > 4 * limit
    (tmp_path / "whole.mp4").write_bytes(video)
    (tmp_path / "cut.mp4").write_bytes(video[: len(video) // 2])
    names = ("cut.mp4", "whole.mp4")
    manifest = write_manifest([{"id": name, "media": [str(tmp_path / name)]} for name in names])
    line = Line(make_config(manifest, decode={"max_inline_bytes": limit}))
    assert [(row["id"], row["code"]) for row in line.rows] == [("cut.mp4", "truncated"), ("whole.mp4", None)]
    plan = load_plan(line.context, Window(index=0, start=0, stop=2))
    assert plan is not None
    assert [media.content for media in plan.media] == [None, None]  # a header alone has no content hash
    assert plan.receipt.counts["fetches"] == 2
    assert plan.receipt.counts["bytes_fetched"] < len(video)
    assert line.count("fetches") == 4  # and once each, whole, to be decoded
