"""Starts `composer-prime` as a person does, and watches what its processes touch."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from composer_prime.config.paths import RunPaths, SitePaths
from composer_prime.metrics import read_tape
from tests.patience import PATIENCE_S

REPOSITORY = Path(__file__).parents[2]
ROLES = ("inference", "orchestrator", "trainer")
QUICK = {
    "orchestrator.batch_size": 8,
    "orchestrator.group_size": 4,
    "orchestrator.max_off_policy_steps": 4,
    "outer.inner_steps": 4,
    "outer.sync_delay": 1,
    "outer.grace_s": 4.0,
    "outer.liveness_s": 3.0,
    "ckpt.interval": 2,
}
"""The demo's recipe made small: two prompts a step and four rollouts of each, a round every second step."""

REPEATABLE: dict[str, object] = {
    "max_steps": 12,
    "orchestrator.max_off_policy_steps": 0,
    "inference.max_batch_size": 1,
    "outer.quorum": 2,
    "outer.grace_s": PATIENCE_S,
    "outer.liveness_s": PATIENCE_S,
}
"""Each step on what the step before it left, one rollout at a time, and rounds that take both sites' offers."""

PATHS = (
    *("/health", "/docs", "/metrics", "/v1/models", "/v1/chat/completions", "/v1/messages", "/v1/responses"),
    *("/inference/v1/generate", "/tokenize", "/detokenize", "/update_weights", "/pause", "/resume"),
    *("/state", "/tool", "/task", "/mcp"),
)
"""Of a site's own server, and of verifiers' proxy for rollouts."""


@dataclass
class Touched:
    """What one process of a run was seen to use."""

    role: str
    site: str
    arguments: list[str]
    files: set[str] = field(default_factory=set)
    listens: set[int] = field(default_factory=set)
    answers: set[str] = field(default_factory=set)
    """"METHOD /path" of what one of its ports answered to a stranger with more than a refusal."""
    calls: set[int] = field(default_factory=set)


def command(verb: str, output_dir: Path, *arguments: str, **changes: object) -> list[str]:
    """`composer-prime <verb>` on the demo's recipe, made quick, with `changes` (a key's dots written as `__`)."""
    values = QUICK | {name.replace("__", "."): value for name, value in changes.items()}
    overrides = [part for name, value in values.items() for part in (f"--{name}", str(value))]
    recipe = str(REPOSITORY / "recipes/local/two_sites.toml")
    executable = str(Path(sys.executable).with_name("composer-prime"))
    return [executable, verb, recipe, *arguments, "--output_dir", str(output_dir), *overrides]


@contextmanager
def started(
    arguments: list[str], log: Path, *, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """The command as a process of its own, output in `log`; killed with all its children if a test leaves early."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            arguments, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=cwd, env=env
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
            for member in family:
                member.kill()
            process.wait(PATIENCE_S)


def run_paths(output_dir: Path) -> RunPaths:
    """The folder of the recipe's run."""
    return RunPaths(output_dir / "two-sites")


def trained(paths: SitePaths) -> int:
    """Steps a site has trained, as its tape says."""
    return len(read_tape(paths.tape("trainer"))) if paths.tape("trainer").exists() else 0


def wait_until(
    holds: Callable[[], bool], process: subprocess.Popen[bytes], log: Path, timeout_s: float = PATIENCE_S
) -> None:
    """Wait for something a running command is to bring about; fails with its output when it ends or hangs."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert process.poll() is None, f"ended with {process.returncode}:\n{log.read_text()[-3000:]}"
        assert time.monotonic() < deadline, f"not within {PATIENCE_S} s:\n{log.read_text()[-3000:]}"
        time.sleep(0.05)


def role_processes(process: subprocess.Popen[bytes]) -> dict[tuple[str, str], psutil.Process]:
    """(site, role) -> the running process, among the command's descendants."""
    found = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            arguments = child.cmdline()
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        for role in ROLES:
            module = f"composer_prime.sites.embedded.{role}"
            if module in arguments and Path(arguments[-1]).parent.name == "sites":
                found[Path(arguments[-1]).name, role] = child
    return found


def look(processes: dict[tuple[str, str], psutil.Process], seen: dict[int, Touched]) -> None:
    """Add to `seen` (by process id) what these processes, as `role_processes` gives them, use at this moment."""
    for (site, role), child in processes.items():
        try:
            touched = seen.setdefault(child.pid, Touched(role, site, child.cmdline()))
            touched.files.update(file.path for file in child.open_files())
            for connection in child.net_connections(kind="inet"):
                if connection.status == psutil.CONN_LISTEN:
                    assert connection.laddr.ip == "127.0.0.1", f"{role} listens on {connection.laddr}"
                    if connection.laddr.port not in touched.listens:
                        touched.answers |= answers_to_strangers(connection.laddr.port)
                    touched.listens.add(connection.laddr.port)
                elif connection.raddr:
                    touched.calls.update({connection.laddr.port, connection.raddr.port})
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue


def answers_to_strangers(port: int) -> set[str]:
    """As `Touched.answers`. A port that closes meanwhile answers nothing."""
    answered = set()
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=PATIENCE_S) as http:
        for method in ("GET", "POST", "PUT", "DELETE"):
            for path in PATHS:
                try:
                    status = http.request(method, path, content=b"{}").status_code
                except httpx.TransportError:
                    return answered
                if status not in (401, 404, 405):
                    answered.add(f"{method} {path}")
    return answered
