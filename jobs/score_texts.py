"""`python -m jobs.score_texts --config FILE`: texts or chats to labels and scores, as `ray job submit` calls it."""

from __future__ import annotations

import sys

from jobs.entry import main

if __name__ == "__main__":
    sys.exit(main("score_texts", __doc__))
