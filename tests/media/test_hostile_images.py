"""Every hostile image becomes pixels or an `ItemError`, in a process whose memory is looked at."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import hostile_images
import pytest

# Before anything is allocated for its pixels; GIFs and WebPs of such a size cannot be written at all.
CAUGHT_BY_SIZE = {
    name: "probe corrupt_header" if name == "webp" else "admit over_budget_pixels"
    for name in hostile_images.lying_sizes()
}
CAUGHT_INSIDE = {
    "tiff in a tile of 900 megapixels": "probe corrupt_header",
    "tiff with 3,000,000 strips": "probe corrupt_header",
    "tiff with 3,000,000 sample widths": "probe corrupt_header",
    "tiff in strips of 4,000,000,000 rows": "pixels",  # taken for as many as there are
    "tiff with a strip of 4 GB": "decode corrupt",
    "tiff with 65,535 samples a pixel": "probe corrupt_header",
    "avif of 16 x 16 around 4,000 x 4,000": "probe corrupt_header",
    "jp2 of 16 x 16 around 4,000 x 4,000": "decode corrupt",
    "jp2 with a stream of 30,000 x 30,000": "decode corrupt",
    "jp2 with a tile of 30,000 x 30,000": "pixels",  # clipped to the picture
    "webp of 83 x 61 around 4,000 x 4,000": "probe corrupt_header",
    "jpeg with two sizes": "decode corrupt",
}
REFUSED_METADATA = {
    "png with a text of 100 MB",
    "png with an international text of 100 MB",
    "png with a profile of 100 MB",
    "png with 90 texts",
    "png with a chunk of 2 GB",
    "tiff with 60,000 tags",
    "jp2 with a header of 2 GB",
    "jp2 with a header of an exabyte",
    "jp2 with a million boxes",
}


def decoded(folder: Path, files: dict[str, bytes], max_pixels: int | None = None) -> dict[str, tuple[str, str, float]]:
    """name → (verdict, verdict with `decode.truncated: keep`, MB by which the process that decodes them grew)."""
    for number, data in enumerate(files.values()):
        (folder / f"{number:05}").write_bytes(data)
    command = [sys.executable, "-W", "ignore", str(Path(__file__).parent / "decode_hostile.py"), str(folder)]
    done = subprocess.run(
        [*command, *([str(max_pixels)] if max_pixels else [])], check=True, capture_output=True, text=True
    )
    return dict(zip(files, json.loads(done.stdout), strict=True))


def test_each_bomb_is_caught_by_its_size(tmp_path: Path) -> None:
    found = decoded(tmp_path, hostile_images.lying_sizes())
    assert {name: verdict for name, (verdict, _, _) in found.items()} == CAUGHT_BY_SIZE
    assert max(grown for _, _, grown in found.values()) < 20


def test_what_is_larger_inside_than_its_header_says_is_not_allocated(tmp_path: Path) -> None:
    found = decoded(tmp_path, hostile_images.hidden_sizes())
    assert {name: verdict for name, (verdict, _, _) in found.items()} == CAUGHT_INSIDE
    assert max(grown for _, _, grown in found.values()) < 30  # the smallest picture hidden in one is of 16 megapixels


def test_metadata_costs_no_more_than_a_few_times_the_file(tmp_path: Path) -> None:
    files = hostile_images.huge_metadata()
    found = decoded(tmp_path, files)
    assert {name for name, (verdict, _, _) in found.items() if verdict != "pixels"} == REFUSED_METADATA
    assert {verdict for verdict, _, _ in found.values()} == {"pixels", "probe corrupt_header"}
    for name, (_, _, grown) in found.items():
        # Pillow stops at 64 MB of texts.
        assert grown < (150 if name == "png with 90 texts" else 20 + 4e-6 * len(files[name])), (name, grown)


def test_what_is_no_image_is_named_so(tmp_path: Path) -> None:
    found = decoded(tmp_path, hostile_images.no_images())
    assert {verdict for verdict, _, _ in found.values()} == {"probe unknown_format"}


def test_files_cut_off_and_damaged_are_pixels_or_have_a_reason(tmp_path: Path) -> None:
    files = dict(hostile_images.cut_and_flipped())
    assert len(files) >= 600
    found = decoded(tmp_path, files, max_pixels=1_000_000)
    verdicts = Counter(verdict for verdict, _, _ in found.values())
    assert set(verdicts) <= {
        "pixels",
        "admit over_budget_pixels",
        *(f"probe {code}" for code in ("corrupt_header", "unknown_format", "modality_mismatch", "no_video_stream")),
        *(f"decode {code}" for code in ("corrupt", "truncated", "unsupported_mode")),
    }
    assert min(verdicts["pixels"], verdicts["decode corrupt"], verdicts["decode truncated"]) > 50
    assert max(grown for _, _, grown in found.values()) < 40
    for name, (verdict, kept, _) in found.items():
        # Only what is truncated is looked at again, and of two formats only.
        assert kept in ((verdict, "pixels", "decode corrupt") if verdict == "decode truncated" else (verdict,)), name
        if verdict == "decode truncated" and kept == "pixels":
            assert name.startswith(("jpeg", "png"))


@pytest.mark.parametrize("name", ["lying_sizes", "cut_and_flipped"])
def test_the_files_are_the_same_each_time(name: str) -> None:
    first = dict(getattr(hostile_images, name)())
    hostile_images.whole_files.cache_clear()
    assert dict(getattr(hostile_images, name)()) == first
