"""Whether a disk gives back what was written: hashes beside files, as `sha256sum --check` reads them.

A flipped bit in a checkpoint loads without an error and moves weights by millions. Standard library only.
"""

import hashlib
from pathlib import Path

SUMS = ".SHA256SUMS"
"""The list of a whole folder."""


def seal(folder: Path) -> None:
    """Write the hashes of a folder's files into it. Raises OSError."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.name != SUMS)
    lines = [sums_line(file, str(file.relative_to(folder))) for file in files]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def sums_line(file: Path, name: str) -> str:
    """A file's line in a list of hashes that knows it by `name`. Raises OSError."""
    return f"{_sha256(file)}  {name}\n"


def damage(sums: Path) -> str | None:
    """What is wrong with the files that a list of hashes names, in a few words; None when all are as written."""
    try:
        listed = [line.split("  ", 1) for line in sums.read_text(encoding="utf-8").splitlines()]
        for sha, name in listed:
            if _sha256(sums.parent / name) != sha:
                return f"{name} isn't what was written: its sha256 differs from the one in {sums.name}"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError) as error:
        return f"{sums.name} or what it names can't be read ({error})"
    return None if listed else f"{sums.name} is empty"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
