"""A network of this machine's own for `bench link`: a hub where the bucket stands, and a namespace for every site.

Each site hangs on the hub by one cable (a veth pair), shaped in both directions by a token bucket. Nothing outside is
reachable from inside, and nothing is left behind: what a killed bench left is taken away by the next one.
"""

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from composer_prime.errors import BadInput

PREFIX = "cplink"
HUB_ADDRESS = "10.213.0.1"
LATENCY_MS = 50
"""Longest that a packet queues before it is dropped."""
CONGESTION_CONTROL = "reno"
"""Set for the hub and the sites, so that a bench doesn't depend on the host's: every kernel lets a namespace have it,
and on such links cubic is like it. With BBR, one of three downloads at 10 Mbit/s sometimes starved for a second."""
BURST_S = 0.01
LEAST_BURST_BYTES = 64 * 1024
"""A bucket of tokens holds 10 ms of the rate and no less than 64 KiB: the kernel hands packets over in such pieces."""


@dataclass(frozen=True)
class Network:
    """The hub and its sites; `rates` are set later, so that a bench needn't start at the speed it measures."""

    name: str
    sites: tuple[str, ...]

    def at_hub(self) -> list[str]:
        """The command that runs what follows where the bucket stands."""
        return ["ip", "netns", "exec", f"{self.name}-hub"]

    def at_site(self, site: str) -> list[str]:
        """The command that runs what follows at a site."""
        return ["ip", "netns", "exec", f"{self.name}-{site}"]

    def shape(self, rate_mbit: float, only: Sequence[str] = ()) -> None:
        """Limit every cable, or those of the sites named in `only`, to `rate_mbit` each way."""
        burst = max(LEAST_BURST_BYTES, int(rate_mbit * 1e6 / 8 * BURST_S))
        shaper = ["root", "tbf", "rate", f"{rate_mbit}mbit", "burst", f"{burst}b", "latency", f"{LATENCY_MS}ms"]
        for number, site in enumerate(self.sites):
            if only and site not in only:
                continue
            _run("tc", "-n", f"{self.name}-{site}", "qdisc", "replace", "dev", "eth0", *shaper)
            _run("tc", "-n", f"{self.name}-hub", "qdisc", "replace", "dev", f"port{number}", *shaper)


def why_not() -> str | None:
    """Why this machine can't have such a network; None when it can, as far as one sees without trying."""
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if missing:
        return f"bench link needs {' and '.join(missing)}: install iproute2"
    if os.geteuid() != 0:
        return "bench link needs root, to make network namespaces and shape their links: run it as root"
    return None


@contextlib.contextmanager
def network(sites: Sequence[str]) -> Iterator[Network]:
    """A hub and these sites until the block ends; whatever still runs in them then is killed. Unshaped at first.

    Raises BadInput when this machine doesn't let us.
    """
    reason = why_not()
    if reason is not None:
        raise BadInput(reason)
    remove_leftovers()
    made = Network(f"{PREFIX}{os.getpid()}", tuple(sites))
    try:
        _build(made)
        yield made
    finally:
        _remove(made.name)


def _build(made: Network) -> None:
    hub = f"{made.name}-hub"
    _run("ip", "netns", "add", hub)
    _run("ip", "-n", hub, "link", "set", "lo", "up")
    _run("ip", "-n", hub, "link", "add", "bridge", "type", "bridge")
    _run("ip", "-n", hub, "address", "add", f"{HUB_ADDRESS}/24", "dev", "bridge")
    _run("ip", "-n", hub, "link", "set", "bridge", "up")
    _set_congestion_control(hub)
    for number, name in enumerate(made.sites):
        site, port = f"{made.name}-{name}", f"port{number}"
        _run("ip", "netns", "add", site)
        _set_congestion_control(site)
        _run("ip", "-n", hub, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", site)
        _run("ip", "-n", hub, "link", "set", port, "master", "bridge", "up")
        _run("ip", "-n", site, "link", "set", "lo", "up")
        _run("ip", "-n", site, "address", "add", f"10.213.0.{number + 2}/24", "dev", "eth0")
        _run("ip", "-n", site, "link", "set", "eth0", "up")


def _set_congestion_control(namespace: str) -> None:
    """For the connections that are made in a namespace; whoever sends decides."""
    setting = "/proc/sys/net/ipv4/tcp_congestion_control"
    _run("ip", "netns", "exec", namespace, "sh", "-c", f"echo {CONGESTION_CONTROL} > {setting}")


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"code {done.returncode}"]
        raise BadInput(
            f"bench link can't make its network, `{' '.join(command)}` said: {said[-1]}; "
            "it needs the rights to make network namespaces, and a kernel with veth and tbf"
        )
    return done.stdout


def _namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(PREFIX)]


def _remove(name: str) -> None:
    """Kill what runs in a network's namespaces and delete them; their cables go with them."""
    for namespace in [each for each in _namespaces() if each.startswith(f"{name}-")]:
        inside = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
        for pid in map(int, inside.stdout.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


def remove_leftovers() -> None:
    """Take away the networks of benches that no longer live."""
    for name in {namespace.partition("-")[0] for namespace in _namespaces()}:
        if not Path(f"/proc/{name.removeprefix(PREFIX)}").exists():
            _remove(name)
