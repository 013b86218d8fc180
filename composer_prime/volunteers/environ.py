"""This process's environment, changed for a while."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


@contextmanager
def restored(names: Iterable[str]) -> Iterator[None]:
    """Give these variables back the values that they have now, or none, at the block's end."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
