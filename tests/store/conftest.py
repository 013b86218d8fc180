"""The store room's servers, for all its tests."""

from tests.servers.fixtures import faulty, faulty_store, gcs, rclone, store_uri

__all__ = ["faulty", "faulty_store", "gcs", "rclone", "store_uri"]
