"""What the programs must return, by the numpy reference of the collectives.

`truth(world_size, seed, make, **options)` gives for each rank the list of arrays that the program
of the same name returns there, without `kind`: `make(rank, shape, stream)` is an operand as numpy
has it, so the same truth serves bit patterns, values, and magnitudes for a rounding bound.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from reference import collectives as c
from tests.sim.conformance.operands import Array
from tests.sim.conformance.programs import FACTOR, Shape, row_counts, split_table

Make = Callable[..., Array]
Truth = Callable[..., list[list[Array]]]


def _one_each(arrays: list[Array]) -> list[list[Array]]:
    return [[x] for x in arrays]


def _at_root(root: int, world_size: int, result: list[Array]) -> list[list[Array]]:
    return [result if r == root % world_size else [] for r in range(world_size)]


def _premultiplied(inputs: list[Array], op: str) -> tuple[list[Array], str]:
    return ([x * FACTOR for x in inputs], "sum") if op == "premul_sum" else (inputs, op)


def all_reduce(n: int, seed: int, make: Make, *, shape: Shape, op: str) -> list[list[Array]]:
    inputs, op = _premultiplied([make(r, shape) for r in range(n)], op)
    return _one_each(c.all_reduce(inputs, op))


def reduce(n: int, seed: int, make: Make, *, shape: Shape, op: str, root: int) -> list[list[Array]]:
    inputs, op = _premultiplied([make(r, shape) for r in range(n)], op)
    return _at_root(root, n, [c.reduce(inputs, root % n, op)[root % n]])


def broadcast(n: int, seed: int, make: Make, *, shape: Shape, root: int) -> list[list[Array]]:
    return _one_each(c.broadcast([make(r, shape) for r in range(n)], root % n))


def all_gather(n: int, seed: int, make: Make, *, shape: Shape) -> list[list[Array]]:
    return [list(whole) for whole in c.all_gather([make(r, shape)[None] for r in range(n)])]


def all_gather_uneven(n: int, seed: int, make: Make, *, cols: int) -> list[list[Array]]:
    rows = row_counts(seed, n)
    wholes = c.all_gather([make(r, (rows[r], cols)) for r in range(n)])
    return [np.split(whole, np.cumsum(rows)[:-1]) for whole in wholes]


def all_gather_into_tensor(
    n: int, seed: int, make: Make, *, shape: Shape, stacked: bool
) -> list[list[Array]]:
    lift = stacked or not shape
    inputs = [make(r, shape)[None] if lift else make(r, shape) for r in range(n)]
    return _one_each(c.all_gather(inputs))


def aliased_all_gather(n: int, seed: int, make: Make, *, rows: int) -> list[list[Array]]:
    return _one_each(c.all_gather([make(r, (rows, 2)) for r in range(n)]))


def gather(n: int, seed: int, make: Make, *, shape: Shape, root: int) -> list[list[Array]]:
    whole = c.gather([make(r, shape)[None] for r in range(n)], root % n)[root % n]
    return _at_root(root, n, list(whole))


def gather_uneven(n: int, seed: int, make: Make, *, cols: int, root: int) -> list[list[Array]]:
    rows = row_counts(seed, n)
    whole = c.gather([make(r, (rows[r], cols)) for r in range(n)], root % n)[root % n]
    return _at_root(root, n, np.split(whole, np.cumsum(rows)[:-1]))


def scatter(n: int, seed: int, make: Make, *, shape: Shape, root: int) -> list[list[Array]]:
    whole = [np.stack([make(r, shape, q) for q in range(n)]) for r in range(n)]
    return _one_each([part[0] for part in c.scatter(whole, root % n)])


def scatter_uneven(n: int, seed: int, make: Make, *, cols: int, root: int) -> list[list[Array]]:
    rows = row_counts(seed, n)
    whole = [np.concatenate([make(r, (k, cols), q) for q, k in enumerate(rows)]) for r in range(n)]
    return _one_each(c.scatter(whole, root % n, rows))


def reduce_scatter(
    n: int, seed: int, make: Make, *, cols: int, op: str, uneven: bool
) -> list[list[Array]]:
    rows = row_counts(seed, n) if uneven else [2] * n
    inputs = [np.concatenate([make(r, (k, cols), q) for q, k in enumerate(rows)]) for r in range(n)]
    inputs, op = _premultiplied(inputs, op)
    return _one_each(c.reduce_scatter(inputs, op, rows))


def reduce_scatter_tensor(
    n: int, seed: int, make: Make, *, shape: Shape, op: str
) -> list[list[Array]]:
    rows, *rest = shape or (1,)
    inputs, op = _premultiplied([make(r, (n * rows, *rest)) for r in range(n)], op)
    return _one_each([part.reshape(shape) for part in c.reduce_scatter(inputs, op)])


def reduce_scatter_tensor_aliased(
    n: int, seed: int, make: Make, *, rows: int, op: str
) -> list[list[Array]]:
    return _one_each(c.reduce_scatter([make(r, (n * rows, 2)) for r in range(n)], op))


def all_to_all(n: int, seed: int, make: Make, *, cols: int, uneven: bool) -> list[list[Array]]:
    table = split_table(seed, n) if uneven else [[2] * n] * n
    return c.all_to_all([[make(r, (k, cols), d) for d, k in enumerate(table[r])] for r in range(n)])


def all_to_all_single(n: int, seed: int, make: Make, *, rows: int, cols: int) -> list[list[Array]]:
    return _one_each(c.all_to_all_single([make(r, (n * rows, cols)) for r in range(n)]))


def all_to_all_single_uneven(n: int, seed: int, make: Make, *, cols: int) -> list[list[Array]]:
    table = split_table(seed, n)
    inputs = [make(r, (sum(table[r]), cols)) for r in range(n)]
    return _one_each(c.all_to_all_single(inputs, table))


def ring(n: int, seed: int, make: Make, *, shape: Shape) -> list[list[Array]]:
    return [[make((r - 1) % n, shape)] for r in range(n)]


def coalesced(
    n: int, seed: int, make: Make, *, what: str, device: str | None, async_ops: bool
) -> list[list[Array]]:
    outs: list[list[Array]] = []
    for i in range(3):
        rows = {"all_reduce": i + 1, "all_gather": i, "reduce_scatter": n * i}[what]
        outs.append(getattr(c, what)([make(r, (rows, 2), i) for r in range(n)]))
    return [list(of_rank) for of_rank in zip(*outs, strict=True)]
