"""A process to kill: `python store_child.py write|seal|recover STORE LOCAL [FIRST]`.

`write` puts batches of two records until it dies and prints the numbers of each batch only once `put` has returned.
`seal` puts three batches, prints them, then seals. `recover` seals what others left. Both print `sealing` just before.
"""

from __future__ import annotations

import itertools
import sys

from sample_records import keyed_record

from pipeline.features.store import FeatureStore


def main(mode: str, path: str, local_path: str, first: str = "0") -> None:
    store = FeatureStore(path, local_path, shard_bytes=40_000)
    if mode == "recover":
        print("sealing", flush=True)
        store.recover()
        return
    writer = store.writer()
    for number in itertools.count(int(first), 2):
        shard_id = writer.put([keyed_record(number), keyed_record(number + 1)])
        print(shard_id, number, number + 1, flush=True)
        if mode == "seal" and number >= int(first) + 4:
            break
    print("sealing", flush=True)
    writer.seal()


if __name__ == "__main__":
    main(*sys.argv[1:])
