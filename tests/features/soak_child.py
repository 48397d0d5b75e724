"""A process of the soak: `python soak_child.py write|read|compact STORE LOCAL FIRST SEED`, until it is killed.

`write` puts records `FIRST` to `FIRST + RANGE - 1` in batches, over and over, and seals them; each batch is said once
it is committed, each shard once it is sealed. `read` looks for records of all writers and says how many it has compared
each second, and what was wrong. `compact` puts small shards together, and says so, or that some are read.
"""

from __future__ import annotations

import itertools
import random
import sys
import time

import numpy as np
from sample_records import features, keyed_record, terms

from pipeline.errors import ConfigError
from pipeline.features.store import FeatureStore
from pipeline.features.verify import compact

WRITERS, RANGE, BATCH = 8, 60, 6


def write(store: FeatureStore, first: int, rng: random.Random) -> None:
    writer = store.writer()
    for start in itertools.cycle(range(first, first + RANGE, BATCH)):
        writer.put([keyed_record(number) for number in range(start, start + BATCH)])
        print("put", start, flush=True)
        if rng.random() < 0.3:
            writer.seal()
            print("sealed", start, flush=True)
        time.sleep(0.05)


def read(store: FeatureStore, rng: random.Random) -> None:
    seen: set[int] = set()
    compared, said = 0, time.monotonic()
    while True:
        numbers = rng.sample(range(WRITERS * RANGE), 20)
        records = found(store, numbers)
        if seen - records.keys() & set(numbers):
            store.reload()  # what was compacted since lies elsewhere now
            records |= found(store, [number for number in numbers if number in seen and number not in records])
        for number in numbers:
            if number in records:
                seen.add(number)
                compared += 1
                if not np.array_equal(records[number], features(number)):
                    print("wrong", number, flush=True)
            elif number in seen:
                print("lost", number, flush=True)
        if time.monotonic() - said > 1:
            print("compared", compared, flush=True)
            said = time.monotonic()
            store.reload()


def found(store: FeatureStore, numbers: list[int]) -> dict[int, np.ndarray]:
    keys = {terms(number).digest(): number for number in numbers}
    places = store.find(list(keys))
    expected = [terms(keys[key]).as_dict() for key in places]
    records = store.fetch([(shard, key) for key, shard in places.items()], expected)
    return {
        keys[key]: record.tensors["pooler_output"].numpy()
        for key, record in zip(places, records, strict=True)
        if record is not None
    }


def main(mode: str, path: str, local_path: str, first: str, seed: str) -> None:
    store = FeatureStore(path, local_path, shard_bytes=200_000)
    rng = random.Random(int(seed))
    if mode == "write":
        write(store, int(first), rng)
    elif mode == "read":
        read(store, rng)
    while mode == "compact":
        store.recover()
        try:
            print("compacted", len(compact(store)), flush=True)
        except ConfigError:  # somebody has begun to read one of the shards
            print("busy", flush=True)
        time.sleep(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
