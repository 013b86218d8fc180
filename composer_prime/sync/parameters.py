"""The parameters that the outer loop moves, as one flat fp32 vector per fragment, wherever they really lie."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from composer_prime.outer.fragments import Fragment
from composer_prime.outer.pseudograd import flatten, rounded, write_back


class Parameters(Protocol):
    """A site's trainable parameters. Used by its training thread only."""

    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Name and whole shape of each, in the model's order."""
        ...

    def read(self, fragment: Fragment) -> Tensor:
        """The fragment's values now: fp32 [n] on the CPU, sharing no memory with the parameters."""
        ...

    def write(self, fragment: Fragment, flat: Tensor) -> Tensor:
        """Set the fragment to `flat`, fp32 [n], and return what the parameters now hold, after rounding."""
        ...

    def rounded(self, fragment: Fragment, flat: Tensor) -> Tensor:
        """What `write` would return, without writing."""
        ...


class LocalParameters:
    """Parameters that lie whole in this process, on any device and of any float dtype."""

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        """params: the trainable ones by clean name, as `outer.fragments.trainable` gives them"""
        self._params = dict(params)

    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(name, tuple(value.shape)) for name, value in self._params.items()]

    def read(self, fragment: Fragment) -> Tensor:
        return flatten(self._params, fragment)

    def write(self, fragment: Fragment, flat: Tensor) -> Tensor:
        return write_back(flat, self._params, fragment)

    def rounded(self, fragment: Fragment, flat: Tensor) -> Tensor:
        return rounded(flat, self._params, fragment)
