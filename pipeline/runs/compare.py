"""Two runs side by side: whose answers differ, by item, and what differs in how they were made."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.errors import ConfigError
from pipeline.runs.base import hash_part, index_items
from pipeline.runs.run_folder import CONFIG_NAME
from pipeline.runs.summary import SUMMARY_NAME
from pipeline.sinks.parquet import part_name
from pipeline.storage import Folder

# What says which item it is, or how it ended; all other columns are what came out of it.
_ABOUT = frozenset({"item_index", "id", "tenant", "status", "code", "message"})
_VECTOR = pa.list_(pa.float32())
_EXAMPLES = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A column of an item that is ok in both runs, and what each has there."""

    id: str
    column: str
    left: Any
    right: Any


@dataclass(kw_only=True, slots=True)
class Comparison:
    """What `compare_runs` found.

    `statuses`: (status, status) → items that are in both. `equal` and `different`: column → items that are ok in both.
    `cosines`: column → (least, mean) cosine of its different vectors; both are null when one has no direction.
    `counts`, `seconds` and `settings`: name → (left, right), of those that differ; null where a run has none.
    """

    only_left: int = 0
    only_right: int = 0
    statuses: dict[tuple[str, str], int] = field(default_factory=dict)
    equal: dict[str, int] = field(default_factory=dict)
    different: dict[str, int] = field(default_factory=dict)
    cosines: dict[str, tuple[float | None, float | None]] = field(default_factory=dict)
    examples: list[Difference] = field(default_factory=list)
    counts: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    seconds: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    settings: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def same_results(self) -> bool:
        """True when both have the same items, which ended alike and came to the same, bit by bit."""
        alike = all(left == right for left, right in self.statuses)
        return alike and not (self.only_left or self.only_right or any(self.different.values()))

    def to_json(self) -> dict[str, Any]:
        """The fields, with the pairs of `statuses` as `left -> right`."""
        plain = {name: getattr(self, name) for name in self.__slots__}
        return plain | {
            "same_results": self.same_results,
            "statuses": {f"{left} -> {right}": count for (left, right), count in self.statuses.items()},
            "examples": [{name: getattr(each, name) for name in each.__slots__} for each in self.examples],
        }


def compare_runs(left: Folder, right: Folder) -> Comparison:
    """Join the items of two runs that have ended by tenant and id, and compare what came out of them.

    Memory is 16 bytes an item of `right` and a few parts. Raises `ConfigError` for a run that has not ended.
    """
    summaries = [_summary(run) for run in (left, right)]
    found = Comparison(
        counts=_differing(*(_flat(_numbers(summary)) for summary in summaries)),
        seconds=_differing(*(dict(summary["seconds"]) for summary in summaries)),
        settings=_differing(
            *(_flat(_made_by(run, summary)) for run, summary in zip((left, right), summaries, strict=True))
        ),
    )
    index = index_items(right)
    num_right = len(index)
    statuses, equal, different = Counter[tuple[str, str]](), Counter[str](), Counter[str]()
    cosines: dict[str, list[npt.NDArray[np.float64]]] = defaultdict(list)
    num_both = 0
    for part in _parts(left):
        here, there = _joined(part, right, index)
        found.only_left += len(part) - len(here)
        num_both += len(here)
        statuses.update(zip(here["status"].to_pylist(), there["status"].to_pylist(), strict=True))
        ok = pc.and_(pc.equal(here["status"], "ok"), pc.equal(there["status"], "ok"))
        here, there = here.filter(ok), there.filter(ok)
        for name in here.column_names:
            if name in _ABOUT or name not in there.column_names:
                continue
            same = _same(here[name], there[name])
            equal[name] += int(same.sum())
            different[name] += int((~same).sum())
            rows = np.flatnonzero(~same)
            if here[name].type == _VECTOR and there[name].type == _VECTOR:
                cosines[name].append(_cosines(here[name].take(rows), there[name].take(rows)))
                continue
            for row in rows[: _EXAMPLES - len(found.examples)].tolist():
                values = (here[name][row].as_py(), there[name][row].as_py())
                found.examples.append(
                    Difference(id=here["id"][row].as_py(), column=name, left=values[0], right=values[1])
                )
    found.only_right = num_right - num_both
    found.statuses = dict(statuses.most_common())
    found.equal, found.different = dict(equal), dict(different)
    found.cosines = {name: _least_and_mean(np.concatenate(all_of)) for name, all_of in cosines.items()}
    return found


def _summary(run: Folder) -> dict[str, Any]:
    if not run.exists(SUMMARY_NAME):
        raise ConfigError(f"{run.url}: the run has not ended, so there is nothing to compare yet; resume it first")
    return dict(run.read_json(SUMMARY_NAME))


def _numbers(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Of a summary, what was counted."""
    told = {name: value for name, value in summary.items() if isinstance(value, int | float)}
    return {**told, "quarantine": summary["quarantine"]}


def _made_by(run: Folder, summary: Mapping[str, Any]) -> dict[str, Any]:
    return {"config": run.read_json(CONFIG_NAME)["config"], "environment": summary["environment"]}


def _flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def _differing(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = [*left, *(name for name in right if name not in left)]
    pairs = {name: (left.get(name), right.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _parts(run: Folder) -> Iterator[pa.Table]:
    for name in run.list(suffix=".parquet"):
        with run.open(name) as file:
            yield pq.read_table(file)


def _joined(part: pa.Table, right: Folder, index: npt.NDArray[Any]) -> tuple[pa.Table, pa.Table]:
    """The rows of `part` whose item `right` has, and its rows, in one order."""
    hashes = hash_part(part)
    found = np.searchsorted(index["hash"], hashes)
    known = found < len(index)
    known[known] = index["hash"][found[known]] == hashes[known]
    places = index[found[known]]
    here = part.take(np.flatnonzero(known))
    order = np.argsort(places["window"], kind="stable")
    tables = []
    for window in np.unique(places["window"]):
        with right.open(part_name(int(window))) as file:
            tables.append(pq.read_table(file).take(places["row"][places["window"] == window]))
    there = pa.concat_tables(tables) if tables else here.slice(0, 0)
    here = here.take(order)
    same = pc.equal(here["id"], there["id"])  # a hash only points to a row
    return here.filter(same), there.filter(same)


def _same(left: pa.ChunkedArray, right: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
    if pa.types.is_nested(left.type):
        pairs = zip(left.to_pylist(), right.to_pylist(), strict=True)
        return np.array([one == other for one, other in pairs], bool)
    both_null = pc.and_(pc.is_null(left), pc.is_null(right))
    same = pc.or_(both_null, pc.fill_null(pc.equal(left, right), False))
    return np.asarray(same.to_numpy(), bool)


def _cosines(left: pa.ChunkedArray, right: pa.ChunkedArray) -> npt.NDArray[np.float64]:
    """Of pairs of vectors; NaN where a vector is missing, is zero or has another length."""
    return np.array([_cosine(a, b) for a, b in zip(left.to_pylist(), right.to_pylist(), strict=True)], np.float64)


def _cosine(left: Iterable[float] | None, right: Iterable[float] | None) -> float:
    a, b = np.array(left or (), np.float64), np.array(right or (), np.float64)
    norms = np.linalg.norm(a) * np.linalg.norm(b)
    return float(a @ b / norms) if a.shape == b.shape and norms else float("nan")


def _least_and_mean(cosines: npt.NDArray[np.float64]) -> tuple[float | None, float | None]:
    known = cosines[~np.isnan(cosines)]
    return (float(known.min()), float(known.mean())) if len(known) else (None, None)


def comparison_text(found: Comparison, names: tuple[str, str]) -> str:
    """For people; `names` are what to call the runs."""
    lines = [f"left   {names[0]}", f"right  {names[1]}", ""]
    both = sum(found.statuses.values())
    lines.append(f"items  {both:,} in both, {found.only_left:,} only left, {found.only_right:,} only right")
    lines += [f"  {left} -> {right}: {count:,}" for (left, right), count in found.statuses.items()]
    lines.append("results of items that are ok in both")
    for name in found.equal:
        told = f"  {name}: {found.equal[name]:,} equal, {found.different[name]:,} different"
        least, mean = found.cosines.get(name, (None, None))
        lines.append(told if least is None else f"{told} (cosine {least:.6f} at least, {mean:.6f} in the mean)")
    lines += [f"  {each.id} {each.column}: {_short(each.left)} -> {_short(each.right)}" for each in found.examples]
    for title, pairs in (("settings", found.settings), ("counts", found.counts), ("seconds", found.seconds)):
        if pairs:
            lines += [
                f"{title} that differ",
                *(f"  {name}: {_told(a)} -> {_told(b)}" for name, (a, b) in pairs.items()),
            ]
    lines.append("the same results" if found.same_results else "not the same results")
    return "\n".join(lines)


def _told(value: Any) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else _short(value)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:79]}…"
