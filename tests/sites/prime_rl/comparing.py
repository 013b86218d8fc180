"""Are two sets of tensors the same, bit for bit?"""

from collections.abc import Mapping

import torch
from torch import Tensor


def assert_same(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """The same names, and under each the same values."""
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def differs(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    """Whether any tensor differs."""
    return any(not torch.equal(ours[name], theirs[name]) for name in ours)
