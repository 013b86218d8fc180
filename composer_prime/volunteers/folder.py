"""The volunteer's folder on disk: the site's key, whether it is paused, the site's own folder, and what it downloads.

One process at a time: its lock ends with it, however it ends. What a site fetches and builds goes below the folder, so
that one limit of disk counts all of it; who has set a place for the hub's files keeps it, and is told.
"""

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from composer_prime.errors import BadInput
from composer_prime.sync.signatures import SigningKey
from composer_prime.volunteers.invitation import restored

HUB_PLACES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME")
"""Variables of huggingface_hub that say where weights go; the first that is set counts."""
CACHE = "cache"


@dataclass(frozen=True)
class VolunteerFolder:
    """`~/composer-prime/RUN` unless the volunteer says otherwise."""

    root: Path
    site: str

    @property
    def key_file(self) -> Path:
        return self.root / f"{self.site}.key"

    @property
    def pause_file(self) -> Path:
        """While it is there the site is paused."""
        return self.root / f"{self.site}.paused"

    @property
    def lock_file(self) -> Path:
        """Held by the process that runs the site. Its name is no other program's: its text is overwritten."""
        return self.root / f"{self.site}.site-lock"

    @property
    def was_used(self) -> bool:
        """Whether the site ever ran from here."""
        return self.lock_file.exists()

    @property
    def is_paused(self) -> bool:
        return self.pause_file.exists()

    def pause(self) -> None:
        """Ask the site that runs here, and the next one, to stay out."""
        self.make()
        self.pause_file.touch()

    def go_on(self) -> None:
        """Take the pause back."""
        self.pause_file.unlink(missing_ok=True)

    def make(self) -> None:
        """Make the folder, open to its owner alone. Raises BadInput."""
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise BadInput(f"{self.root} can't be made ({error.strerror}): choose another --folder") from None

    def keep_key(self, key: SigningKey) -> Path:
        """Put the site's key where its processes find it, in place of an earlier invitation's; the file."""
        if self.key_file.exists() and SigningKey.load(self.key_file).public == key.public:
            return self.key_file
        fresh = self.key_file.with_name(f"{self.key_file.name}.new")
        fresh.unlink(missing_ok=True)  # what an interrupted process left there
        key.save(fresh)
        os.replace(fresh, self.key_file)
        return self.key_file

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the folder for this process. Raises BadInput when another one of this site holds it."""
        self.make()
        with self.lock_file.open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                holder = file.read().strip() or "another"
                raise BadInput(
                    f"site {self.site} runs from {self.root} already (process {holder}): pause it with --pause, or "
                    "stop it with Ctrl-C"
                ) from None
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield

    def is_held(self) -> bool:
        """Whether a process has this site's folder now."""
        try:
            with self.held():
                return False
        except BadInput:
            return True

    def used_bytes(self) -> int:
        """Bytes of all files in it; files that go meanwhile aren't counted."""
        total = 0
        for folder, _, names in os.walk(self.root):
            for name in names:
                try:
                    total += os.lstat(os.path.join(folder, name)).st_size
                except FileNotFoundError:
                    continue
        return total


def cache_variables(root: Path, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What a site's processes are told, so that they keep what they fetch and build below `root`.

    The hub's token stays where it is: it is the volunteer's, and no file of the run's.
    """
    found = {"XDG_CACHE_HOME": str(root / CACHE)}
    if _hub_place(environ) is not None:
        return found
    before = Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface"
    found["HF_HOME"] = str(root / CACHE / "huggingface")
    if not environ.get("HF_TOKEN_PATH"):
        found["HF_TOKEN_PATH"] = str(before / "token")
    return found


def elsewhere(root: Path, environ: Mapping[str, str] = os.environ) -> str | None:
    """What the volunteer should know where weights go to a place of their own; None where they go below `root`."""
    name = _hub_place(environ)
    if name is None:
        return None
    place = Path(environ[name]).expanduser().absolute()
    if place.is_relative_to(root.absolute()):
        return None
    return (
        f"Weights of the hub go to {place}, since {name} says so here: --max-disk-gib doesn't count them; unset it and "
        f"they go below {root}."
    )


@contextmanager
def kept_below(root: Path) -> Iterator[None]:
    """Let this process, and those it starts meanwhile, keep what they fetch and build below `root`."""
    changes = cache_variables(root)
    with restored(changes):
        os.environ.update(changes)
        yield


def _hub_place(environ: Mapping[str, str]) -> str | None:
    return next((name for name in HUB_PLACES if environ.get(name)), None)
