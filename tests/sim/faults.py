"""Programs that break, each with what the report must say and a near twin that is right.

A comment such as `# rank 1` at the end of a line marks where the report must say that rank is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from sim import Deadlock, Mismatch, RankContext, SimError, Undelivered, label_group
from tests.sim.programs import ones

WORLD = "default_pg"


@dataclass(frozen=True, kw_only=True)
class At:
    """Where a report must say that one rank is."""

    operation: str
    line: str
    """A text that only this line of the program has."""
    sequence: int = 0
    group: str = f"{WORLD}[0, 1]"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A program that is wrong, its right twin, and the report."""

    wrong: Callable[[RankContext], Any]
    right: Callable[[RankContext], Any]
    error: type[SimError]
    says: tuple[str, ...]
    """What the headline must contain."""
    ranks: Mapping[int, At | str]
    """For each rank where it is, or a text of its state."""
    topology: str = "tp2"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.wrong.__name__


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


def both(operations: tuple[str, str], **rest: Any) -> dict[int, At | str]:
    """Ranks 0 and 1 on the line marked `# both`."""
    return {rank: At(operation=op, line="# both", **rest) for rank, op in enumerate(operations)}


def apart(operations: tuple[str, str], **rest: Any) -> dict[int, At | str]:
    """Ranks 0 and 1 on the lines marked with their names."""
    return {
        rank: At(operation=op, line=f"# rank {rank}", **rest) for rank, op in enumerate(operations)
    }


FOUR = f"{WORLD}[0, 1, 2, 3]"
ALL_BUT_ONE = At(operation="all_reduce(sum) float32[2]", line="# all but", sequence=1, group=FOUR)

FAULTS = [
    Fault(
        wrong=missing_collective,
        right=every_collective,
        error=Deadlock,
        says=("0, 1, 3", "2 finished"),
        ranks={0: ALL_BUT_ONE, 1: ALL_BUT_ONE, 2: "finished", 3: ALL_BUT_ONE},
        topology="tp4",
    ),
    Fault(
        wrong=wrong_shape,
        right=same_shape,
        error=Mismatch,
        says=(f"{WORLD}[0, 1]", "shapes", "rank 0 has [2]", "rank 1 has [3]"),
        ranks=apart(("all_reduce(sum) float32[2]", "all_reduce(sum) float32[3]")),
    ),
    Fault(
        wrong=wrong_dtype,
        right=same_dtype,
        error=Mismatch,
        says=("dtypes", "rank 0 has bfloat16", "rank 1 has float64"),
        ranks=both(("broadcast(root 0) bfloat16[2]", "broadcast(root 0) float64[2]")),
    ),
    Fault(
        wrong=wrong_reduce_op,
        right=same_reduce_op,
        error=Mismatch,
        says=("reduce ops", "rank 0 has sum", "rank 1 has max"),
        ranks=both(("all_reduce(sum) float32[2]", "all_reduce(max) float32[2]")),
    ),
    Fault(
        # Ranks are global in every report, also where torch counts within the group.
        wrong=wrong_root,
        right=same_root,
        error=Mismatch,
        says=("roots", "rank 2 has 2", "rank 3 has 3"),
        ranks={
            rank: At(operation=f"broadcast(root {rank}) float32[2]", line="# both", group="[2, 3]")
            for rank in (2, 3)
        },
        topology="tp4",
    ),
    Fault(
        wrong=wrong_order,
        right=same_order,
        error=Mismatch,
        says=("operations", "rank 0 has all_reduce", "rank 1 has broadcast"),
        ranks=apart(("all_reduce(sum) float32[2]", "broadcast(root 0) float32[2]")),
    ),
    Fault(
        wrong=wrong_splits,
        right=matching_splits,
        error=Mismatch,
        says=("splits", "rank 0 gives 2 rows to rank 1, which expects 1"),
        ranks=both(("splits [1, 2] -> [1, 1]) float32[3]", "splits [1, 1] -> [1, 1]) float32[2]")),
    ),
    Fault(
        wrong=wrong_output_size,
        right=right_output_size,
        error=Mismatch,
        says=("rank 0 has output float32[3]", "input float32[2]", "group of 2"),
        ranks=both(("all_gather_into_tensor() float32[2]",) * 2),
    ),
    Fault(
        wrong=wrong_slot_size,
        right=right_slot_size,
        error=Mismatch,
        says=("sizes", "rank 1 gives float32[3]", "rank 0 expects float32[2]"),
        ranks=both(("all_gather() float32[2]", "all_gather() float32[3]")),
    ),
    Fault(
        wrong=not_received,
        right=received,
        error=Undelivered,
        says=("done", "never completed"),
        ranks={0: At(operation="send(to rank 1, tag 5) float32[3]", line="# rank 0", sequence=1)},
    ),
    Fault(
        wrong=not_sent,
        right=sent,
        error=Deadlock,
        says=("rank 1 waits", "rank 0 finished"),
        ranks={0: "finished", 1: At(operation="recv(from rank 0) float32[3]", line="# rank 1")},
    ),
    Fault(
        wrong=other_tag,
        right=same_tag,
        error=Deadlock,
        says=("rank 1 waits", "rank 0 finished"),
        ranks={
            0: "finished",
            1: At(operation="recv(from rank 0, tag 4) float32[3]", line="# rank 1"),
        },
    ),
    Fault(
        wrong=never_sent,
        right=sent,
        error=Undelivered,
        says=("done", "never completed"),
        ranks={1: At(operation="recv(from rank 0) float32[3]", line="# rank 1")},
    ),
    Fault(
        wrong=never_joined,
        right=joined,
        error=Undelivered,
        says=("done", "never completed"),
        ranks={1: At(operation="all_reduce(sum) float32[3]", line="# rank 1")},
    ),
    Fault(
        wrong=wrong_message_size,
        right=sent,
        error=Mismatch,
        says=("rank 0 sends float32[3]", "rank 1 expects float32[4]"),
        ranks=apart(("send(to rank 1) float32[3]", "recv(from rank 0) float32[4]")),
    ),
    Fault(
        wrong=wrong_message_dtype,
        right=sent,
        error=Mismatch,
        says=("rank 0 sends float32[3]", "rank 1 expects float64[3]"),
        ranks=apart(("send(to rank 1) float32[3]", "recv(from rank 0) float64[3]")),
    ),
    Fault(
        wrong=nested_groups,
        right=ordered_groups,
        error=Deadlock,
        says=("ranks 0, 1 wait",),
        ranks={
            0: At(operation="all_reduce(sum)", line="group=a)  # rank 0", group="A[0, 1]"),
            1: At(operation="all_reduce(sum)", line="group=b)  # rank 1", group="B[0, 1]"),
        },
    ),
    Fault(
        wrong=head_to_head,
        right=one_after_the_other,
        error=Deadlock,
        says=("ranks 0, 1 wait",),
        ranks=both(("send(to rank 1) float32[2]", "send(to rank 0) float32[2]")),
        options={"rendezvous_sends": True},
    ),
]
