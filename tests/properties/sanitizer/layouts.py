"""Two axes on four ranks, and the collectives of the programs here, in a line each."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
import torch.distributed as dist

from sim import RankContext

Program = Callable[[RankContext], object]


class Mesh:
    """Rank r is number r % 2 along tp and r // 2 along dp (or pp)."""

    def __init__(self, ctx: RankContext) -> None:
        tps = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        dps = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        self.rank, self.t, self.d = ctx.rank, ctx.rank % 2, ctx.rank // 2
        self.tp, self.dp = tps[self.d], dps[self.t]


def seeded(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gather(x: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    size = dist.get_world_size(group)
    out = x.new_empty(size * len(x), *x.shape[1:])
    dist.all_gather_into_tensor(out, x, group=group)
    return out


def scatter_sum(x: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    out = x.new_empty(len(x) // dist.get_world_size(group), *x.shape[1:])
    dist.reduce_scatter_tensor(out, x, group=group)
    return out


def summed(x: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    dist.all_reduce(x, group=group)
    return x


def programs_of(module: dict[str, object]) -> tuple[Program, ...]:
    """The programs that a module defines, in order; helpers have a leading underscore."""
    return tuple(
        value
        for name, value in module.items()
        if inspect.isfunction(value)
        and value.__module__ == module["__name__"]
        and not name.startswith("_")
    )
