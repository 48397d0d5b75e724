"""`python -m jobs.embed_backfill --config FILE`: images, videos and texts to vectors, as `ray job submit` calls it."""

from __future__ import annotations

import sys

from jobs.entry import main

if __name__ == "__main__":
    sys.exit(main("embed_backfill", __doc__))
