"""The gates of a site's teachers, over a restart."""

import json
from collections.abc import Iterable
from pathlib import Path

from composer_prime.sites.embedded.environments import Source
from composer_prime.sites.embedded.result import write_whole
from composer_prime.teachers.gate import Gate


def gates_of(sources: Iterable[Source]) -> dict[str, Gate]:
    """All gates, by source and teacher."""
    return {
        f"{source.name}/{name}": gate
        for source in sources
        for name, gate in getattr(source.env, "gates", {}).items()  # the environment that stamps has some
    }


def load_gates(gates: dict[str, Gate], file: Path) -> None:
    """Let the gates go on from what `save_gates` wrote, where there is something."""
    if file.exists():
        for name, state in json.loads(file.read_text(encoding="utf-8")).items():
            if name in gates:
                gates[name].load_state_dict(state)


def save_gates(gates: dict[str, Gate], file: Path) -> None:
    """Write what `load_gates` reads, where there are gates."""
    if gates:
        write_whole(file, json.dumps({name: gate.state_dict() for name, gate in gates.items()}) + "\n")
