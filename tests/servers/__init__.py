"""Real servers for tests, each started as a process of its own on free loopback ports and gone afterwards.

`weed.seaweed(folder)` and `moto_server.running(folder)` yield an `S3Server`; tests/conftest.py has fixtures of both.
"""

from tests.servers.process import ServerFailed
from tests.servers.s3 import S3Server

__all__ = ["S3Server", "ServerFailed"]
