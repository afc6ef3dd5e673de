"""Faults in code that nobody taps and that has no reference: its operations alone show them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist

from properties.faults.program import Program, ProgramFault, Seat, Truth

WIDTH = 8


def numbers(seed: int, rows: int) -> torch.Tensor:
    """The same random numbers on every rank that asks with the same seed, float32 [rows, WIDTH]."""
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def summed(seat: Seat, addend: torch.Tensor) -> torch.Tensor:
    """The sum of the TP ranks' addends, [T, WIDTH]."""
    total = addend.contiguous()
    dist.all_reduce(total, group=seat.group("tp"))
    return total


def gathered(seat: Seat, shard: torch.Tensor) -> torch.Tensor:
    """The TP ranks' shards one after the other."""
    parts = [torch.empty_like(shard) for _ in range(seat.size("tp"))]
    dist.all_gather(parts, shard, group=seat.group("tp"))
    return torch.cat(parts)


def step(seat: Seat) -> None:
    """A row-parallel layer, then a column-parallel one, whose outputs nobody looks at."""
    rows = 4
    total = summed(seat, numbers(100 + seat.rank, rows).t().t())
    # Two data-parallel replicas have the same weights and other tokens.
    shard = total[:, : WIDTH // 2] * (1 + seat.index("tp"))
    gathered(seat, shard)


PROGRAM = Program(
    name="untapped",
    what="sums and gathers over TP whose results no tap records: code without a reference",
    step=step,
    truth=lambda topology, tokens: Truth(taps={}, bounds={}),
)


@contextmanager
def reduced_again() -> Iterator[None]:
    """Who calls the layer reduces its output, which it has reduced already."""
    own = summed

    def twice(seat: Seat, addend: torch.Tensor) -> torch.Tensor:
        total = own(seat, addend)
        dist.all_reduce(total, group=seat.group("tp"))
        return total

    with patch(f"{__name__}.summed", twice):
        yield


@contextmanager
def copy_reduced() -> Iterator[None]:
    """The sum goes into a contiguous copy, and the addend is returned."""

    def dropped(seat: Seat, addend: torch.Tensor) -> torch.Tensor:
        strided = addend.t().contiguous().t()
        dist.all_reduce(strided.contiguous(), group=seat.group("tp"))
        return strided

    with patch(f"{__name__}.summed", dropped):
        yield


@contextmanager
def whole_gathered() -> Iterator[None]:
    """What every rank holds is gathered as if it were a shard."""
    own = gathered

    def whole(seat: Seat, shard: torch.Tensor) -> torch.Tensor:
        own(seat, numbers(7, 4))
        return shard

    with patch(f"{__name__}.gathered", whole):
        yield


FAULTS: tuple[ProgramFault, ...] = (
    ProgramFault(
        name="untapped-output-reduced-twice",
        report="sglang#23431, where nothing is tapped",
        mechanism="a layer's caller all-reduces what the layer has all-reduced",
        apply=reduced_again,
        program=PROGRAM,
        shows=("tp2", "tp4", "dp2tp2"),
        kinds=("reduced again",),
        at=("all_reduce",),
    ),
    ProgramFault(
        name="untapped-copy-reduced",
        report="Megatron-LM#5337, where nothing is tapped",
        mechanism="an all-reduce of x.contiguous() leaves a strided x unreduced",
        apply=copy_reduced,
        program=PROGRAM,
        shows=("tp2", "tp4"),
        kinds=("dropped result",),
        at=("all_reduce",),
    ),
    ProgramFault(
        name="untapped-whole-gathered",
        report="vllm#49366's kind, for a gather",
        mechanism="a tensor that every rank holds whole is gathered as if it were sharded",
        apply=whole_gathered,
        program=PROGRAM,
        shows=("tp2", "tp4"),
        kinds=("gathers what is whole",),
        at=("all_gather",),
    ),
)
