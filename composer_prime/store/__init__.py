"""Bytes at keys in a bucket: all that sites share, behind one small protocol.

`open_store(uri)` opens a folder, an S3 bucket or this process's memory; `probe_store(store)` refuses one that can't be
used or that lets two writers win. Where each object of a run lies is spelled in `composer_prime.store.keys`.
"""

from composer_prime.store.base import Store
from composer_prime.store.open import open_store, probe_store

__all__ = ["Store", "open_store", "probe_store"]
