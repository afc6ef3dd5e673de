"""SPMD programs for subgroups, device meshes, functional collectives and DTensor.

Operands are whole numbers, with which sums are exact in any order: results of two transports
must be equal.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
import torch._dynamo  # functional collectives import it on first use: here once, not in each fork
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from tests.sim.conformance.operands import Kind
from tests.sim.conformance.programs import split_table

WHOLE = Kind(values="whole")


def _tour(group: dist.ProcessGroup, seed: int) -> list[torch.Tensor]:
    """A few collectives on a group, and what the group says about itself."""
    me, size = dist.get_rank(), dist.get_world_size(group)
    ranks = dist.get_process_group_ranks(group)
    x = WHOLE.tensor(seed, me, (size, 2))
    total, first, mine = x.clone(), x.clone(), torch.empty(1, 2)
    dist.all_reduce(total, group=group)
    dist.broadcast(first, ranks[-1], group=group)
    dist.reduce_scatter_tensor(mine, x, group=group)
    swapped = torch.empty_like(x)
    dist.all_to_all_single(swapped, x, group=group)
    dist.broadcast(x, group=group, group_src=size - 1)
    around = torch.empty(1, 2)
    if size > 1:
        sent = dist.isend(mine, group=group, group_dst=(dist.get_rank(group) + 1) % size)
        dist.recv(around, group=group, group_src=(dist.get_rank(group) - 1) % size)
        assert sent is not None
        sent.wait()
    else:
        around.copy_(mine)
    facts = [dist.get_rank(group), size, dist.get_group_rank(group, me), *ranks]
    facts += [dist.get_global_rank(group, i) for i in range(size)]
    return [total, first, mine, swapped, x, around, torch.tensor(facts)]


def _member(group: object) -> bool:
    return group is not None and group is not dist.GroupMember.NON_GROUP_MEMBER


def overlapping_groups(rank: int, world_size: int, seed: int) -> list[torch.Tensor]:
    """new_group of random subsets, in any order of ranks; every rank is in several."""
    chance = random.Random(seed)
    subsets = [chance.sample(range(world_size), chance.randint(1, world_size)) for _ in range(3)]
    subsets.append(list(range(world_size)))
    groups = [dist.new_group(ranks) for ranks in subsets]
    outs = []
    for group in groups:
        if _member(group):
            outs += _tour(group, seed)
    dist.barrier()
    for group in groups:
        if _member(group):
            dist.destroy_process_group(group)
    return outs


def local_groups(rank: int, world_size: int, seed: int) -> list[torch.Tensor]:
    """new_group that only its members call.

    The groups stay: torch names them after their ranks, and gloo cannot make one again under the
    name of one that was destroyed.
    """
    half = [r for r in range(world_size) if r % 2 == rank % 2]
    return _tour(dist.new_group(half, use_local_synchronization=True), seed)


def halves(rank: int, world_size: int, seed: int) -> list[torch.Tensor]:
    """The world split into equal groups, and into enumerated ones."""
    mine, every = dist.new_subgroups(group_size=world_size // 2)
    outs = _tour(mine, seed)
    pairs = [[r, world_size - 1 - r] for r in range(world_size // 2)]
    other, others = dist.new_subgroups_by_enumeration(pairs)
    outs += _tour(other, seed)
    dist.barrier()
    for group in (*every, *others):
        if _member(group):
            dist.destroy_process_group(group)
    return outs


def mesh(rank: int, world_size: int, seed: int) -> list[torch.Tensor]:
    """A 2-D mesh: its groups, coordinates and flattened form."""
    grid = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("a", "b"))
    coordinate = grid.get_coordinate()
    assert coordinate is not None
    outs = [torch.tensor(coordinate), torch.tensor([grid.get_local_rank("a")])]
    outs += _tour(grid["a"].get_group(), seed)
    outs += _tour(grid.get_group("b"), seed + 1)
    outs += _tour(grid["a", "b"]._flatten("ab").get_group(), seed + 2)
    return outs


def functional(
    rank: int, world_size: int, seed: int, *, ops: Sequence[str], on_mesh: bool
) -> list[torch.Tensor]:
    """Functional collectives one after the other, each result an AsyncCollectiveTensor."""
    group: Any = dist.group.WORLD
    if on_mesh:
        group = (init_device_mesh("cpu", (world_size,)), 0)
    outs = []
    for step, name in enumerate(ops):
        x = WHOLE.tensor(seed, rank, (world_size * 2, world_size * 2), step)
        y = _functional(name, x, group, rank, world_size, seed)
        # A result is used before, or by, or after an explicit wait.
        if step % 3 == 0:
            y = funcol.wait_tensor(y)
        elif step % 3 == 1:
            y = y + 1
        outs.append(torch.as_tensor(y) * 1)
    return outs


def _functional(
    name: str, x: torch.Tensor, group: Any, rank: int, world_size: int, seed: int
) -> torch.Tensor:
    if name.startswith("all_reduce_"):
        return funcol.all_reduce(x, name.removeprefix("all_reduce_"), group)
    if name.startswith("all_gather_"):
        return funcol.all_gather_tensor(x, int(name[-1]), group)
    if name.startswith("reduce_scatter_"):
        return funcol.reduce_scatter_tensor(x, "sum", int(name[-1]), group)
    if name == "broadcast":
        return funcol.broadcast(x, world_size - 1, group)
    if name == "all_to_all":
        return funcol.all_to_all_single(x, None, None, group)
    assert name == "all_to_all_uneven", name
    table = split_table(seed, world_size)
    gives, takes = table[rank], [row[rank] for row in table]
    given = WHOLE.tensor(seed, rank, (sum(gives), 2))
    return funcol.all_to_all_single(given, takes, gives, group)


FUNCTIONAL = (
    "all_reduce_sum",
    "all_reduce_max",
    "all_gather_0",
    "all_gather_1",
    "reduce_scatter_0",
    "reduce_scatter_1",
    "broadcast",
    "all_to_all",
    "all_to_all_uneven",
)


def functional_coalesced(rank: int, world_size: int, seed: int) -> list[torch.Tensor]:
    """Functional collectives on lists."""
    world: Any = dist.group.WORLD
    x = [WHOLE.tensor(seed, rank, (world_size * (i + 1), 2), i) for i in range(3)]
    outs = [
        *funcol.all_reduce_coalesced(x, "sum", world),
        *funcol.all_gather_into_tensor_coalesced(x, world),
        *funcol.reduce_scatter_tensor_coalesced(x, "sum", [0, 0, 0], world),
    ]
    return [torch.as_tensor(t) * 1 for t in outs]


def backward(rank: int, world_size: int, seed: int) -> list[torch.Tensor]:
    """Gradients through functional collectives: the backward pass communicates too."""
    world: Any = dist.group.WORLD
    x = WHOLE.tensor(seed, rank, (world_size * 2, 3)).requires_grad_()
    gathered = funcol.all_gather_tensor_autograd(x, 0, world)
    scattered = funcol.reduce_scatter_tensor_autograd(gathered * (rank + 1), "sum", 0, world)
    swapped = funcol.all_to_all_single_autograd(scattered, None, None, world)
    (swapped * WHOLE.tensor(seed, rank, (world_size * 2, 3), 1)).sum().backward()
    assert x.grad is not None
    return [torch.as_tensor(swapped.detach()) * 1, x.grad]


def dtensor(rank: int, world_size: int, seed: int) -> list[torch.Tensor]:
    """DTensor placements redistributed on a 2-D mesh, and a product of sharded matrices."""
    grid = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("a", "b"))
    # Rows divide: torch itself goes wrong, over gloo too, where a dim is sharded twice unevenly.
    full = WHOLE.tensor(seed, 0, (8, 4))
    chance = random.Random(seed)

    def placements() -> list[Placement]:
        return chance.choices((Replicate(), Shard(0), Shard(1)), k=2)

    x = distribute_tensor(full, grid, placements())
    outs = [x.to_local()]
    for _ in range(3):
        x = x.redistribute(grid, placements())
        outs.append(x.to_local())
    outs.append(x.full_tensor())
    uneven = distribute_tensor(WHOLE.tensor(seed, 0, (5, 3)), grid, [Shard(0), Replicate()])
    outs += [uneven.to_local(), uneven.redistribute(grid, [Shard(1), Replicate()]).to_local()]
    part = DTensor.from_local(WHOLE.tensor(seed, rank, (4, 4)), grid, [Partial(), Replicate()])
    outs.append(part.redistribute(grid, [Shard(0), Replicate()]).to_local())
    outs.append(part.redistribute(grid, [Replicate(), Shard(1)]).to_local())
    left = distribute_tensor(full, grid, [Shard(1), Replicate()])
    right = distribute_tensor(full.T.contiguous(), grid, [Shard(0), Replicate()])
    outs.append((left @ right).full_tensor())
    return [torch.as_tensor(t) * 1 for t in outs]
