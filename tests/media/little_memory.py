"""Reads media as a worker without a sandbox would, with 128 MB more than it has: prints, as JSON, what becomes of each.

python little_memory.py FILE…
"""

import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.errors import ItemError
from pipeline.media.in_process import InProcess
from pipeline.media.undecoded import Undecoded
from pipeline.schema import SamplePlan


def verdict(read: Callable[[], Any]) -> str:
    """`ok`, or stage and code. Raises what is not an `ItemError`."""
    try:
        read()
    except ItemError as error:
        return f"{error.stage} {error.code}"
    return "ok"


def decode(data: bytes, facts: Any) -> None:
    """Raises why there are no frames."""
    item = Undecoded(data=data, probe=facts, plan=SamplePlan(pts_seconds=(0.0,)), size=(32, 48), page=0)
    [outcome] = InProcess().decode([item])
    if isinstance(outcome.result, ItemError):
        raise outcome.result


def read(path: Path) -> str:
    """Its header, and what it shows; or, of what is named so, the number of its pages and the text of the first."""
    num_bytes, reader = path.stat().st_size, InProcess()
    with path.open("rb") as file:
        if path.suffix == ".count":
            return verdict(lambda: reader.page_count(file, num_bytes=num_bytes, name=path.name))
        if path.suffix == ".text":
            return verdict(lambda: reader.page_text(file.read(), 0))
        facts: list[Any] = []
        found = verdict(
            lambda: facts.append(reader.probe(file, num_bytes=num_bytes, declared=None, name=path.name, page=0))
        )
    return verdict(lambda: decode(path.read_bytes(), facts[0])) if facts else found


def main() -> None:
    paths = [Path(name) for name in sys.argv[1:]]
    read(paths[0])  # what libraries take for themselves is taken
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + 128 * 2**20, resource.RLIM_INFINITY))
    json.dump({path.name: read(path) for path in paths}, sys.stdout)


if __name__ == "__main__":
    main()
