"""`python -m tiny_policy TASKSET --out DIR`: a tiny policy for a taskset that brings a scripted player."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    from composer_prime.config.load import parse_value
    from composer_prime.errors import BadInput, last_words
except ModuleNotFoundError as missing:
    if missing.name != "composer_prime":
        raise
    print(
        "error: tiny_policy needs composer-prime, which isn't installed: pip install -e . in its clone", file=sys.stderr
    )
    raise SystemExit(2) from None

MAX_STEPS = 100_000


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Our own options, and the taskset's settings. Raises BadInput."""
    parser = argparse.ArgumentParser(
        prog="python -m tiny_policy",
        description="Make a tiny policy for a taskset that brings a scripted player (a method `play`), to try the "
        "taskset on a CPU. Takes about two minutes.",
        epilog="Any other --KEY VALUE is a setting of the taskset, such as --locks 2.",
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("taskset", metavar="TASKSET", nargs="?", help="its id, such as tool-letters")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the model folder to make; it must not be there")
    parser.add_argument("--seed", type=int, default=0, help="of the player's draws, the weights and the order (0)")
    parser.add_argument("--steps", type=int, default=1000, help="the most training steps there may be (1000)")
    parser.add_argument("--max-turns", type=int, default=8, help="of the policy in one conversation (8)")
    parser.add_argument("--no-hints", action="store_true", help="don't show what the player does after a hint")
    if not arguments:
        arguments = ["--help"]
    ours, rest = parser.parse_known_args(arguments)
    if ours.taskset is None or ours.out is None:
        raise BadInput(f"{'--out' if ours.taskset else 'TASKSET'} is missing: python -m tiny_policy TASKSET --out DIR")
    for name, value, limit in (("seed", ours.seed, 0), ("steps", ours.steps, 1), ("max-turns", ours.max_turns, 1)):
        if not limit <= value < 2**32:
            raise BadInput(f"--{name} ({value}) must be at least {limit} and below 2^32: give another")
    return ours, _settings(rest)


def _settings(rest: Sequence[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    left = list(rest)
    while left:
        option = left.pop(0)
        key, equals, value = option.removeprefix("--").partition("=")
        if not option.startswith("--") or not key or not (equals or left):
            raise BadInput(f"{option} isn't an option with its value: give the taskset's settings as --KEY VALUE")
        *tables, name = key.replace("-", "_").split(".")
        place = settings
        for table in tables:
            place = place.setdefault(table, {})
        place[name] = parse_value(value if equals else left.pop(0))
    return settings


def main(arguments: Sequence[str]) -> int:
    """Make a policy; 2, and one line, when the person must change something."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        ours, settings = parse(arguments)
        from tiny_policy.making import make
        from tiny_policy.training import TrainingConfig

        make(
            ours.taskset,
            ours.out,
            settings,
            seed=ours.seed,
            max_turns=ours.max_turns,
            with_hints=not ours.no_hints,
            config=TrainingConfig(steps=ours.steps),
            say=lambda line: print(line, flush=True),
        )
    except argparse.ArgumentError as error:
        return last_words(BadInput(f"{error}: see python -m tiny_policy --help"))
    except (BadInput, OSError) as error:
        return last_words(error)
    return 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        raise SystemExit(main(sys.argv[1:]))
    raise SystemExit(130)
