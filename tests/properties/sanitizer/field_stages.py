"""Right programs with experts and with pipeline stages."""

from __future__ import annotations

import torch
import torch.distributed as dist

from sim import RankContext
from tests.properties.sanitizer.layouts import (
    Mesh,
    Program,
    gather,
    programs_of,
    scatter_sum,
    seeded,
    summed,
)
from tests.properties.sanitizer.programs import common, own

# --- experts ---


def experts_all_to_all(ctx: RankContext) -> None:
    tokens = own(ctx, 8, 4)
    counts = [(ctx.rank + peer) % 3 + 1 for peer in range(ctx.world_size)]
    sizes = torch.tensor(counts)
    theirs = torch.empty_like(sizes)
    dist.all_to_all_single(theirs, sizes)
    sent = tokens[torch.randint(0, 8, (sum(counts),))]
    here = torch.empty(int(theirs.sum()), 4)
    dist.all_to_all_single(here, sent, theirs.tolist(), counts)
    back = torch.empty_like(sent)
    dist.all_to_all_single(back, here * 2, counts, theirs.tolist())


def experts_dispatch_by_gather(ctx: RankContext) -> None:
    """EP over dp x tp: the tp shards of each dp rank's tokens, gathered, summed and scattered."""
    mesh = Mesh(ctx)
    shard = seeded(10 + mesh.d, 8, 4).chunk(2)[mesh.t]
    everyone = gather(shard)
    mine = scatter_sum(everyone @ seeded(mesh.rank, 4, 4))
    gather(mine, mesh.tp)


def experts_dispatch_over_dp_alone(ctx: RankContext) -> None:
    """Each tp rank takes its slice of the tokens to the experts of its dp group, and back."""
    mesh = Mesh(ctx)
    shard = seeded(10 + mesh.d, 8, 4).chunk(2)[mesh.t]
    everyone = gather(shard, mesh.dp)
    mine = scatter_sum(everyone @ seeded(mesh.d, 4, 4), mesh.dp)
    gather(mine, mesh.tp)


def experts_of_replicas_with_the_same_tokens(ctx: RankContext) -> None:
    mesh = Mesh(ctx)
    shard = common(8, 4).chunk(2)[mesh.t]
    scatter_sum(gather(shard) @ seeded(mesh.rank, 4, 4))


def shared_expert_beside_routed(ctx: RankContext) -> None:
    x = common(4, 8)
    routed, shared = x @ seeded(ctx.rank, 8, 8), x @ seeded(20 + ctx.rank, 8, 8)
    x + summed(routed + shared)


# --- pipelines ---


def one_forward_one_backward(ctx: RankContext) -> None:
    weight, size = seeded(ctx.rank, 8, 8), ctx.world_size
    for micro in range(3):
        x = seeded(50 + micro, 4, 8)
        if ctx.rank:
            dist.recv(x, ctx.rank - 1)
        if ctx.rank + 1 < size:
            dist.send(torch.tanh(x @ weight), ctx.rank + 1)
    for _ in range(3):
        grad = torch.ones(4, 8)
        if ctx.rank + 1 < size:
            dist.recv(grad, ctx.rank + 1)
        if ctx.rank:
            dist.send(grad @ weight.t(), ctx.rank - 1)


def stage_sends_a_slice_of_what_is_replicated(ctx: RankContext) -> None:
    """As vLLM's send_tensor_dict with an all_gather_group."""
    mesh = Mesh(ctx)
    if mesh.d == 0:
        x = summed(common(8, 8) @ seeded(mesh.t, 8, 8), mesh.tp)
        dist.send(torch.relu(x).chunk(2)[mesh.t], ctx.rank + 2)
    else:
        part = torch.empty(4, 8)
        dist.recv(part, ctx.rank - 2)
        gather(part, mesh.tp)


def stage_sends_its_whole_shard(ctx: RankContext) -> None:
    mesh = Mesh(ctx)
    if mesh.d == 0:
        shard = scatter_sum(common(8, 8) @ seeded(mesh.t, 8, 8), mesh.tp)
        dist.send(shard, ctx.rank + 2)
    else:
        part = torch.empty(4, 8)
        dist.recv(part, ctx.rank - 2)
        gather(part, mesh.tp)


def stage_sends_its_shard_of_a_view(ctx: RankContext) -> None:
    mesh = Mesh(ctx)
    if mesh.d == 0:
        dist.send(common(8, 8).chunk(2)[mesh.t], ctx.rank + 2)
    else:
        part = torch.empty(4, 8)
        dist.recv(part, ctx.rank - 2)
        gather(part, mesh.tp)


def _sends_its_slice(ctx: RankContext, buffer: torch.Tensor) -> None:
    mesh = Mesh(ctx)
    if mesh.d == 0:
        mine = buffer.chunk(2)[mesh.t]
        torch.mm(seeded(mesh.t, 4, 8), seeded(9, 8, 8), out=mine)
        dist.send(mine, ctx.rank + 2)
    else:
        part = torch.empty(4, 8)
        dist.recv(part, ctx.rank - 2)
        gather(part, mesh.tp)


def stage_fills_its_slice_of_zeros(ctx: RankContext) -> None:
    _sends_its_slice(ctx, torch.zeros(8, 8))


def stage_fills_its_slice_of_a_stale_buffer(ctx: RankContext) -> None:
    """The rest of the buffer is what an earlier step left, and differs by rank."""
    _sends_its_slice(ctx, own(ctx, 8, 8))


def stage_sends_its_shard_in_micro_batches(ctx: RankContext) -> None:
    """Both halves of each rank's shard, one after the other."""
    mesh = Mesh(ctx)
    shard = seeded(mesh.t, 4, 8)
    for half in range(2):
        if mesh.d == 0:
            dist.send(shard.chunk(2)[half], ctx.rank + 2)
        else:
            part = torch.empty(2, 8)
            dist.recv(part, ctx.rank - 2)
            gather(part, mesh.tp)


def replicas_in_another_order_of_sums(ctx: RankContext) -> None:
    """Replicas that a ring of messages made differ in the last bits; slices of them are right."""
    mesh = Mesh(ctx)
    if mesh.d == 0:
        terms = [seeded(k, 8, 8) for k in range(5)]
        x = sum(terms[mesh.t :] + terms[: mesh.t], torch.zeros(8, 8)) * 1.0
        dist.send(x.chunk(2)[mesh.t], ctx.rank + 2)
    else:
        part = torch.empty(4, 8)
        dist.recv(part, ctx.rank - 2)
        gather(part, mesh.tp)


RIGHT: tuple[Program, ...] = programs_of(globals())
