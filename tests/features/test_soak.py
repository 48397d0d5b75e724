"""Eight writers, eight readers and one that compacts: each second one is killed, and another put in its place."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from sample_records import CHILD_ENVIRONMENT, keyed_record, terms

from pipeline.features.codec import encode_record
from pipeline.features.shard import disk_bytes
from pipeline.features.store import FeatureStore
from pipeline.features.verify import compact, repair, verify
from tests.features.soak_child import BATCH, RANGE, WRITERS

CHILD = Path(__file__).with_name("soak_child.py")
READERS = 8
MOST_BYTES = 100 * 2**20


@dataclass
class Place:
    """One of the processes, and the file of what it and those before it have said."""

    mode: str
    first: int
    log: Path
    process: subprocess.Popen[bytes] | None = None
    starts: int = field(default=0)

    def start(self, store: Path) -> None:
        self.starts += 1
        words = [self.mode, str(store / "store"), str(store / "local"), str(self.first), str(self.starts)]
        with self.log.open("ab") as log:
            command = [sys.executable, str(CHILD), *words]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=CHILD_ENVIRONMENT)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def said(self) -> list[list[str]]:
        return [line.split() for line in self.log.read_text().splitlines()]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seconds", [20, pytest.param(600, marks=pytest.mark.slow)])
def test_nothing_is_read_wrongly_while_one_after_another_is_killed(tmp_path: Path, seconds: float) -> None:
    places = [Place("write", n * RANGE, tmp_path / f"writer-{n}") for n in range(WRITERS)]
    places += [Place("read", 0, tmp_path / f"reader-{n}") for n in range(READERS)]
    places.append(Place("compact", 0, tmp_path / "compacter"))
    rng, sizes = random.Random(1), []
    store = FeatureStore(str(tmp_path / "store"), str(tmp_path / "local"))
    try:
        for place in places:
            place.start(tmp_path)
        ends, killed = time.monotonic() + seconds, 0
        while time.monotonic() < ends:
            time.sleep(1)
            chosen = rng.choice(places)
            chosen.kill()
            killed += 1
            chosen.start(tmp_path)
            sizes.append(store.num_bytes())
        waiting = {place.log: len(place.said()) for place in places}
        ends = time.monotonic() + 60
        while waiting and time.monotonic() < ends:
            time.sleep(0.5)
            waiting = {p.log: waiting[p.log] for p in places if len(p.said()) <= waiting.get(p.log, -1)}
        assert not waiting, f"stuck: {sorted(waiting)}"
    finally:
        for place in places:
            place.kill()

    said = Counter(words[0] for place in places for words in place.said() if words)
    compared = sum(max(_numbers(place, "compared"), default=0) for place in places)
    print(f"{killed} killed, {said['put']} batches, {said['sealed']} seals, {said['compacted']} times compacted")
    print(
        f"{compared} records compared, the store had {max(sizes) / 1e6:.1f} MB at most and {sizes[-1] / 1e6:.1f} last"
    )
    assert not said["wrong"] and not said["lost"] and not said["Traceback"], said
    assert compared > 1000 and said["compacted"] > 3

    store.recover()
    repair(store)
    assert list(verify(store)) == []
    acknowledged = {start + n for place in places[:WRITERS] for start in _numbers(place, "put") for n in range(BATCH)}
    store.reload()
    assert store.find([terms(number).digest() for number in acknowledged]).keys() == {
        terms(number).digest() for number in acknowledged
    }
    compact(store)
    record = disk_bytes(len(encode_record(keyed_record(0)[1])))
    assert store.num_bytes() < 3 * record * len(acknowledged) + 2**21
    assert max(sizes) < MOST_BYTES


def _numbers(place: Place, word: str) -> list[int]:
    return [int(words[1]) for words in place.said() if len(words) == 2 and words[0] == word]
