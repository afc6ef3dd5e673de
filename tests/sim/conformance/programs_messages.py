"""SPMD programs for point-to-point messages, operations in flight, coalescing and objects.

Operands are whole numbers, with which sums are exact in any order: results of two transports
must be equal.
"""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from tests.sim.conformance.operands import Kind
from tests.sim.conformance.programs import split_table

WHOLE = Kind(values="whole")


def numbered_messages(rank: int, world_size: int, seed: int) -> list[torch.Tensor]:
    """isend and irecv between all pairs, several tags each, received in another order."""
    chance = random.Random(seed)
    table = split_table(seed, world_size)
    tags = {(s, d): chance.sample(range(100), table[s][d]) for s, d in _pairs(world_size)}
    works = [
        dist.isend(WHOLE.tensor(seed, rank, (2, d + 1), tag), d, tag=tag)
        for (s, d), of_pair in tags.items()
        if s == rank
        for tag in of_pair
    ]
    outs = {}
    wanted = [(s, tag) for (s, d), of_pair in tags.items() if d == rank for tag in sorted(of_pair)]
    random.Random(seed + rank).shuffle(wanted)
    for s, tag in wanted:
        outs[s, tag] = torch.empty(2, rank + 1)
        works.append(dist.irecv(outs[s, tag], s, tag=tag))
    for work in works:
        assert work is not None
        work.wait()
    return [outs[key] for key in sorted(outs)]


def messages_in_order(rank: int, world_size: int, seed: int) -> list[torch.Tensor]:
    """Messages of one pair and one tag arrive in the order they were sent."""
    counts = split_table(seed, world_size)
    sends = [
        dist.isend(WHOLE.tensor(seed, rank, (3,), i), d)
        for d in range(world_size)
        if d != rank
        for i in range(counts[rank][d])
    ]
    outs = []
    for s in range(world_size):
        for _ in range(counts[s][rank] if s != rank else 0):
            outs.append(torch.empty(3))
            dist.recv(outs[-1], s)
    for work in sends:
        assert work is not None
        work.wait()
    return outs


def send_buffer_is_free(rank: int, world_size: int, seed: int) -> list[torch.Tensor]:
    """A buffer may be overwritten once its send has returned."""
    x, outs = WHOLE.tensor(seed, rank, (4,)), []
    for step in range(3):
        x += step
        if rank == 0:
            for d in range(1, world_size):
                dist.send(x, d)
        else:
            outs.append(torch.empty(4))
            dist.recv(outs[-1], 0)
    return [x, *outs]


def from_any_rank(rank: int, world_size: int, seed: int) -> list[torch.Tensor]:
    """A receive without a source, blocking or with a handle, tells who sent."""
    if rank:
        dist.send(WHOLE.tensor(seed, rank, (3,)), 0)
        return []
    outs: dict[int, torch.Tensor] = {}
    for i in range(world_size - 1):
        buffer = torch.empty(3)
        if i % 2:
            outs[dist.recv(buffer)] = buffer
        else:
            work = dist.irecv(buffer)
            assert work is not None
            work.wait()
            outs[work.source_rank()] = buffer
    return [torch.tensor(sorted(outs)), *(outs[r] for r in sorted(outs))]


def batched_messages(rank: int, world_size: int, seed: int) -> list[torch.Tensor]:
    """batch_isend_irecv: everyone with everyone, in one batch."""
    table = split_table(seed, world_size)
    ops, outs = [], []
    for peer in range(world_size):
        if peer == rank:
            continue
        outs.append(torch.empty(table[peer][rank], 2))
        ops.append(dist.P2POp(dist.irecv, outs[-1], peer))
        x = WHOLE.tensor(seed, rank, (table[rank][peer], 2), peer)
        ops.append(dist.P2POp(dist.isend, x, peer))
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return outs


def waited_out_of_order(rank: int, world_size: int, seed: int) -> list[torch.Tensor]:
    """Handles of operations in flight, waited for in an order that differs from rank to rank."""
    x = [WHOLE.tensor(seed, rank, (world_size, 3), i) for i in range(6)]
    gathered = [torch.empty(world_size, 3) for _ in range(world_size)]
    swapped, part = torch.empty(world_size, 3), torch.empty(1, 3)
    full = torch.empty(world_size * world_size, 3)
    works = [
        dist.all_reduce(x[0], async_op=True),
        dist.all_gather(gathered, x[1], async_op=True),
        dist.broadcast(x[2], world_size - 1, async_op=True),
        dist.all_to_all_single(swapped, x[3], async_op=True),
        dist.reduce_scatter_tensor(part, x[4], async_op=True),
        dist.all_gather_into_tensor(full, x[5], async_op=True),
        dist.barrier(async_op=True),
    ]
    random.Random(seed + rank).shuffle(works)
    for work in works:
        assert work is not None
        work.wait()
        work.wait()
    return [x[0], *gathered, x[2], swapped, part, full]


def futures(rank: int, world_size: int, seed: int) -> list[torch.Tensor]:
    """The future of an operation, and a callback on it."""
    x = WHOLE.tensor(seed, rank, (3,))
    work = dist.all_reduce(x, async_op=True)
    assert work is not None

    def double(future: torch.futures.Future[Any]) -> torch.Tensor:
        value = future.value()
        first: torch.Tensor = value[0] if isinstance(value, list) else value
        return first * 2

    doubled = work.get_future().then(double).wait()
    work.wait()
    return [x, doubled]


def futures_together(rank: int, world_size: int, seed: int) -> list[torch.Tensor]:
    """Several futures waited for at once."""
    x = [WHOLE.tensor(seed, rank, (3,), i) for i in range(4)]
    works = [dist.all_reduce(t, async_op=True) for t in x]
    pending = [work.get_future() for work in works if work is not None]
    torch.futures.wait_all(pending[:2])
    torch.futures.collect_all(pending[2:]).wait()
    return x


def coalesced(
    rank: int, world_size: int, seed: int, *, what: str, device: str | None, async_ops: bool
) -> list[torch.Tensor]:
    """Three collectives of one kind under the coalescing manager."""
    outs = []
    where = None if device is None else torch.device(device)
    with _coalescing_manager(device=where, async_ops=async_ops) as manager:
        for i in range(3):
            if what == "all_reduce":
                outs.append(WHOLE.tensor(seed, rank, (i + 1, 2), i))
                dist.all_reduce(outs[-1])
            elif what == "all_gather":
                outs.append(torch.empty(world_size * i, 2))
                dist.all_gather_into_tensor(outs[-1], WHOLE.tensor(seed, rank, (i, 2), i))
            else:
                outs.append(torch.empty(i, 2))
                x = WHOLE.tensor(seed, rank, (world_size * i, 2), i)
                dist.reduce_scatter_tensor(outs[-1], x)
    if async_ops:
        manager.wait()
    return outs


def lists_at_once(rank: int, world_size: int, seed: int) -> list[torch.Tensor]:
    """The older calls that take lists: all_reduce_coalesced and all_gather_coalesced."""
    x = [WHOLE.tensor(seed, rank, (i + 1, 2), i) for i in range(3)]
    gathered = [[torch.empty(i + 1, 2) for i in range(3)] for _ in range(world_size)]
    dist.all_gather_coalesced(gathered, [t.clone() for t in x])
    dist.all_reduce_coalesced(x)
    return [*x, *(t for of_rank in gathered for t in of_rank)]


def objects(rank: int, world_size: int, seed: int, *, root: int) -> list[torch.Tensor]:
    """The object collectives, with objects whose size differs from rank to rank."""
    root %= world_size
    mine = {"rank": rank, "words": ["word"] * (seed % 3 + rank), "x": torch.arange(rank)}
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, mine)
    at_root: list[Any] | None = [None] * world_size if rank == root else None
    dist.gather_object(mine, at_root, dst=root)
    told: list[Any] = [mine, "b" * rank] if rank == root else [None, None]
    dist.broadcast_object_list(told, src=root)
    dealt: list[Any] = [None]
    dist.scatter_object_list(dealt, everyone if rank == root else None, src=root)
    results = [everyone, at_root, told, dealt]
    return [torch.tensor(list(repr(results).encode()), dtype=torch.uint8)]


def object_messages(rank: int, world_size: int, seed: int) -> list[torch.Tensor]:
    """send_object_list and recv_object_list."""
    if rank:
        dist.send_object_list([rank, "x" * (seed % 9), [rank] * rank], dst=0)
        return []
    seen = []
    for source in range(1, world_size):
        got: list[Any] = [None] * 3
        seen.append((dist.recv_object_list(got, src=source), got))
    return [torch.tensor(list(repr(seen).encode()), dtype=torch.uint8)]


def barriers(rank: int, world_size: int, seed: int) -> list[torch.Tensor]:
    """barrier, with a handle and monitored, among other work."""
    x = WHOLE.tensor(seed, rank, (2,))
    dist.barrier()
    dist.all_reduce(x)
    handle = dist.barrier(async_op=True)
    assert handle is not None
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    handle.wait()
    dist.monitored_barrier()
    return [x]


def _pairs(world_size: int) -> list[tuple[int, int]]:
    return [(s, d) for s in range(world_size) for d in range(world_size) if s != d]
