"""A process to kill or to race: `python sink_child.py upsert|replace SECTION_CLASS SECTION_JSON FIRST LAST`.

`upsert` writes documents FIRST to LAST, ten at a time, and prints the number of each batch's last one once it is
acknowledged. `replace` makes each of them half as long, the same way. Prints `ready` and waits for a line first.
"""

from __future__ import annotations

import sys

from sample_points import documents, keys, make_collection

from pipeline import config
from pipeline.sinks.registry import open_sink

DOCUMENTS_AT_ONCE = 10
PARTS = 4


def main(mode: str, kind: str, section: str, first: str, last: str) -> None:
    sink = open_sink(getattr(config, kind).model_validate_json(section))
    collection = make_collection()
    sink.count(collection)  # its imports are made
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(int(first), int(last), DOCUMENTS_AT_ONCE):
        if mode == "upsert":
            sink.write(collection, documents(DOCUMENTS_AT_ONCE, PARTS, first=number))
        else:
            points = documents(DOCUMENTS_AT_ONCE, PARTS // 2, first=number)
            sink.replace_items(collection, points, keys(points))
        print(number + DOCUMENTS_AT_ONCE, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
