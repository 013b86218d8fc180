"""The stand-in's metrics file."""

import json
from collections.abc import Mapping
from pathlib import Path

FILE: list[Path] = []
"""Where the first rank writes; empty on the others."""


async def log(values: Mapping[str, float], step: int) -> None:
    """Append one record."""
    for path in FILE:
        with path.open("a") as file:
            file.write(json.dumps({**values, "step": step}) + "\n")
