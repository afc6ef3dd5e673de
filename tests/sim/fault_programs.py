"""Programs that break, and near twins of them that are right; see tests/sim/faults.py.

A comment such as `# rank 1` at the end of a line marks where the report must say that rank is.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from sim import RankContext, label_group
from tests.sim.programs import ones


def missing_collective(ctx: RankContext) -> None:
    dist.barrier()
    if ctx.rank != 2:
        dist.all_reduce(ones())  # all but one


def every_collective(ctx: RankContext) -> None:
    dist.barrier()
    dist.all_reduce(ones())


def wrong_shape(ctx: RankContext) -> None:
    if ctx.rank == 0:
        dist.all_reduce(ones(2))  # rank 0
    else:
        dist.all_reduce(ones(3))  # rank 1


def same_shape(ctx: RankContext) -> None:
    if ctx.rank == 0:
        dist.all_reduce(ones(3))
    else:
        dist.all_reduce(ones(3))


def wrong_dtype(ctx: RankContext) -> None:
    x = ones().to(torch.float64 if ctx.rank else torch.bfloat16)
    dist.broadcast(x, 0)  # both


def same_dtype(ctx: RankContext) -> None:
    dist.broadcast(ones().to(torch.bfloat16), 0)


def wrong_reduce_op(ctx: RankContext) -> None:
    dist.all_reduce(ones(), dist.ReduceOp.MAX if ctx.rank else dist.ReduceOp.SUM)  # both


def same_reduce_op(ctx: RankContext) -> None:
    dist.all_reduce(ones(), dist.ReduceOp.MAX)


def wrong_root(ctx: RankContext) -> None:
    pair = dist.new_group([2, 3])
    if ctx.rank >= 2:
        dist.broadcast(ones(), ctx.rank, group=pair)  # both


def same_root(ctx: RankContext) -> None:
    pair = dist.new_group([2, 3])
    if ctx.rank >= 2:
        dist.broadcast(ones(), 3, group=pair)


def wrong_order(ctx: RankContext) -> None:
    if ctx.rank == 0:
        dist.all_reduce(ones())  # rank 0
        dist.broadcast(ones(), 0)
    else:
        dist.broadcast(ones(), 0)  # rank 1
        dist.all_reduce(ones())


def same_order(ctx: RankContext) -> None:
    dist.all_reduce(ones())
    dist.broadcast(ones(), 0)


def wrong_splits(ctx: RankContext) -> None:
    mine = [1, 2] if ctx.rank == 0 else [1, 1]  # rank 0 gives 2 rows to rank 1, which expects 1
    dist.all_to_all_single(torch.empty(2), ones(sum(mine)), [1, 1], mine)  # both


def matching_splits(ctx: RankContext) -> None:
    mine, others = ([1, 2], [1, 1]) if ctx.rank == 0 else ([1, 1], [2, 1])
    dist.all_to_all_single(torch.empty(sum(others)), ones(sum(mine)), others, mine)


def wrong_output_size(ctx: RankContext) -> None:
    out = torch.empty(4 if ctx.rank else 3)
    dist.all_gather_into_tensor(out, ones())  # both


def right_output_size(ctx: RankContext) -> None:
    dist.all_gather_into_tensor(torch.empty(4), ones())


def wrong_slot_size(ctx: RankContext) -> None:
    outs = [torch.empty(2), torch.empty(2)]
    dist.all_gather(outs, ones(2 + ctx.rank))  # both


def right_slot_size(ctx: RankContext) -> None:
    outs = [torch.empty(2), torch.empty(3)]
    dist.all_gather(outs, ones(2 + ctx.rank))


def not_received(ctx: RankContext) -> None:
    if ctx.rank == 0:
        dist.send(ones(3), 1)
        dist.send(ones(3), 1, tag=5)  # rank 0
    else:
        dist.recv(ones(3), 0)


def received(ctx: RankContext) -> None:
    if ctx.rank == 0:
        dist.send(ones(3), 1)
        dist.send(ones(3), 1, tag=5)
    else:
        dist.recv(ones(3), 0)
        dist.recv(ones(3), 0, tag=5)


def not_sent(ctx: RankContext) -> None:
    if ctx.rank == 1:
        dist.recv(ones(3), 0)  # rank 1


def sent(ctx: RankContext) -> None:
    if ctx.rank == 1:
        dist.recv(ones(3), 0)
    else:
        dist.send(ones(3), 1)


def other_tag(ctx: RankContext) -> None:
    if ctx.rank == 1:
        dist.recv(ones(3), 0, tag=4)  # rank 1
    else:
        dist.send(ones(3), 1, tag=5)


def same_tag(ctx: RankContext) -> None:
    if ctx.rank == 1:
        dist.recv(ones(3), 0, tag=5)
    else:
        dist.send(ones(3), 1, tag=5)


def never_sent(ctx: RankContext) -> None:
    if ctx.rank == 1:
        dist.irecv(ones(3), 0)  # rank 1


def never_joined(ctx: RankContext) -> None:
    if ctx.rank == 1:
        dist.all_reduce(ones(3), async_op=True)  # rank 1


def joined(ctx: RankContext) -> None:
    dist.all_reduce(ones(3), async_op=True)


def wrong_message_size(ctx: RankContext) -> None:
    if ctx.rank == 0:
        dist.send(ones(3), 1)  # rank 0
    else:
        dist.recv(ones(4), 0)  # rank 1


def wrong_message_dtype(ctx: RankContext) -> None:
    if ctx.rank == 0:
        dist.send(ones(3), 1)  # rank 0
    else:
        dist.recv(ones(3).double(), 0)  # rank 1


def nested_groups(ctx: RankContext) -> None:
    a, b = dist.new_group([0, 1]), dist.new_group([0, 1])
    label_group(a, "A")
    label_group(b, "B")
    if ctx.rank == 0:
        dist.all_reduce(ones(), group=a)  # rank 0
        dist.all_reduce(ones(), group=b)
    else:
        dist.all_reduce(ones(), group=b)  # rank 1
        dist.all_reduce(ones(), group=a)


def ordered_groups(ctx: RankContext) -> None:
    a, b = dist.new_group([0, 1]), dist.new_group([0, 1])
    dist.all_reduce(ones(), group=a)
    dist.all_reduce(ones(), group=b)


def head_to_head(ctx: RankContext) -> None:
    dist.send(ones(), 1 - ctx.rank)  # both
    dist.recv(ones(), 1 - ctx.rank)


def one_after_the_other(ctx: RankContext) -> None:
    if ctx.rank == 0:
        dist.send(ones(), 1)
        dist.recv(ones(), 1)
    else:
        dist.recv(ones(), 0)
        dist.send(ones(), 0)
