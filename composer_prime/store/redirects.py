"""Where a 302 leads that answers the reading of an object: Hugging Face's S3 endpoint sends readers to an edge near by.

It leaves those alone who call themselves botocore; who reads by a presigned URL is sent. Only reads are followed, and
nothing that was signed goes along: the new address is good by itself.
"""

from urllib.parse import urljoin, urlsplit

FOUND = 302
MAX_HOPS = 3


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
    return target


def host_of(url: str) -> str:
    """What may be said of an address: its query may hold a signature."""
    return urlsplit(url).netloc.rpartition("@")[2]
