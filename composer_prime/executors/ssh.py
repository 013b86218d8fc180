"""A site on a machine of one's own over ssh: nothing needs to be installed there but Python, no port opened but sshd's.

`--on ssh:[user@]address[:port]` is one host, which a launch gives one site; all else is as ssh's own configuration has
it. Each request is a connection of its own, checked against known_hosts. A shim's code and its request go over standard
input, so that nothing secret stands on a command line. Every request may be repeated: what it asks for is done once.
"""

import asyncio
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import asyncssh

from composer_prime.errors import BadInput
from composer_prime.executors import shim
from composer_prime.executors.local import SHIM_COMMAND, HostExecutor, read_reply, shim_input
from composer_prime.executors.services import Busy, patiently

ROOT = "~/.composer-prime"
"""Folder there for jobs, their logs, and the environment whose programs jobs find first, `venv`."""
CONNECT_S, ANSWER_S, KEEPALIVE_S = 15.0, 60.0, 15.0
"""Limits of one try, the second beyond what a request waits for by itself; how often a connection must show life."""

# ssh's configuration may put these words into commands (ProxyCommand, Match exec): no shell sees more in them.
_HOST = re.compile(
    r"(?:(?P<user>[A-Za-z0-9_][A-Za-z0-9._+-]{0,63})@)?"
    r"(?P<address>[A-Za-z0-9_][A-Za-z0-9._-]{0,254}|\[[0-9A-Fa-f:.]{2,45}\])(?::(?P<port>\d{1,5}))?"
)


class SshExecutor(HostExecutor):
    """One host as a platform.

    host      [user@]address[:port]; BadInput for what isn't. What is left out is as ~/.ssh/config says
    grace_s   seconds that a job has to end by itself after it was told to, before it is killed
    """

    platform, where = "ssh", "a host over ssh"

    def __init__(self, host: str, *, grace_s: float = shim.GRACE_S) -> None:
        super().__init__(host, ROOT, grace_s)
        match = _HOST.fullmatch(host)
        if match is None or (match["port"] and not 1 <= int(match["port"]) <= 65535):
            raise BadInput(
                f"--on ssh:{host} must be ssh:[user@]address[:port], with a name or an IP address: another name goes "
                "into ~/.ssh/config, as the HostName of a Host"
            )
        address, user, port = match["address"].strip("[]"), match["user"], match["port"]
        options = ["-p", port] if port else []
        self._ssh_command = shlex.join(["ssh", *options, f"{user}@{address}" if user else address])
        self._user = user or "of ~/.ssh/config"
        given = {"host": address, "username": user, "port": int(port or 0)}
        self._address = {name: value for name, value in given.items() if value}

    def credentials(self) -> dict[str, str]:
        raise BadInput(
            f"jobs on ssh:{self._name} can't be watched from another machine, since ssh's keys stay here: launch "
            "them without --supervise-on, on a machine that stays up"
        )

    def account(self) -> str:
        return "the host's"  # there they are, whoever looks

    def _call(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Also raises BadInput, for a host that can't be used."""
        return patiently(lambda: asyncio.run(self._call_once(request)))

    async def _call_once(self, request: Mapping[str, Any]) -> dict[str, Any]:
        limit_s = ANSWER_S + request.get("wait_s", 0.0)
        try:
            async with asyncssh.connect(**self._options()) as connection, asyncio.timeout(limit_s):
                command = shlex.join(["python3", *SHIM_COMMAND])
                done = await connection.run(command, input=shim_input(request), encoding=None)
        except asyncssh.HostKeyNotVerifiable as error:
            raise BadInput(
                f"host {self._name}: {error.reason}: ~/.ssh/known_hosts doesn't hold the key that it shows. Compare "
                f"the fingerprint by `{self._ssh_command}`, then add or replace it; nothing was sent"
            ) from None
        except asyncssh.PermissionDenied:
            raise BadInput(
                f"host {self._name} refuses the agent's keys and those of ~/.ssh for user {self._user}: add a public "
                "key to authorized_keys there, or name another user or IdentityFile in ~/.ssh/config"
            ) from None
        except ValueError as error:
            raise BadInput(f"host {self._name}: ~/.ssh can't be read: {error}: ssh-add a key that is locked") from None
        except (OSError, asyncssh.Error) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise Busy(f"host {self._name} doesn't answer: {reason}") from None
        reply = read_reply(cast(bytes, done.stdout), cast(bytes, done.stderr))
        if done.exit_status is None and "error" in reply:
            raise Busy(f"host {self._name} doesn't answer: the connection was lost before the answer")
        if done.exit_status in (126, 127):
            return {"refused": f"python3 can't be run there: {reply['error']}. Install Python 3.9 or newer"}
        return reply

    def _options(self) -> dict[str, Any]:
        """As asyncssh takes them. What is left out comes from ssh's own configuration."""
        known = Path("~/.ssh/known_hosts").expanduser()
        return {
            **self._address,
            "known_hosts": str(known) if known.is_file() else b"",
            "connect_timeout": CONNECT_S,
            "keepalive_interval": KEEPALIVE_S,
            "preferred_auth": "publickey",
            "agent_forwarding": False,
        }
