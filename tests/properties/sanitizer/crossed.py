"""Wrong programs that need several groups, or messages; field_*.py have their right twins."""

from __future__ import annotations

import torch
import torch.distributed as dist

from sim import RankContext
from tests.properties.sanitizer.layouts import Mesh, Program, gather, scatter_sum, seeded, summed
from tests.properties.sanitizer.programs import common


def replicas_gathered_in_place_of_shards(ctx: RankContext) -> None:
    mesh = Mesh(ctx)
    gather(common(8, 4).chunk(2)[mesh.t].clone(), mesh.dp)


def column_parallel_output_gathered_over_replicas(ctx: RankContext) -> None:
    mesh = Mesh(ctx)
    y = common(8, 4) @ seeded(mesh.t, 4, 4)
    dist.all_gather([torch.empty(8, 4), torch.empty(8, 4)], y, group=mesh.dp)


def sums_gathered_over_the_group_of_the_sum(ctx: RankContext) -> None:
    """Shards over tp, summed over dp, and gathered there again."""
    mesh = Mesh(ctx)
    gather(summed(seeded(ctx.rank, 4, 4), mesh.dp), mesh.dp)


def shards_of_replicas_gathered_over_dp(ctx: RankContext) -> None:
    mesh = Mesh(ctx)
    gather(seeded(10 + mesh.d, 8, 4).chunk(2)[mesh.t], mesh.dp)


def scattered_over_tp_gathered_over_dp(ctx: RankContext) -> None:
    mesh = Mesh(ctx)
    part, first = torch.empty(4, 4), ctx.rank - mesh.t
    whole = list(seeded(ctx.rank, 8, 4).chunk(2)) if mesh.t == 0 else None
    dist.scatter(part, whole, src=first, group=mesh.tp)
    gather(part.clone(), mesh.dp)


def the_group_is_forgotten(ctx: RankContext) -> None:
    mesh = Mesh(ctx)
    gather(common(8, 4).chunk(2)[mesh.t])


def _sends(ctx: RankContext, hidden: torch.Tensor) -> None:
    """Each rank of stage 0 sends its slice; stage 1 gathers."""
    mesh = Mesh(ctx)
    if mesh.d == 0:
        dist.send(hidden.reshape(2, -1)[mesh.t], ctx.rank + 2)
    else:
        part = torch.empty(hidden.numel() // 2)
        dist.recv(part, ctx.rank - 2)
        gather(part, mesh.tp)


def shard_sliced_before_the_send(ctx: RankContext) -> None:
    _sends(ctx, torch.tanh(seeded(ctx.rank, 4, 8)))


def sum_scattered_and_sliced(ctx: RankContext) -> None:
    """The transport wrote the shard, all of it."""
    mesh = Mesh(ctx)
    _sends(ctx, scatter_sum(common(8, 8) @ seeded(mesh.t, 8, 8), mesh.tp))


def term_sliced_before_the_send(ctx: RankContext) -> None:
    """Partial sums: the all-reduce before the send is missing."""
    _sends(ctx, common(8, 4) @ seeded(ctx.rank, 4, 4))


def view_of_the_whole_sliced_again(ctx: RankContext) -> None:
    _sends(ctx, common(8, 4).chunk(2)[ctx.rank % 2])


WRONG: dict[str, tuple[Program, ...]] = {
    "wrong group": (
        replicas_gathered_in_place_of_shards,
        column_parallel_output_gathered_over_replicas,
        sums_gathered_over_the_group_of_the_sum,
        shards_of_replicas_gathered_over_dp,
        scattered_over_tp_gathered_over_dp,
        the_group_is_forgotten,
    ),
    "sliced shards": (
        shard_sliced_before_the_send,
        sum_scattered_and_sliced,
        term_sliced_before_the_send,
        view_of_the_whole_sliced_again,
    ),
}
