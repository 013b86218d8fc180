"""Where a 302 leads that answers the reading of an object: Hugging Face's S3 endpoint sends readers to an edge near by.

It leaves those alone who call themselves botocore; who reads by a presigned URL is sent. Only reads are followed, and
nothing that was signed goes along: the new address is good by itself.
"""

import ipaddress
import re
from urllib.parse import urljoin, urlsplit

FOUND = 302
MAX_HOPS = 3
_NAME = re.compile(r"([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)+([a-z]{2,63}|xn--[a-z0-9-]{1,59})")
_PRIVATE_ENDINGS = (
    ".local", ".localhost", ".localdomain", ".internal", ".intranet", ".private", ".corp", ".home", ".lan",
    ".home.arpa", ".test", ".invalid",
)  # fmt: skip


class Astray(Exception):
    """A redirect that isn't followed, and why."""


def next_url(url: str, location: str, hop: int) -> str:
    """Where the answer to `url` leads, which stood after `hop` others. Raises Astray; its text holds no address."""
    if not location:
        raise Astray("a redirect without an address")
    if hop >= MAX_HOPS:
        raise Astray(f"more than {MAX_HOPS} redirects")
    target = urljoin(url, location)
    if urlsplit(target).scheme not in ("https", urlsplit(url).scheme):
        raise Astray("a redirect from https to something else")
    if not may_lead(url, target):
        raise Astray("a redirect from the internet to an address of one's own network")
    return target


def may_lead(url: str, target: str) -> bool:
    """Whether who asks at `url` may be sent to `target`: from the internet to no machine or network of one's own."""
    return is_public(urlsplit(target).hostname or "") or not is_public(urlsplit(url).hostname or "")


def is_public(host: str) -> bool:
    """Whether a host is a name of the internet, or an IPv4 address of it in four plain numbers."""
    host = host.lower()
    try:
        return ipaddress.IPv4Address(host).is_global and not ipaddress.IPv4Address(host).is_multicast
    except ValueError:
        return bool(_NAME.fullmatch(host)) and not host.endswith(_PRIVATE_ENDINGS)


def host_of(url: str) -> str:
    """What may be said of an address: its query may hold a signature."""
    return urlsplit(url).netloc.rpartition("@")[2]
