"""The store room's servers, for all its tests."""

from tests.servers.fixtures import az, faulty, faulty_store, gs, rclone, store_uri

__all__ = ["az", "faulty", "faulty_store", "gs", "rclone", "store_uri"]
