"""`python -m jobs.index_documents --config FILE`: documents' pages to vectors, as `ray job submit` calls it."""

from __future__ import annotations

import sys

from jobs.entry import main

if __name__ == "__main__":
    sys.exit(main("index_documents", __doc__))
