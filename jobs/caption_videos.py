"""`python -m jobs.caption_videos --config FILE`: bulk captioning, as `ray job submit` calls it."""

from __future__ import annotations

import sys

from jobs.entry import main

if __name__ == "__main__":
    sys.exit(main("caption_videos", __doc__))
