"""Right programs of tensor, sequence and context parallelism, and hierarchical collectives."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn import functional

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

# --- tensor, sequence and context parallel ---


def column_and_row_parallel(ctx: RankContext) -> None:
    mesh = Mesh(ctx)
    up, down = seeded(1, 8, 16).chunk(2, dim=1), seeded(2, 16, 8).chunk(2)
    x = seeded(10 + mesh.d, 4, 8)
    for _ in range(2):
        x = x + summed(torch.relu(x @ up[mesh.t]) @ down[mesh.t], mesh.tp)


def column_parallel_output_is_gathered(ctx: RankContext) -> None:
    mesh = Mesh(ctx)
    x = seeded(10 + mesh.d, 4, 8)
    gather((x @ seeded(1, 8, 16).chunk(2, dim=1)[mesh.t]).t().contiguous(), mesh.tp)


def sequence_parallel(ctx: RankContext) -> None:
    mesh = Mesh(ctx)
    shard = seeded(10 + mesh.d, 8, 8).chunk(2)[mesh.t]
    for layer in range(2):
        x = gather(functional.layer_norm(shard, (8,)), mesh.tp)
        shard = shard + scatter_sum(x @ seeded(layer * 2 + mesh.t, 8, 8), mesh.tp)
    gather(shard, mesh.tp)


def sequence_parallel_ends_with_shards(ctx: RankContext) -> None:
    mesh = Mesh(ctx)
    shard = seeded(10 + mesh.d, 8, 8).chunk(2)[mesh.t]
    x = gather(shard, mesh.tp)
    scatter_sum(x @ seeded(mesh.t, 8, 8), mesh.tp)


def vocab_parallel_embedding(ctx: RankContext) -> None:
    tokens, table = torch.randint(0, 16, (6,)), seeded(3, 16, 8)
    dist.broadcast(tokens, src=0)
    low, size = ctx.rank * 4, 4
    inside = (tokens >= low) & (tokens < low + size)
    rows = functional.embedding((tokens - low).clamp(0, size - 1), table[low : low + size])
    summed(rows * inside[:, None])


def vocab_parallel_cross_entropy(ctx: RankContext) -> None:
    logits = own(ctx, 6, 4)
    top = logits.max(-1).values
    dist.all_reduce(top, op=dist.ReduceOp.MAX)
    total = (logits - top[:, None]).exp().sum(-1)
    summed(total)
    target = torch.where(torch.arange(6) % 4 == ctx.rank, logits[:, 0], torch.zeros(6))
    (total.log() + top - summed(target)).mean()


def ring_attention(ctx: RankContext) -> None:
    q, kv, out = own(ctx, 4, 8), own(ctx, 4, 8) * 0.5, torch.zeros(4, 8)
    after, before = (ctx.rank + 1) % ctx.world_size, (ctx.rank - 1) % ctx.world_size
    for step in range(ctx.world_size):
        out += torch.softmax(q @ kv.t(), -1) @ kv
        if step + 1 < ctx.world_size:
            incoming = torch.empty_like(kv)
            work = dist.isend(kv, after)
            dist.recv(incoming, before)
            assert work is not None
            work.wait()
            kv = incoming


def ulysses(ctx: RankContext) -> None:
    """All-to-all from sequence shards to head shards, and back."""
    x = own(ctx, 8, 4)
    heads = torch.empty_like(x)
    dist.all_to_all_single(heads, x)
    back = torch.empty_like(x)
    dist.all_to_all_single(back, heads * 2)


def context_parallel_gathers_keys(ctx: RankContext) -> None:
    mesh = Mesh(ctx)
    tokens = seeded(4, 8, 8).chunk(2)[mesh.d]
    keys = gather((tokens @ seeded(mesh.t, 8, 4)).contiguous(), mesh.dp)
    summed(tokens @ seeded(mesh.t, 8, 4) @ keys.t(), mesh.tp)


def hierarchical_all_reduce(ctx: RankContext) -> None:
    mesh = Mesh(ctx)
    piece = scatter_sum(own(ctx, 8, 4), mesh.tp)
    summed(piece, mesh.dp)
    gather(piece, mesh.tp)


def hierarchical_all_gather(ctx: RankContext) -> None:
    """In two stages, after a cut over all ranks; the stages cover them."""
    mesh = Mesh(ctx)
    shard = common(8, 4).chunk(4)[mesh.rank]
    gather(gather(shard, mesh.tp), mesh.dp)


def hierarchical_all_gather_the_other_way(ctx: RankContext) -> None:
    mesh = Mesh(ctx)
    shard = common(8, 4).chunk(4)[mesh.rank]
    gather(gather(shard, mesh.dp), mesh.tp)


def ring_all_reduce_by_messages(ctx: RankContext) -> None:
    """Slices of each rank's own gradient, sent by turns, then gathered."""
    size, chunks = ctx.world_size, list(own(ctx, 8, 4).chunk(ctx.world_size))
    after, before = (ctx.rank + 1) % size, (ctx.rank - 1) % size
    for step in range(size - 1):
        work = dist.isend(chunks[(ctx.rank - step) % size], after)
        incoming = torch.empty(8 // size, 4)
        dist.recv(incoming, before)
        assert work is not None
        work.wait()
        at = (ctx.rank - step - 1) % size
        chunks[at] = chunks[at] + incoming
    gather(chunks[(ctx.rank + 1) % size])


def block_distributed_matmul(ctx: RankContext) -> None:
    """Blocks over both axes: rows come from dp, sums go over tp, twice."""
    mesh = Mesh(ctx)
    block = own(ctx, 4, 4)
    for _ in range(2):
        block = scatter_sum(gather(block, mesh.dp) @ seeded(mesh.t, 4, 4), mesh.tp)


RIGHT: tuple[Program, ...] = programs_of(globals())
