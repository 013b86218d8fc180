"""The volunteer's folder on disk: the site's key, what was fitted, whether it is paused, and the site's own folder.

One process at a time: its lock ends with it, however it ends.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from composer_prime.errors import BadInput
from composer_prime.sync.signatures import SigningKey


@dataclass(frozen=True)
class VolunteerFolder:
    """`~/composer-prime/RUN` unless the volunteer says otherwise."""

    root: Path
    site: str

    @classmethod
    def default(cls, run: str) -> Path:
        """Where a run goes when nobody says where."""
        return Path.home() / "composer-prime" / run

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
        fresh = self._fresh(self.key_file)
        key.save(fresh)
        os.replace(fresh, self.key_file)
        return self.key_file

    def _fresh(self, path: Path) -> Path:
        """Where a file is written before it takes its place; what an interrupted process left there goes."""
        fresh = path.with_name(f"{path.name}.new")
        fresh.unlink(missing_ok=True)
        return fresh

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
