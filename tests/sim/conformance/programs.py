"""SPMD programs, one for each collective, that run on any transport.

Each is `program(rank, world_size, seed, *, kind, ...) -> list[Tensor]`; the default group is
ready. They return the outputs that c10d defines (a reduce only at its root), and know nothing of
the transport. What each must return, `truths.py` says in numpy.
"""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist

from tests.sim.conformance.operands import Kind

Shape = tuple[int, ...]

FACTOR = 0.75
"""What premul_sum multiplies by: exact in every float dtype."""


def reduce_op(name: str) -> Any:
    """torch's reduce op of this name."""
    if name == "premul_sum":
        return dist._make_nccl_premul_sum(FACTOR)  # type: ignore[attr-defined]
    return getattr(dist.ReduceOp, name.upper())


def row_counts(seed: int, world_size: int) -> list[int]:
    """A number of rows for each rank, 0 to 3 and not all equal; the same wherever it is asked."""
    return _uneven(random.Random(seed), world_size)


def split_table(seed: int, world_size: int) -> list[list[int]]:
    """table[s][d]: the rows that rank s sends to rank d; many are 0, and no line is even."""
    chance = random.Random(seed)
    return [_uneven(chance, world_size) for _ in range(world_size)]


def _uneven(chance: random.Random, count: int) -> list[int]:
    rows = chance.choices((0, 0, 1, 2, 3), k=count)
    if len(set(rows)) == 1:
        rows[chance.randrange(count)] = (rows[0] + 1) % 4
    return rows


def all_reduce(
    rank: int, world_size: int, seed: int, *, kind: Kind, shape: Shape, op: str
) -> list[torch.Tensor]:
    x = kind.tensor(seed, rank, shape)
    dist.all_reduce(x, op=reduce_op(op))
    return [x]


def reduce(
    rank: int, world_size: int, seed: int, *, kind: Kind, shape: Shape, op: str, root: int
) -> list[torch.Tensor]:
    x = kind.tensor(seed, rank, shape)
    dist.reduce(x, root % world_size, op=reduce_op(op))
    return [x] if rank == root % world_size else []


def broadcast(
    rank: int, world_size: int, seed: int, *, kind: Kind, shape: Shape, root: int
) -> list[torch.Tensor]:
    x = kind.tensor(seed, rank, shape)
    dist.broadcast(x, root % world_size)
    return [x]


def all_gather(
    rank: int, world_size: int, seed: int, *, kind: Kind, shape: Shape
) -> list[torch.Tensor]:
    outs = [kind.tensor(seed, rank, shape, 1 + q) for q in range(world_size)]
    dist.all_gather(outs, kind.tensor(seed, rank, shape))
    return outs


def all_gather_uneven(
    rank: int, world_size: int, seed: int, *, kind: Kind, cols: int
) -> list[torch.Tensor]:
    rows = row_counts(seed, world_size)
    outs = [torch.empty(n, cols, dtype=kind.dtype) for n in rows]
    dist.all_gather(outs, kind.tensor(seed, rank, (rows[rank], cols)))
    return outs


def all_gather_into_tensor(
    rank: int, world_size: int, seed: int, *, kind: Kind, shape: Shape, stacked: bool
) -> list[torch.Tensor]:
    """Into one tensor: concatenated along dim 0, or stacked along a new first dim."""
    stacked = stacked or not shape
    full = (world_size, *shape) if stacked else (world_size * shape[0], *shape[1:])
    out = torch.empty(full, dtype=kind.dtype)
    dist.all_gather_into_tensor(out, kind.tensor(seed, rank, shape))
    return [out]


def all_gather_into_tensor_aliased(
    rank: int, world_size: int, seed: int, *, kind: Kind, rows: int
) -> list[torch.Tensor]:
    """In place: the input is this rank's slice of the output."""
    out = torch.zeros(world_size * rows, 2, dtype=torch.uint8).to(kind.dtype)
    mine = out[rank * rows : (rank + 1) * rows]
    mine.copy_(kind.tensor(seed, rank, (rows, 2)))
    dist.all_gather_into_tensor(out, mine)
    return [out]


def all_gather_aliased(
    rank: int, world_size: int, seed: int, *, kind: Kind, rows: int
) -> list[torch.Tensor]:
    """In place, list form: outputs are slices of one tensor, and the input is one of them."""
    out = torch.zeros(world_size * rows, 2, dtype=torch.uint8).to(kind.dtype)
    slices = list(out.split(rows)) if rows else [out] * world_size
    slices[rank].copy_(kind.tensor(seed, rank, (rows, 2)))
    dist.all_gather(slices, slices[rank])
    return [out]


def gather(
    rank: int, world_size: int, seed: int, *, kind: Kind, shape: Shape, root: int
) -> list[torch.Tensor]:
    outs = [torch.empty(shape, dtype=kind.dtype) for _ in range(world_size)]
    at_root = rank == root % world_size
    dist.gather(kind.tensor(seed, rank, shape), outs if at_root else None, root % world_size)
    return outs if at_root else []


def gather_uneven(
    rank: int, world_size: int, seed: int, *, kind: Kind, cols: int, root: int
) -> list[torch.Tensor]:
    rows = row_counts(seed, world_size)
    outs = [torch.empty(n, cols, dtype=kind.dtype) for n in rows]
    at_root = rank == root % world_size
    x = kind.tensor(seed, rank, (rows[rank], cols))
    dist.gather(x, outs if at_root else None, root % world_size)
    return outs if at_root else []


def scatter(
    rank: int, world_size: int, seed: int, *, kind: Kind, shape: Shape, root: int
) -> list[torch.Tensor]:
    out = torch.empty(shape, dtype=kind.dtype)
    parts = [kind.tensor(seed, rank, shape, q) for q in range(world_size)]
    dist.scatter(out, parts if rank == root % world_size else None, root % world_size)
    return [out]


def scatter_uneven(
    rank: int, world_size: int, seed: int, *, kind: Kind, cols: int, root: int
) -> list[torch.Tensor]:
    rows = row_counts(seed, world_size)
    out = torch.empty(rows[rank], cols, dtype=kind.dtype)
    parts = [kind.tensor(seed, rank, (n, cols), q) for q, n in enumerate(rows)]
    dist.scatter(out, parts if rank == root % world_size else None, root % world_size)
    return [out]


def reduce_scatter(
    rank: int, world_size: int, seed: int, *, kind: Kind, cols: int, op: str, uneven: bool
) -> list[torch.Tensor]:
    """List form; part q may have its own number of rows."""
    rows = row_counts(seed, world_size) if uneven else [2] * world_size
    out = torch.empty(rows[rank], cols, dtype=kind.dtype)
    parts = [kind.tensor(seed, rank, (n, cols), q) for q, n in enumerate(rows)]
    dist.reduce_scatter(out, parts, op=reduce_op(op))
    return [out]


def reduce_scatter_tensor(
    rank: int, world_size: int, seed: int, *, kind: Kind, shape: Shape, op: str
) -> list[torch.Tensor]:
    rows, *rest = shape or (1,)
    out = torch.empty((rows, *rest) if shape else (), dtype=kind.dtype)
    x = kind.tensor(seed, rank, (world_size * rows, *rest))
    dist.reduce_scatter_tensor(out, x, op=reduce_op(op))
    return [out]


def reduce_scatter_tensor_aliased(
    rank: int, world_size: int, seed: int, *, kind: Kind, rows: int, op: str
) -> list[torch.Tensor]:
    """In place: the output is this rank's slice of the input."""
    x = kind.tensor(seed, rank, (world_size * rows, 2))
    mine = x[rank * rows : (rank + 1) * rows]
    dist.reduce_scatter_tensor(mine, x, op=reduce_op(op))
    return [mine]


def all_to_all(
    rank: int, world_size: int, seed: int, *, kind: Kind, cols: int, uneven: bool
) -> list[torch.Tensor]:
    table = split_table(seed, world_size) if uneven else [[2] * world_size] * world_size
    parts = [kind.tensor(seed, rank, (n, cols), d) for d, n in enumerate(table[rank])]
    outs = [torch.empty(table[s][rank], cols, dtype=kind.dtype) for s in range(world_size)]
    dist.all_to_all(outs, parts)
    return outs


def all_to_all_single(
    rank: int, world_size: int, seed: int, *, kind: Kind, rows: int, cols: int
) -> list[torch.Tensor]:
    """Even splits, left out."""
    x = kind.tensor(seed, rank, (world_size * rows, cols))
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x)
    return [out]


def all_to_all_single_uneven(
    rank: int, world_size: int, seed: int, *, kind: Kind, cols: int
) -> list[torch.Tensor]:
    """Splits given, many of them zero."""
    table = split_table(seed, world_size)
    gives, takes = table[rank], [row[rank] for row in table]
    out = torch.empty(sum(takes), cols, dtype=kind.dtype)
    x = kind.tensor(seed, rank, (sum(gives), cols))
    dist.all_to_all_single(out, x, output_split_sizes=takes, input_split_sizes=gives)
    return [out]


def ring(rank: int, world_size: int, seed: int, *, kind: Kind, shape: Shape) -> list[torch.Tensor]:
    """send and recv around a ring; even ranks send first, odd ranks receive first."""
    x = kind.tensor(seed, rank, shape)
    out = torch.empty(shape, dtype=kind.dtype)
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    if rank % 2:
        dist.recv(out, before)
        dist.send(x, after)
    else:
        dist.send(x, after)
        dist.recv(out, before)
    return [out]
