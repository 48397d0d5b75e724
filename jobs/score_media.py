"""`python -m jobs.score_media --config FILE`: images, videos and pages to scores, as `ray job submit` calls it."""

from __future__ import annotations

import sys

from jobs.entry import main

if __name__ == "__main__":
    sys.exit(main("score_media", __doc__))
