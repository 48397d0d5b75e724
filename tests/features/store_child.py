"""A process to kill: `python store_child.py write|seal|recover|compact|repair|drop|life STORE LOCAL [FIRST]`.

`write` puts batches of two records until it dies and prints the numbers of each batch only once `put` has returned.
`seal` puts three batches, prints them, then seals. `recover` seals what others left. Both print `sealing` just before.
`compact` and `repair` do what the commands do, and `drop` writes all shards anew without the records whose number is
divisible by seven; each prints `sealing` just before, too. `life` writes, seals, writes and seals again, and compacts;
what fails is said, and the next step is tried all the same.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable

import lmdb
from sample_records import keyed_record, terms

from pipeline.errors import HeadraceError
from pipeline.features.rewrite import rewrite_shards
from pipeline.features.store import FeatureStore
from pipeline.features.verify import compact, repair


def drop(store: FeatureStore) -> None:
    sevenths = {terms(number).digest() for number in range(0, 40_000, 7)}
    rewrite_shards(store, [shard.shard_id for shard in store.sealed_shards()], sevenths)


def life(store: FeatureStore, first: int) -> None:
    numbers = itertools.count(first)
    for _ in range(2):
        writer = store.writer()
        for _ in range(2):
            some = [next(numbers) for _ in range(3)]
            tried(
                lambda writer=writer, some=some: print(writer.put([keyed_record(n) for n in some]), *some, flush=True)
            )
        tried(writer.seal)
    tried(lambda: compact(store))


def tried(step: Callable[[], object]) -> None:
    try:
        step()
    except (OSError, lmdb.Error, HeadraceError, ValueError) as error:
        print("failed:", type(error).__name__, error, file=sys.stderr, flush=True)


def main(mode: str, path: str, local_path: str, first: str = "0") -> None:
    store = FeatureStore(path, local_path, shard_bytes=40_000)
    upkeep: dict[str, Callable[[], object]] = {
        "recover": store.recover,
        "compact": lambda: compact(store),
        "repair": lambda: repair(store),
        "drop": lambda: drop(store),
    }
    if mode == "life":
        life(store, int(first))
        return
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
    sys.stdout.flush()
    # One of some 50 exits ended by SIGABRT, "terminate called without an active exception" (pyarrow 26, Python 3.11):
    # a thread of Arrow's that lets go of a Python buffer while the interpreter ends. The store's work is done by then.
    os._exit(0)
