"""Sounds that another package tests itself with, as its sources bring them, beside what that package says of them."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from pipeline.errors import ItemError
from pipeline.media.audio import decode_audio
from pipeline.media.probe import probe_media
from pipeline.schema import Probe

LENGTHS = """
import json, sys
from pathlib import Path
import mutagen
found = {}
for path in sorted(Path(sys.argv[1]).iterdir()):
    try:
        info = mutagen.File(path).info
        found[path.name] = [info.length, getattr(info, "sample_rate", None), getattr(info, "channels", None)]
    except Exception:
        found[path.name] = None
print(json.dumps(found))
"""
# mutagen takes the size of a file that is cut or wrongly tagged for its length, or does not take off what an encoder
# added; the 3G2 names two channels and 15 s where there are packets of one for 16.3; the Opus file begins at a later
# time than 0, which its last page counts and libav takes for its end.
OTHERWISE = {
    "audacious-trailing-id32-apev2.mp3": 1.246,
    "audacious-trailing-id32-id31.mp3": 3.736,
    "bad-xing.mp3": 0.125,
    "example.opus": 12.720,
    "issue_29.wma": 1.662,
    "lame397v9short.mp3": 0.072,
    "no-tags.3g2": 16.347,
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """mutagen's, unpacked; from the package index."""
    folder = tmp_path_factory.mktemp("sources")
    download = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "--dest", str(folder)]
    subprocess.run([*download, "mutagen"], check=True, capture_output=True)
    [archive] = folder.glob("mutagen-*.tar.gz")
    with tarfile.open(archive) as members:
        members.extractall(folder, filter="data")
    return next(path for path in folder.iterdir() if path.is_dir())


def facts(data: bytes) -> Probe | None:
    try:
        return probe_media(io.BytesIO(data), num_bytes=len(data), declared=None, name="item")
    except ItemError as error:
        assert error.stage == "probe"
        return None


@pytest.mark.slow
def test_lengths_rates_and_channels_are_what_another_reader_says(sources: Path) -> None:
    data = sources / "tests" / "data"
    asked = [sys.executable, "-c", LENGTHS, str(data)]
    answer = subprocess.run(asked, check=True, capture_output=True, text=True, env={"PYTHONPATH": str(sources)})
    compared = 0
    for name, expected in json.loads(answer.stdout).items():
        found = facts((data / name).read_bytes())
        if found is None or found.modality != "audio" or expected is None:
            continue
        compared += 1
        length, rate_hz, channels = expected
        assert found.duration_seconds == pytest.approx(OTHERWISE.get(name, length), abs=0.06), name
        assert rate_hz in (None, found.sample_rate_hz), name
        assert channels in (None, found.num_channels) or name in OTHERWISE, name
    assert compared >= 55


@pytest.mark.slow
def test_what_decodes_has_the_length_that_was_promised(sources: Path) -> None:
    decoded = 0
    for path in sorted((sources / "tests" / "data").iterdir()):
        data = path.read_bytes()
        found = facts(data)
        try:
            sound = decode_audio(io.BytesIO(data), rate_hz=16_000)
        except ItemError as error:
            assert error.stage == "decode"
            continue
        if found is not None and found.modality == "audio" and path.name not in OTHERWISE:
            decoded += 1
            assert sound.duration_seconds == pytest.approx(found.duration_seconds, abs=0.06), path.name
    assert decoded >= 40
