"""A process that decodes in a sandbox, to be killed: prints the child's process id, then has it hang."""

from __future__ import annotations

import sys

from tests.media.media_files import make_image
from tests.media.sandboxed import child_pid, decode, open_hostile, order


def main(mode: str) -> None:
    sandbox = open_hostile(item_seconds=600)
    decode(sandbox, make_image("JPEG"))
    print(child_pid(sandbox), flush=True)
    if mode == "exit":
        return
    decode(sandbox, order("hang"))


if __name__ == "__main__":
    main(sys.argv[1])
