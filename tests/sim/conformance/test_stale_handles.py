"""A handle that outlives its world, as a library keeps that stores a group when it is imported.

`torch.distributed.nn.functional` does: its functions have `group=group.WORLD` as a default, which
is the importing rank's own group if it is first imported in a rank.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from sim import RankContext, SimError, World

kept: dict[int, dist.ProcessGroup] = {}


def keep(ctx: RankContext, breaks: bool) -> None:
    group = dist.group.WORLD
    assert group is not None
    kept[ctx.rank] = group
    if breaks and ctx.rank == 0:
        dist.barrier()  # the other rank never comes


def use(ctx: RankContext) -> torch.Tensor:
    x = torch.ones(1)
    kept[ctx.rank].allreduce([x]).wait()
    return x


@pytest.mark.parametrize("breaks", [False, True], ids=["closed", "broken"])
def test_a_handle_of_another_world(breaks: bool) -> None:
    """Its use is an error, and never a result that is silently missing."""
    world = World(2)
    if breaks:
        with pytest.raises(SimError):
            world.run(keep, breaks)
    else:
        world.run(keep, breaks)
    world.close()
    with World(2) as other, pytest.raises(SimError):
        other.run(use)
