"""The ledger has the right operations and bytes, by counting the messages of the algorithms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from sim import Ledger, RankContext, World, label_group
from tests.sim.conformance import programs, programs_messages
from tests.sim.conformance.gloo_pool import Invocation
from tests.sim.conformance.operands import Kind
from tests.sim.conformance.programs import row_counts, split_table

Message = tuple[int, int, int]
"""(source, destination, bytes)"""

COLS, ITEM = 3, 4
KIND = Kind(values="whole")  # float32


def rows_of(count: int) -> int:
    """Bytes of this many rows."""
    return count * COLS * ITEM


# --- the algorithms, message by message; blocks[i] is the bytes of block i ---


def around_the_ring(n: int, blocks: list[int]) -> Iterator[Message]:
    """n - 1 steps in each of which every rank passes one block on to the next rank."""
    for step in range(n - 1):
        for rank in range(n):
            yield rank, (rank + 1) % n, blocks[(rank - step) % n]


def chain(n: int, whole: int) -> Iterator[Message]:
    """From rank to rank, as a pipelined broadcast or reduce goes."""
    for hop in range(n - 1):
        yield hop, hop + 1, whole


def star(n: int, blocks: list[int], root: int) -> Iterator[Message]:
    """Between the root and every other rank, directly."""
    for rank in range(n):
        if rank != root:
            yield rank, root, blocks[rank]


def exchange(table: list[list[int]]) -> Iterator[Message]:
    """From every rank to every other, directly."""
    for source, row in enumerate(table):
        for destination, size in enumerate(row):
            if source != destination:
                yield source, destination, size


def parts(n: int, whole: int) -> list[int]:
    """A whole cut into n blocks, as evenly as can be."""
    return [whole // n + (i < whole % n) for i in range(n)]


Count = Callable[[int, int, int], Iterator[Message]]
"""(ranks, rows, seed) -> messages"""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A program, the entry it must leave, and the messages that the algorithm sends."""

    program: Any
    messages: Count
    options: dict[str, Any] = field(default_factory=dict)
    op: str = ""

    def __str__(self) -> str:
        return str(self.program.__name__)


def twice_around(n: int, rows: int, seed: int) -> Iterator[Message]:
    """A ring all_reduce: reduce_scatter of n blocks, then all_gather of them."""
    for _ in range(2):
        yield from around_the_ring(n, parts(n, rows_of(rows)))


def uneven_blocks(n: int, seed: int) -> list[int]:
    return [rows_of(k) for k in row_counts(seed, n)]


def table(n: int, seed: int) -> list[list[int]]:
    return [[rows_of(k) for k in row] for row in split_table(seed, n)]


LINES = [
    Line(program=programs.all_reduce, messages=twice_around, options={"op": "sum"}),
    Line(
        program=programs.reduce,
        messages=lambda n, rows, seed: chain(n, rows_of(rows)),
        options={"op": "max", "root": 1},
    ),
    Line(
        program=programs.broadcast,
        messages=lambda n, rows, seed: chain(n, rows_of(rows)),
        options={"root": 1},
    ),
    Line(
        program=programs.all_gather,
        messages=lambda n, rows, seed: around_the_ring(n, [rows_of(rows)] * n),
    ),
    Line(
        program=programs.all_gather_uneven,
        op="all_gather",
        messages=lambda n, rows, seed: around_the_ring(n, uneven_blocks(n, seed)),
    ),
    Line(
        program=programs.all_gather_into_tensor,
        messages=lambda n, rows, seed: around_the_ring(n, [rows_of(rows)] * n),
        options={"stacked": False},
    ),
    Line(
        program=programs.gather,
        messages=lambda n, rows, seed: star(n, [rows_of(rows)] * n, 1),
        options={"root": 1},
    ),
    Line(
        program=programs.gather_uneven,
        op="gather",
        messages=lambda n, rows, seed: star(n, uneven_blocks(n, seed), 1),
        options={"root": 1},
    ),
    Line(
        program=programs.scatter,
        messages=lambda n, rows, seed: star(n, [rows_of(rows)] * n, 1),
        options={"root": 1},
    ),
    Line(
        program=programs.scatter_uneven,
        op="scatter",
        messages=lambda n, rows, seed: star(n, uneven_blocks(n, seed), 1),
        options={"root": 1},
    ),
    Line(
        program=programs.reduce_scatter,
        messages=lambda n, rows, seed: around_the_ring(n, uneven_blocks(n, seed)),
        options={"op": "sum", "uneven": True},
    ),
    Line(
        program=programs.reduce_scatter_tensor,
        messages=lambda n, rows, seed: around_the_ring(n, [rows_of(rows)] * n),
        options={"op": "avg"},
    ),
    Line(
        program=programs.all_to_all,
        messages=lambda n, rows, seed: exchange(table(n, seed)),
        options={"uneven": True},
    ),
    Line(
        program=programs.all_to_all_single,
        messages=lambda n, rows, seed: exchange([[rows_of(rows)] * n] * n),
    ),
    Line(
        program=programs.all_to_all_single_uneven,
        op="all_to_all_single",
        messages=lambda n, rows, seed: exchange(table(n, seed)),
    ),
]


def ledger_of(program: Callable[[RankContext], object], n: int, seed: int | None = None) -> Ledger:
    """What one run of a program leaves."""
    with World(n, seed=seed) as world:
        world.ledger.clear()
        world.run(program)
        return world.ledger


@pytest.mark.parametrize("line", LINES, ids=str)
@settings(max_examples=8)
@given(n=st.integers(2, 5), rows=st.integers(0, 4), seed=st.integers(0, 99))
def test_bytes_of_collectives(line: Line, n: int, rows: int, seed: int) -> None:
    """One entry, whose bytes are those of all messages of the algorithm."""
    sizes = {"shape": (rows, COLS), "rows": rows, "cols": COLS}
    names = line.program.__code__.co_varnames[: line.program.__code__.co_kwonlyargcount + 3]
    options = {k: v for k, v in sizes.items() if k in names} | line.options | {"kind": KIND}
    invocation = Invocation(program=line.program, seed=seed, options=options)
    [entry] = ledger_of(lambda ctx: invocation(ctx.rank, ctx.world_size), n).entries
    assert entry.op == (line.op or line.program.__name__)
    assert entry.bytes == sum(size for _, _, size in line.messages(n, rows, seed))
    assert entry.ranks == tuple(range(n))
    assert entry.dtype == "float32"
    assert len(entry.shapes) == len(entry.sites) == n
    assert {str(site).rsplit("/")[-1].split(":")[0] for site in entry.sites} == {"programs.py"}
    wanted = line.options.get("op") or ("root 1" if "root" in line.options else "")
    assert entry.detail == wanted


@pytest.mark.parametrize("what", ["all_reduce", "all_gather", "reduce_scatter"])
def test_bytes_of_coalesced_collectives(what: str) -> None:
    """Under the coalescing manager one entry has the bytes of all its operations."""
    n, row = 3, 2 * ITEM
    options = {"what": what, "device": None, "async_ops": False}
    invocation = Invocation(program=programs_messages.coalesced, options=options)
    [entry] = ledger_of(lambda ctx: invocation(ctx.rank, ctx.world_size), n).entries
    if what == "all_reduce":
        messages = [
            m
            for i in range(3)
            for _ in range(2)
            for m in around_the_ring(n, parts(n, row * (i + 1)))
        ]
    else:
        messages = [m for i in range(3) for m in around_the_ring(n, [row * i] * n)]
    assert entry.bytes == sum(size for _, _, size in messages)


def test_a_barrier_moves_nothing() -> None:
    [entry] = ledger_of(lambda ctx: dist.barrier(), 3).entries
    assert (entry.op, entry.bytes, entry.shapes) == ("barrier", 0, ((), (), ()))


@settings(max_examples=5)
@given(seed=st.integers(0, 99), schedule=st.none() | st.integers(0, 99))
def test_messages(seed: int, schedule: int | None) -> None:
    """An entry for each message, with its own source, destination, bytes and number."""
    n = 4
    invocation = Invocation(program=programs_messages.messages_in_order, seed=seed)
    ledger = ledger_of(lambda ctx: invocation(ctx.rank, ctx.world_size), n, schedule)
    sent = sorted((e.ranks, e.sequence, e.bytes) for e in ledger.entries)
    assert {e.op for e in ledger.entries} <= {"send"}
    counts = split_table(seed, n)
    assert sent == [
        ((s, d), i, 3 * ITEM)
        for s in range(n)
        for d in range(n)
        if s != d
        for i in range(counts[s][d])
    ]


def by_axes(ctx: RankContext) -> None:
    """Two axes of groups, with different traffic on each."""
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    row, column = rows[ctx.rank // 2], columns[ctx.rank % 2]
    label_group(row, "row")
    label_group(column, "column")
    for _ in range(3):
        dist.all_reduce(torch.ones(5, 2), group=row)
    dist.broadcast(torch.ones(7, dtype=torch.int64), ctx.rank % 2, group=column)
    if ctx.rank == 0:
        dist.send(torch.ones(3, dtype=torch.bool), 2, group=column)
    elif ctx.rank == 2:
        dist.recv(torch.ones(3, dtype=torch.bool), 0, group=column)


@pytest.mark.parametrize("schedule", [None, 1, 2, 3])
def test_totals_by_group(schedule: int | None) -> None:
    """Counts and bytes by group's label and operation, whatever the schedule."""
    ledger = ledger_of(by_axes, 4, schedule)
    assert ledger.totals() == {
        ("column", "broadcast"): (2, 2 * 7 * 8),
        ("column", "send"): (1, 3),
        ("row", "all_reduce"): (6, 6 * 2 * 5 * 2 * ITEM),
    }
    assert len(ledger) == 9


@pytest.mark.parametrize("schedule", [None, 11])
def test_the_same_run_leaves_the_same_ledger(schedule: int | None) -> None:
    """Byte for byte."""
    first, second = (ledger_of(by_axes, 4, schedule).to_json() for _ in range(2))
    assert first == second
    assert first.count("\n") == 8
