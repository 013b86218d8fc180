"""Where the records of invitations lie, what the owner promised to whom, in the run's bucket (see `store.keys`)."""

import re

from composer_prime.config.table import SITE_NAME
from composer_prime.store.keys import ORDER_DIGITS, check_site_name, fixed_number

_INVITATION = re.compile(rf"invitations/({SITE_NAME})/(\d{{4}})\.json")


def invitations_prefix() -> str:
    """Prefix of all records of invitations; they sort by site and number."""
    return "invitations/"


def invitations_of(site: str) -> str:
    """Prefix of the records of one site's invitations; they sort by number."""
    return f"{invitations_prefix()}{check_site_name(site)}/"


def invitation(site: str, number: int) -> str:
    """The create-once, owner-signed record of the `number`-th time, from 1, that a site was invited."""
    return f"{invitations_of(site)}{fixed_number('invitation', number, ORDER_DIGITS)}.json"


def is_invitation(key: str) -> bool:
    """True when `key` is that of an invitation's record."""
    return _INVITATION.fullmatch(key) is not None
