"""Where the rounds of integrations/torchft.py lie, in a run of their own: as keys.py, for those objects alone."""

import re

from composer_prime.config.table import SITE_NAME
from composer_prime.errors import ProtocolError
from composer_prime.store.keys import ROUND_DIGITS, check_site_name, fixed_number, short_sha

_CONTRIBUTION = re.compile(rf"torchft/rounds/(\d{{8}})/contributions/({SITE_NAME})\.json")


def run() -> str:
    """The create-once record of what the replicas agree on."""
    return "torchft/run.json"


def round_prefix(number: int) -> str:
    """Prefix of everything that belongs to one round; rounds are counted over all fragments."""
    return f"torchft/rounds/{fixed_number('round', number, ROUND_DIGITS)}/"


def contributions_prefix(number: int) -> str:
    """Prefix of a round's contribution records, and of nothing else."""
    return f"{round_prefix(number)}contributions/"


def contribution(number: int, replica: str) -> str:
    """One replica's create-once record for one round."""
    return f"{contributions_prefix(number)}{check_site_name(replica)}.json"


def replica(key: str) -> str:
    """The replica that made the contribution record at `key`; ProtocolError when it is no such key."""
    match = _CONTRIBUTION.fullmatch(key)
    if match is None:
        raise ProtocolError(f"key ({key!r}) does not name a contribution: pass a key that this module spelled")
    return match[2]


def payload_prefix(number: int, replica: str) -> str:
    """Prefix of one replica's payloads of one round."""
    return f"{round_prefix(number)}payload/{check_site_name(replica)}-"


def payload(number: int, replica: str, sha: str) -> str:
    """The tensors a contribution names, addressed by the sha256 (hex) of their bytes."""
    return f"{payload_prefix(number, replica)}{short_sha(sha)}"


def decision(number: int) -> str:
    """The create-once record that decides whose contributions make the round."""
    return f"{round_prefix(number)}decision.json"
