"""Decodes hostile images as a worker would and prints, as JSON, what became of each and what memory that took.

python decode_hostile.py FOLDER [MAX_PIXELS]
"""

import io
import json
import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

import hostile_images

from pipeline.errors import ItemError
from pipeline.media.budget import resolve_budget
from pipeline.media.decode import decode_media
from pipeline.media.probe import probe_media
from pipeline.schema import ImageRules, SamplePlan


def verdict(data: bytes, max_pixels: int, rules: ImageRules) -> str:
    """`pixels`, or stage and code. Raises what is not an `ItemError`."""
    try:
        probe = probe_media(io.BytesIO(data), num_bytes=len(data), declared="image", name="item")
        if probe.width * probe.height > max_pixels:
            return "admit over_budget_pixels"
        plan = SamplePlan(pts_seconds=(0.0,))
        frames = decode_media(io.BytesIO(data), probe, plan, (32, 48), rules=rules)
    except ItemError as error:
        return f"{error.stage} {error.code}"
    assert frames.pixels.shape == (1, 32, 48, 3)
    return "pixels"


def peak_mb() -> float:
    """Of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    max_pixels = int(sys.argv[2]) if len(sys.argv) > 2 else resolve_budget("default", {}).max_pixels_per_frame
    for data in hostile_images.whole_files().values():  # what libraries take for themselves is taken
        verdict(data, max_pixels, ImageRules(keep_truncated=True))
    found = []
    for path in sorted(Path(sys.argv[1]).iterdir()):
        data = path.read_bytes()
        before = peak_mb()
        verdicts = [verdict(data, max_pixels, ImageRules(keep_truncated=keep)) for keep in (False, True)]
        found.append((*verdicts, round(peak_mb() - before, 1)))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
