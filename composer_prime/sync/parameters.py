"""The parameters that the outer loop moves, as one flat fp32 vector per fragment, wherever they really lie."""

import hashlib
from collections.abc import Mapping
from itertools import zip_longest
from typing import TYPE_CHECKING, Protocol, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from composer_prime.outer.chunks import empty
from composer_prime.outer.fragments import Fragment
from composer_prime.outer.merge import Change, changed
from composer_prime.outer.pseudograd import copy_to_host, flatten, places, rounded, write_back

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class Parameters(Protocol):
    """A site's trainable parameters. Used by its training thread only."""

    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Name and whole shape of each, in the model's order."""
        ...

    def read(self, fragment: Fragment) -> Tensor:
        """The fragment's values now: fp32 [n] on the CPU, sharing no memory with the parameters."""
        ...

    def write(self, fragment: Fragment, flat: Tensor) -> Tensor:
        """Set the fragment to `flat`, fp32 [n], and return what the parameters now hold, after rounding.

        That may be `flat` itself, which nobody may write to afterwards.
        """
        ...

    def change(self, fragment: Fragment, change: Change) -> None:
        """Set the fragment to what `change` makes of its values now."""
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
        if not self._keeps_fp32(fragment):
            return write_back(flat, self._params, fragment)
        with torch.no_grad():
            for parameter, start, stop in places(self._params, fragment):
                parameter.copy_(flat[start:stop].view(parameter.shape))
        return flat

    def change(self, fragment: Fragment, change: Change) -> None:
        if not all(_is_flat_fp32(parameter) for parameter, _, _ in places(self._params, fragment)):
            self.write(fragment, changed(self.read(fragment), change))
            return
        with torch.no_grad():
            for parameter, start, _ in places(self._params, fragment):
                changed(parameter.view(-1), change, start)

    def rounded(self, fragment: Fragment, flat: Tensor) -> Tensor:
        return flat if self._keeps_fp32(fragment) else rounded(flat, self._params, fragment)

    def _keeps_fp32(self, fragment: Fragment) -> bool:
        """Whether nothing is rounded: then no copy is made, since adopting holds up the training thread."""
        return all(parameter.dtype == torch.float32 for parameter, _, _ in places(self._params, fragment))


def _is_flat_fp32(parameter: Tensor) -> bool:
    """Whether spans of a parameter are spans of its memory here, so that it can be changed where it lies."""
    return parameter.dtype == torch.float32 and parameter.device.type == "cpu" and parameter.is_contiguous()


class RankedParameters:
    """Parameters that lie over the ranks of a process group: sharded ones (DTensors), or the same on every rank.

    `gather` and `scatter` are collectives: every rank calls them on its training thread, with the same fragment. A
    DTensor moves over its own mesh (NCCL on GPUs), one whole parameter at a time on each rank, so that every layout
    that DTensor knows will do; the flat vector, and what follows from it, is rank 0's alone. Shards are those of the
    optimizer: FSDP2 must have resharded, as it has after a backward pass.
    """

    def __init__(self, params: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        """
        params  as for `LocalParameters`; a parameter that isn't sharded counts as rank 0 has it
        group   the site's ranks; CPU tensors must be able to travel over it
        """
        self._params = dict(params)
        self._group = group
        self._leads = dist.get_rank(group) == 0

    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(name, tuple(value.shape)) for name, value in self._params.items()]

    def fault(self) -> str | None:
        """Why these parameters won't do: not alike on all ranks, or not over all of them. Collective; alike on all."""
        described = [self._describe(name, parameter) for name, parameter in self._params.items()]
        lines = [line for line, _ in described]
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()  # many ranks' whole lists would be big
        told = _gathered((digest, next((fault for _, fault in described if fault is not None), None)), self._group)
        for rank, (_, fault) in enumerate(told):
            if fault is not None:
                return f"rank {rank} of this site: {fault}"
        if len({digest for digest, _ in told}) > 1:
            return _difference(_gathered(lines, self._group))
        return None

    def rounded(self, fragment: Fragment, flat: Tensor) -> Tensor:
        """As `Parameters.rounded`; no collective."""
        return rounded(flat, self._params, fragment)

    def gather(self, fragment: Fragment) -> Tensor | None:
        """On rank 0 as `Parameters.read`; None on the others."""
        flat = empty(fragment.numel) if self._leads else None
        with torch.no_grad():
            for parameter, start, stop in places(self._params, fragment):
                whole = _whole(parameter)
                if flat is not None:
                    copy_to_host(whole, flat[start:stop])
        return flat

    def scatter(self, fragment: Fragment, flat: Tensor | None) -> Tensor | None:
        """On rank 0 as `Parameters.write`; the others pass and get None."""
        held = None if flat is None else self.rounded(fragment, flat)
        with torch.no_grad():
            for parameter, start, stop in places(self._params, fragment):
                self._put(parameter, None if held is None else held[start:stop])
        return held

    def _put(self, parameter: Tensor, values: Tensor | None) -> None:
        """Set a parameter on every rank to rank 0's values, which its dtype holds exactly; None on the others."""
        device = torch.device(parameter.device_mesh.device_type) if _is_sharded(parameter) else torch.device("cpu")
        if values is None:
            whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        else:
            whole = values.to(parameter.dtype).view(parameter.shape).to(device)
        if _is_sharded(parameter):
            from torch.distributed.tensor import distribute_tensor

            shard = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=0)
            parameter.to_local().copy_(shard.to_local())
        else:
            dist.broadcast(whole, group=self._group, group_src=0)
            parameter.copy_(whole)

    def _describe(self, name: str, parameter: Tensor) -> tuple[str, str | None]:
        """What must be alike on all ranks, and what is wrong with it for a group of these ranks."""
        line = f"{name} {'x'.join(map(str, parameter.shape))} {parameter.dtype}"
        if not _is_sharded(parameter):
            return line, None
        lies_over = parameter.device_mesh.mesh.flatten().tolist()
        ranks = dist.get_process_group_ranks(self._group)
        fault = None
        if sorted(lies_over) != sorted(ranks) or lies_over[0] != ranks[0]:
            fault = (
                f"parameter {name} lies over ranks {lies_over}, the site has ranks {ranks}: shard every parameter "
                "over all ranks of the site, first rank first (pipeline stages can't take part)"
            )
        return f"{line} {parameter.placements}", fault


def _is_sharded(parameter: Tensor) -> "TypeGuard[DTensor]":
    from torch.distributed.tensor import DTensor  # here, as it takes half a second that sites of one rank don't owe

    return isinstance(parameter, DTensor)


def _whole(parameter: Tensor) -> Tensor:
    """All values of a parameter. Collective when it is sharded."""
    if not _is_sharded(parameter):
        return parameter
    mesh, local = parameter.device_mesh, parameter.to_local()
    if local.device.type == mesh.device_type:
        return parameter.full_tensor()
    # Shards that FSDP2 keeps on the CPU: the mesh may only know how to talk on its own device.
    from torch.distributed.tensor import DTensor

    moved = DTensor.from_local(
        local.to(mesh.device_type),
        mesh,
        parameter.placements,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return moved.full_tensor()


def _gathered(told: object, group: dist.ProcessGroup) -> list:
    """What every rank told, by rank."""
    heard: list[object] = [None] * dist.get_world_size(group)
    dist.all_gather_object(heard, told, group=group)
    return heard


def _difference(lists: list[list[str]]) -> str:
    """The first difference between rank 0's parameters and another rank's."""
    first = lists[0]
    for rank, other in enumerate(lists):
        for mine, theirs in zip_longest(first, other, fillvalue="nothing"):
            if mine != theirs:
                return (
                    f"rank {rank} of this site has {theirs} where rank 0 has {mine}: "
                    "all ranks of a site must pass the same trainable parameters in the same order"
                )
    raise AssertionError("equal lists have equal hashes")
