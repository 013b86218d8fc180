"""A site's parameters as flat vectors: the same values wherever they lie, on one process or over several."""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from composer_prime.outer.fragments import Fragment, plan_fragments
from composer_prime.sync.parameters import LocalParameters, RankedParameters
from tests.sync.ranked_site import Plan, Rank, run_ranked

SHAPES = {
    "whole": (3, 2),
    "rows": (7, 3),
    "columns": (2, 5),
    "short": (1,),
    "grid": (5, 3),
    "hybrid": (3,),
    "twice": (9,),
}
"""By name; `laid_out` says over which meshes. None is even, and some ranks hold nothing of `short`."""


def values(dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def laid_out(dtype: torch.dtype, rank: int) -> dict[str, torch.nn.Parameter]:
    """The values of seed 0 over four ranks; a parameter that isn't sharded has rubbish on all but rank 0."""
    line, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    layouts = {
        "rows": (line, [Shard(0)]),
        "columns": (line, [Shard(1)]),
        "short": (line, [Shard(0)]),
        "grid": (grid, [Shard(0), Shard(1)]),
        "hybrid": (grid, [Replicate(), Shard(0)]),
        "twice": (grid, [Shard(0), Shard(0)]),
    }
    params = {}
    for name, value in values(dtype, 0).items():
        if name in layouts:
            mesh, placements = layouts[name]
            params[name] = torch.nn.Parameter(distribute_tensor(value, mesh, placements))
        else:
            params[name] = torch.nn.Parameter(value if rank == 0 else value + 100)
    return params


def plan(local: LocalParameters) -> Fragment:
    return plan_fragments(local.shapes(), 1)[0]


def there_and_back(rank: Rank) -> dict[str, Any]:
    """Per dtype: what rank 0 read, what it wrote, what it held then, and what every rank holds at the end."""
    seen = {}
    for dtype in (torch.float32, torch.bfloat16):
        params = laid_out(dtype, rank.number)
        ranked = RankedParameters(params, rank.ranks.group)
        assert ranked.fault() is None
        assert ranked.shapes() == LocalParameters(values(dtype, 0)).shapes()
        fragment = plan(LocalParameters(values(dtype, 0)))
        objects = {name: id(parameter) for name, parameter in params.items()}
        read = ranked.gather(fragment)
        target = LocalParameters(values(torch.float32, 1)).read(fragment)
        held = ranked.scatter(fragment, target if rank.number == 0 else None)
        foretold = ranked.rounded(fragment, target)
        assert objects == {name: id(parameter) for name, parameter in params.items()}
        seen[dtype] = {
            "read": read,
            "held": held,
            "foretold": foretold,
            "now": {
                name: (value.full_tensor() if isinstance(value, DTensor) else value).detach()
                for name, value in params.items()
            },
        }
    return seen


def test_every_layout_reads_and_writes_as_whole_parameters_do(tmp_path: Path) -> None:
    (ranks,) = run_ranked(tmp_path, Plan("a", 4, "", body=there_and_back))
    for dtype in (torch.float32, torch.bfloat16):
        params = values(dtype, 0)
        local = LocalParameters(params)
        fragment = plan(local)
        first, *others = (seen[dtype] for seen in ranks)
        assert torch.equal(first["read"], local.read(fragment))
        held = local.write(fragment, LocalParameters(values(torch.float32, 1)).read(fragment))
        assert torch.equal(first["held"], held) and torch.equal(first["foretold"], held)
        assert all(seen["read"] is None and seen["held"] is None for seen in others)
        for seen in (first, *others):
            assert torch.equal(seen["foretold"], held)
            for name, value in params.items():
                assert seen["now"][name].dtype == dtype
                assert torch.equal(seen["now"][name], value), name


def over_half_the_ranks(rank: Rank) -> str | None:
    half = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))["inner"]
    params = {"stage.weight": torch.nn.Parameter(distribute_tensor(torch.ones(4), half, [Shard(0)]))}
    return RankedParameters(params, rank.ranks.group).fault()


def of_another_dtype(rank: Rank) -> str | None:
    dtype = torch.bfloat16 if rank.number == 1 else torch.float32
    return RankedParameters({"w": torch.nn.Parameter(torch.ones(2, 3, dtype=dtype))}, rank.ranks.group).fault()


def faults(rank: Rank) -> list[str | None]:
    return [over_half_the_ranks(rank), of_another_dtype(rank)]


def test_parameters_that_do_not_lie_over_all_ranks_or_differ_between_them_are_named_on_every_rank(
    tmp_path: Path,
) -> None:
    (ranks,) = run_ranked(tmp_path, Plan("a", 4, "", body=faults))
    for over_half, of_another in ranks:
        assert over_half is not None and of_another is not None
        assert "parameter stage.weight lies over ranks [0, 1], the site has ranks [0, 1, 2, 3]" in over_half
        assert "rank 1 of this site has w 2x3 torch.bfloat16 where rank 0 has w 2x3 torch.float32" in of_another
