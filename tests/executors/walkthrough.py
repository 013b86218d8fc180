"""Follows a section of docs/run-anywhere.md as a person would: its commands as they stand, in their order.

These differ from the page: names that stand for the reader's own (RECIPE, STORE, ...), the size of the runs, and the
lines of `SKIPPED`. Of several launches the last one is cut short by the commands below it, as from a second terminal;
the others run to their end.
"""

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from composer_prime.config import load_recipe
from composer_prime.config.paths import RunPaths
from composer_prime.config.toml import to_toml
from composer_prime.executors.base import Job
from composer_prime.launch.records import open_launch
from composer_prime.store import open_store
from tests.architecture import REPOSITORY
from tests.executors.platforms import LoopbackPlatform
from tests.integration.local_runs import QUICK, started, trained
from tests.patience import PATIENCE_S, wait_until

PAGE = REPOSITORY / "docs/run-anywhere.md"
SKIPPED = {
    "modal token set ": "the loopback knows one token, which the environment has",
    "hf auth login": "the same",
    "python3 -m venv ~/sky ": "SkyPilot can't share our environment: the loopback is its server",
    "~/sky/bin/sky ": "the same",
}
"""Beginnings of lines that aren't run, and why."""
CACHE = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
"""Where warm models are, whatever the reader's home."""
NUM_STEPS, ENDLESS = 8, 4000
OVERRIDES = {**QUICK, "outer.quorum": 2}


def section(heading: str) -> str:
    """The text below a heading of the page."""
    return re.split(r"\n## ", PAGE.read_text().split(f"\n## {heading}\n", 1)[1])[0]


def commands(heading: str) -> list[str]:
    """The lines of a section's shell code, without comments."""
    blocks = re.findall(r"```bash\n(.*?)```", section(heading), flags=re.DOTALL)
    return [re.split(r"\s+# ", line)[0].strip() for block in blocks for line in block.splitlines()]


@dataclass
class Walkthrough:
    """One reader at one terminal, whose folder has the recipes of a checkout.

    names   the reader's own, by what stands for them on the page
    tables  further settings of RECIPE
    """

    folder: Path
    platform: LoopbackPlatform
    store: str
    sites: tuple[str, ...]
    environment: Mapping[str, str]
    names: Mapping[str, str] = field(default_factory=dict)
    tables: Mapping[str, object] = field(default_factory=dict)
    jobs: list[Job] = field(default_factory=list)
    """Of all launches."""
    launches: list[str] = field(default_factory=list)
    """Their names."""
    listed: str = ""
    """The answer of `modal app list`."""

    def __post_init__(self) -> None:
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        self._env = {**os.environ, "XDG_CACHE_HOME": CACHE, **self.environment, "PATH": path}
        (self.folder / "recipes").symlink_to(REPOSITORY / "recipes")
        self._recipes = 0

    def follow(self, lines: list[str]) -> None:
        """Run them all; fails at the first that does."""
        with self._terminals() as open_terminal:
            for number, line in enumerate(lines):
                later = [each.split()[1] for each in lines[number + 1 :] if each.startswith("composer-prime")]
                if line.startswith(tuple(SKIPPED)):
                    continue
                if line.startswith("pip install"):
                    assert re.fullmatch(r"pip install -e '\.\[\w+\]'", line), "which test_installing.py resolves"
                elif line.startswith("pip wheel"):
                    told = self._told(line).replace("--wheel-dir ", f"--wheel-dir {self.folder}/")
                    self._bash(f"cd {REPOSITORY}; {told}")
                elif line.startswith("composer-prime launch") and "--smoke" in line:
                    self._smoke(line)
                elif line.startswith("export "):
                    self._export(line)
                elif line.startswith("composer-prime launch"):
                    is_cut_short = "launch" not in later and "cancel" in later
                    self._launch(line, open_terminal if is_cut_short else None)
                elif line.startswith("composer-prime logs"):
                    log = open_terminal(self._told(line))
                    wait_until(lambda log=log: "state=running" in log.read_text(), f"{line}: lines of a site")
                else:
                    for told in self._each(line):
                        self._bash(told)

    def _launch(self, line: str, open_terminal: Callable[[str], Path] | None) -> None:
        """Start it, in a terminal of its own where it is to be cut short: then it returns once all sites train."""
        name = self._recipe(NUM_STEPS if open_terminal is None else ENDLESS)
        told = f"{self._told(line)} --poll-s 0.5 --yes"  # nobody is at this terminal
        if "--replicas" in told:
            told += f" --replicas {len(self.sites)}"
        if "RECIPE" not in line:
            told += "".join(f" --{key} {value}" for key, value in {**OVERRIDES, "max_steps": NUM_STEPS}.items())
            name = "two-sites"
        paths = RunPaths(self.folder / "outputs" / name)
        if open_terminal is None:
            self._bash(told)
            results = [json.loads(paths.site(site).result.read_text()) for site in self.sites]
            assert len({json.dumps(result["master_sha256"]) for result in results}) == 1
            assert all(result["steps"] > 0 for result in results)
        else:
            log = open_terminal(told)
            wait_until(lambda: all(trained(paths.site(site)) >= 2 for site in self.sites), f"steps of all in {log}")
        uri = self._store(name)
        with closing(open_store(uri)) as store, closing(self.platform.executor()) as executor:
            book = open_launch(store)
            self.launches.append(book.name)
            self.jobs += [each.job for each in book.attempts() if each.job is not None]
            assert executor.find(book.name)

    def _smoke(self, line: str) -> None:
        """Run it to its end, which leaves nothing in the bucket."""
        name = self._recipe(NUM_STEPS)
        self._bash(f"{self._told(line)} --poll-s 0.5 --yes")
        said = (self.folder / "terminal.log").read_text()
        self.launches += sorted(set(re.findall(r"smoke-[0-9a-f]{8}-[0-9a-f]{8}", said)))
        with closing(open_store(self._store(name))) as store:
            assert store.list("") == []

    def _recipe(self, max_steps: int) -> str:
        """Write the next RECIPE: the demo's of another name. Its run's name."""
        self._recipes += 1
        name = f"run-{self._recipes}"
        changes = {**OVERRIDES, "outer.store": self.store, "output_dir": self.folder / "outputs", "run.name": name}
        changes |= {"max_steps": max_steps, **self.tables}
        overrides = [part for key, value in changes.items() for part in (f"--{key}", str(value))]
        recipe = load_recipe(REPOSITORY / "recipes/local/two_sites.toml", overrides)
        (self.folder / f"{name}.toml").write_text(to_toml(recipe.to_data()))
        return name

    def _store(self, name: str) -> str:
        return f"{self.store}/{name}"

    def _told(self, line: str) -> str:
        """The line with the reader's own names."""
        name = f"run-{self._recipes}"
        for word, own in {**self.names, "RECIPE": f"{name}.toml", "STORE": self._store(name)}.items():
            line = line.replace(word, own)
        return line

    def _each(self, line: str) -> Iterator[str]:
        """The line for each thing that it names of what the last listing or the launches left."""
        app = "composer-prime-LAUNCH-0123456789ab"
        if app in line:
            listed = sorted(set(re.findall(r"composer-prime-[\w-]+", self.listed)))
            yield from (line.replace(app, each) for each in listed)
        elif "LAUNCH" in line:
            yield from (line.replace("LAUNCH", each) for each in self.launches)
        else:
            yield self._told(line)

    def _bash(self, line: str) -> None:
        log = self.folder / "terminal.log"
        with self._started(line, log) as process:
            assert process.wait(PATIENCE_S) == 0, f"{line}\n{log.read_text()}"
        if line.startswith("modal app list"):
            self.listed = log.read_text()

    def _started(self, line: str, log: Path) -> AbstractContextManager["subprocess.Popen[bytes]"]:
        return started(["bash", "-euo", "pipefail", "-c", line], log, cwd=self.folder, env=self._env)

    def _export(self, line: str) -> None:
        script = f"{self._told(line)}; env -0"
        done = subprocess.run(["bash", "-euc", script], env=self._env, capture_output=True, text=True, check=True)
        self._env = dict(each.split("=", 1) for each in done.stdout.split("\0") if each)

    @contextmanager
    def _terminals(self) -> Iterator[Callable[[str], Path]]:
        """A function that runs a command in a terminal of its own, and gives its output's file. At the end all commands
        have ended by themselves."""
        opened: list[tuple[str, subprocess.Popen[bytes], Path]] = []
        with ExitStack() as stack:

            def open_terminal(line: str) -> Path:
                log = self.folder / f"terminal-{len(opened)}.log"
                opened.append((line, stack.enter_context(self._started(line, log)), log))
                return log

            yield open_terminal
            for line, process, log in opened:
                process.wait(PATIENCE_S)
                assert "Traceback" not in log.read_text(), f"{line}\n{log.read_text()}"

    def still_running(self) -> list[str]:
        """Command lines of jobs' processes that live, and of others that touch the reader's folder or bucket."""
        found = {pid for job in self.jobs for pid in self.platform.pids(job)}
        marks = (self.store, f"{self.folder}/")
        for process in psutil.process_iter(["pid", "cmdline"]):
            line = " ".join(process.info["cmdline"] or ())
            if "composer_prime" in line and any(mark in line for mark in marks):
                found.add(process.info["pid"])
        return [f"{pid}: {' '.join(psutil.Process(pid).cmdline())}" for pid in found if psutil.pid_exists(pid)]
