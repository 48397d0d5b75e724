"""A process to kill: `python store_child.py write|seal|recover|compact|repair|drop STORE LOCAL [FIRST]`.

`write` puts batches of two records until it dies and prints the numbers of each batch only once `put` has returned.
`seal` puts three batches, prints them, then seals. `recover` seals what others left. Both print `sealing` just before.
`compact` and `repair` do what the commands do, and `drop` writes all shards anew without the records whose number is
divisible by seven; each prints `sealing` just before, too.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable

from sample_records import keyed_record, terms

from pipeline.features.rewrite import rewrite_shards
from pipeline.features.store import FeatureStore
from pipeline.features.verify import compact, repair


def drop(store: FeatureStore) -> None:
    sevenths = {terms(number).digest() for number in range(0, 40_000, 7)}
    rewrite_shards(store, [shard.shard_id for shard in store.sealed_shards()], sevenths)


def main(mode: str, path: str, local_path: str, first: str = "0") -> None:
    store = FeatureStore(path, local_path, shard_bytes=40_000)
    upkeep: dict[str, Callable[[], object]] = {
        "recover": store.recover,
        "compact": lambda: compact(store),
        "repair": lambda: repair(store),
        "drop": lambda: drop(store),
    }
    if mode in upkeep:
        print("sealing", flush=True)
        upkeep[mode]()
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
