"""`python -m tests.traces.ask.asker PLAN`: asks as a process of its own.

PLAN is JSON: states (their numbers), teachers, folder, ceiling_usd. It prints the process id before it begins.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

from composer_prime.config.text_teachers import TextTeacher
from composer_prime.traces.ask.asking import ask
from composer_prime.traces.ask.plan import make_plan
from tests.traces.ask.text_teacher import Listed, trace


def main() -> None:
    plan = json.loads(sys.argv[1])
    teachers = [TextTeacher(**one) for one in plan["teachers"]]
    store = Listed([trace(number) for number in plan["states"]])
    print(os.getpid(), flush=True)
    asyncio.run(ask(store, make_plan(store), teachers, Path(plan["folder"]), plan["ceiling_usd"]))


if __name__ == "__main__":
    main()
