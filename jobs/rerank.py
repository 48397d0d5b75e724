"""`python -m jobs.rerank --config FILE`: queries and documents to scores and rankings, as `ray job submit` calls it."""

from __future__ import annotations

import sys

from jobs.entry import main

if __name__ == "__main__":
    sys.exit(main("rerank", __doc__))
