from pipeline.runs import durability
from pipeline.runs.durability import DurableWindows


def test_a_window_without_shards_is_durable_at_once() -> None:
    windows = DurableWindows(lambda shard: False)
    windows.add(3, ())
    assert windows.take() == [3]
    assert windows.take() == []


def test_a_window_waits_for_all_its_shards(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    now, asked, sealed = [100.0], [], set()
    monkeypatch.setattr(durability.time, "monotonic", lambda: now[0])

    def is_sealed(shard: str) -> bool:
        asked.append(shard)
        return shard in sealed

    windows = DurableWindows(is_sealed)
    windows.add(0, ("a", "b"))
    windows.add(1, ("b",))
    assert windows.take() == [] and sorted(asked) == ["a", "b"]
    sealed.add("b")
    assert windows.take() == [], "looks once a second"
    now[0] += 1.0
    assert windows.take() == [1]
    assert windows.shards == {"a"}
    sealed.add("a")
    assert windows.take(look=True) == [0]
    windows.add(2, ("a",))
    assert windows.take() == [2], "known to be sealed"
    assert asked.count("b") == 2


def test_a_window_that_is_dropped_waits_for_what_is_written_anew() -> None:
    sealed = {"c"}
    windows = DurableWindows(sealed.__contains__)
    windows.add(0, ("a", "lost"))
    windows.add(1, ("b",))
    windows.drop([0, 7])
    assert windows.shards == {"b"} and windows.take(look=True) == []
    windows.add(0, ("a", "c"))
    sealed |= {"a", "b"}
    assert sorted(windows.take(look=True)) == [0, 1]
