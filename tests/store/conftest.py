"""The store room's servers, for all its tests."""

from tests.servers.fixtures import gcs, rclone, store_uri

__all__ = ["gcs", "rclone", "store_uri"]
