"""A host as another machine reaches it: what the ssh configuration and the login here add to it is written out.

An `address` may be a `Host` of ~/.ssh/config, and a missing `user` is whoever launches: neither means the same on
another machine.
"""

import logging
from pathlib import Path
from typing import Any

import asyncssh

from composer_prime.errors import BadInput
from composer_prime.executors.ssh.hosts import Hop, Host, check_hosts, parse_jump

log = logging.getLogger(__name__)


def written_out(name: str, host: Host) -> Host:
    """`host` with address, user, port and way written out, and without what this machine alone has a use for.

    Raises BadInput for what no record can say.
    """
    options = _options(name, host, Hop(host.address, host.user, host.port))
    table = host.model_dump(exclude={"env", "known_hosts", "ssh_config"}) | {
        "address": options.host,
        "user": options.username,
        "port": options.port,
        "proxy_jump": ",".join(_spelled(_options(name, host, hop)) for hop in _way(name, host, options)) or None,
    }
    return check_hosts({"hosts": {name: table}}, f"host {name}, as ssh's configuration here has it")[name]


def _way(name: str, host: Host, options: Any) -> tuple[Hop, ...]:
    """The machines on the way, nearest first: the file's, else those of ssh's configuration."""
    if host.hops:
        return host.hops
    if isinstance(options.tunnel, str) and options.tunnel != "none":
        try:
            return parse_jump(options.tunnel)
        except ValueError as error:
            raise BadInput(f"host {name}: {host.ssh_config}: {error}") from None
    if options.proxy_command:
        log.warning(
            "host=%s is reached by a ProxyCommand of %s, which no bucket records: elsewhere, ps, logs and cancel need "
            "--on ssh:FILE",
            name,
            host.ssh_config,
        )
    return ()


def _options(name: str, host: Host, hop: Hop) -> Any:
    """What asyncssh makes of a machine and the configuration; no key is read."""
    config = Path(host.ssh_config).expanduser()
    given: dict[str, Any] = {"host": hop.address, "client_keys": None, "known_hosts": None, "agent_path": None}
    given["config"] = [str(config)] if host.ssh_config and config.is_file() else None
    if hop.port is not None:
        given["port"] = hop.port
    if hop.user is not None:
        given["username"] = hop.user
    try:
        return asyncssh.SSHClientConnectionOptions(**given)
    except asyncssh.ConfigParseError as error:
        raise BadInput(f"host {name}: ssh_config ({host.ssh_config}) can't be read: {error}") from None


def _spelled(options: Any) -> str:
    address = f"[{options.host}]" if ":" in options.host else options.host
    return f"{options.username}@{address}:{options.port}"
