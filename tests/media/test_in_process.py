"""Media read without a sandbox: memory that is refused is the failure of the item that asked for it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.media import hostile_images
from tests.media.media_files import make_image
from tests.media.pdf_files import Page, make_pdf, text_line

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is refused by a limit that Linux has")
ROOT = Path(__file__).parents[2]
SIDE = 8_000  # 64 megapixels, as many as the default budget admits


def test_memory_that_is_refused_costs_its_item(tmp_path: Path) -> None:
    bmp, avif = hostile_images.whole_files()["bmp"], hostile_images.whole_files()["avif"]
    files = {
        "good.png": (make_image("PNG"), "ok"),
        "large.bmp": (hostile_images.with_numbers(bmp, 18, "<ii", SIDE, SIDE), "decode out_of_memory"),
        "long.avif": (avif, "probe out_of_memory"),  # of these all is read to know the size
        "two.count": (make_pdf([Page(), Page()]), "ok"),
        "one.text": (make_pdf([Page(content=text_line("some words", 20, 100))]), "ok"),
        "again.png": (make_image("PNG"), "ok"),
    }
    for name, (data, _) in files.items():
        (tmp_path / name).write_bytes(data)
    os.truncate(tmp_path / "long.avif", 2**29)
    command = [sys.executable, "-m", "tests.media.little_memory", *(str(tmp_path / name) for name in files)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {name: verdict for name, (_, verdict) in files.items()}
