"""Bytes at keys in a bucket: all that sites share, behind one small protocol.

`open_store(uri)` opens a folder, a bucket (S3, Google's, Hugging Face's) or this process's memory; `probe_store(store)`
refuses one that can't be used or that lets two writers win, and `race_store(store)` does so under racing writers. Where
each object of a run lies is spelled in `composer_prime.store.keys`.
"""

from composer_prime.store.base import Store
from composer_prime.store.open import open_store
from composer_prime.store.probe import probe_store, race_store

__all__ = ["Store", "open_store", "probe_store", "race_store"]
