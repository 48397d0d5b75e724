"""Real processes, really killed: what was acknowledged is there, and nothing is half there."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from sample_records import CHILD_ENVIRONMENT, features, keyed_record, terms

from pipeline.features import lifecycle
from pipeline.features.catalogue import load_catalogue
from pipeline.features.store import FeatureStore

CHILD = Path(__file__).with_name("store_child.py")


def start(mode: str, path: str, local: str, first: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, str(CHILD), mode, path, local, str(first)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=CHILD_ENVIRONMENT)


def killed_after(child: subprocess.Popen[str], word: str, seconds: float) -> dict[int, str]:
    """SIGKILL `seconds` after the first line that holds `word`; number → shard id of all that was acknowledged."""
    assert child.stdout is not None
    lines = []
    for line in child.stdout:
        lines.append(line)
        if word in line:
            break
    time.sleep(seconds)
    child.kill()
    lines += child.stdout.readlines()
    child.stdout.close()
    child.wait()
    whole = [line.split() for line in lines if line.endswith("\n") and "sealing" not in line]
    return {int(number): shard_id for shard_id, *numbers in whole for number in numbers}


def check_all(store: FeatureStore, acknowledged: dict[int, str]) -> None:
    """Every acknowledged record answers, from its shard and from the catalogue, which lists nothing that is absent."""
    numbers = sorted(acknowledged)
    expected = [terms(n).as_dict() for n in numbers]
    keys = [terms(n).digest() for n in numbers]
    store.reload()
    found = store.find(keys)
    assert found == {key: acknowledged[n] for key, n in zip(keys, numbers, strict=True)}
    for number, record in zip(numbers, store.fetch([(found[key], key) for key in keys], expected), strict=True):
        assert record is not None, f"record {number} is lost"
        assert np.array_equal(record.tensors["pooler_output"].numpy(), features(number))
    for part in load_catalogue(store.folder).parts.values():
        listed = part.keys.to_pylist()
        assert len(listed) == part.shard.num_records
        assert None not in store.fetch([(part.shard.shard_id, key) for key in listed])


def test_killed_while_writing(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    rng = random.Random(0)
    acknowledged: dict[int, str] = {}
    for attempt in range(10):
        child = start("write", path, path, attempt * 100_000)
        acknowledged |= killed_after(child, " ", rng.uniform(0, 0.25))
        store = FeatureStore(path)
        store.recover()
        check_all(store, acknowledged)
        assert [name for name in (tmp_path / "store" / "open").iterdir() if name.is_dir()] == []
    assert len(acknowledged) > 40


def test_killed_while_sealing(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    rng = random.Random(1)
    acknowledged: dict[int, str] = {}
    for attempt in range(5):
        acknowledged |= killed_after(start("seal", path, path, attempt * 1000), "sealing", rng.uniform(0, 0.03))
        killed_after(start("recover", path, path), "sealing", rng.uniform(0, 0.03))
    store = FeatureStore(path)
    store.recover()
    check_all(store, acknowledged)
    assert len(acknowledged) == 5 * 6
    assert not list(tmp_path.rglob("*.tmp"))


STEPS = ["compact_shard", "shard_entries", "file_sha256", "_publish_file", "write_entries", "_remove_folder"]


@pytest.mark.parametrize("remote", [False, True], ids=["local", "remote"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_sealing_cut_off_at_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, after: bool, remote: bool
) -> None:
    path = f"memory://cut-{step}-{after}" if remote else str(tmp_path / "store")
    store = FeatureStore(path, str(tmp_path / "local"))
    writer = store.writer()
    shard_id = writer.put([keyed_record(0), keyed_record(1)])
    real = getattr(lifecycle, step)

    def cut(*args: object) -> None:
        if after:
            real(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(lifecycle, step, cut)
        with pytest.raises(KeyboardInterrupt):
            writer.seal()
    assert [record is None for record in store.fetch([(shard_id, terms(n).digest()) for n in (0, 1)])] == [False, False]
    FeatureStore(path, str(tmp_path / "local")).recover()
    check_all(store, {0: shard_id, 1: shard_id})
    assert store.recover() == []
    assert not list(tmp_path.rglob("*.tmp")) and not list(tmp_path.rglob("data.mdb"))
    store.folder.remove("")


def test_a_listed_shard_is_not_sealed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FeatureStore(str(tmp_path))
    writer = store.writer()
    shard_id = writer.put([keyed_record(0)])
    with monkeypatch.context() as patch:
        patch.setattr(lifecycle, "_remove_folder", lambda _: None)
        first = writer.seal()
    monkeypatch.delattr(lifecycle, "compact_shard")
    assert store.recover() == [first]
    check_all(store, {0: shard_id})
