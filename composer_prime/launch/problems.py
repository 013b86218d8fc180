"""What a person must mend before a launch: found one by one, said all at once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from composer_prime.errors import BadInput, BadInputs

T = TypeVar("T")


class Problems:
    """Collects BadInput, each once."""

    def __init__(self) -> None:
        self._found: dict[str, None] = {}

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Keep a BadInput that is raised within, and go on."""
        try:
            yield
        except BadInput as error:
            self._found[str(error)] = None

    def get(self, find: Callable[[], T], default: T) -> T:
        """What `find` gives; `default` where it raises BadInput, which is kept."""
        with self.noted():
            return find()
        return default

    def check(self) -> None:
        """Raise BadInput where there are any: BadInputs, a line for each, for several."""
        if self._found:
            raise (BadInput if len(self._found) == 1 else BadInputs)("\n".join(self._found))
