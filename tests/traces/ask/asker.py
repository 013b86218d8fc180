"""`python -m tests.traces.ask.asker PLAN`: asks as a process of its own, which may kill itself at one of its writes.

PLAN is JSON: states (their numbers), teachers, folder, ceiling_usd, and die_at: [n, share], to write that share of the
nth line that it appends, from 0, and die by SIGKILL. It prints the process id before it begins.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from composer_prime.config.text_teachers import TextTeacher
from composer_prime.traces.ask.asking import ask
from composer_prime.traces.ask.lines import LineWriter
from composer_prime.traces.ask.plan import make_plan
from tests.traces.ask.text_teacher import Listed, trace


def die_at(place: int, share: float) -> None:
    """Let the process die at its nth write."""
    whole_write, num_written = LineWriter.write, 0

    def write(self: LineWriter, record: Mapping[str, Any]) -> int:
        nonlocal num_written
        if num_written == place:
            line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
            os.write(self._file.fileno(), line[: round(share * len(line))])
            os.kill(os.getpid(), signal.SIGKILL)
        num_written += 1
        return whole_write(self, record)

    LineWriter.write = write


def main() -> None:
    plan = json.loads(sys.argv[1])
    if plan["die_at"] is not None:
        die_at(*plan["die_at"])
    teachers = [TextTeacher(**one) for one in plan["teachers"]]
    store = Listed([trace(number) for number in plan["states"]])
    print(os.getpid(), flush=True)
    asyncio.run(ask(store, make_plan(store), teachers, Path(plan["folder"]), plan["ceiling_usd"]))


if __name__ == "__main__":
    main()
