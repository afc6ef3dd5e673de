"""Sums of attention DP that count too often, not at all, or over the wrong ranks.

MiniMax-M3 in this project has no attention DP, so stand-in programs have it. Most of these show
neither at DP = 1 nor where TP = 1: with one rank in a group, a sum over it is no sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from properties.faults.program import ProgramFault, Seat
from properties.faults.programs import communicator, gather_scatter, tiny
from properties.faults.programs.communicator import Communicator


@contextmanager
def experts_reduce_before_the_scatter() -> Iterator[None]:
    """The experts all-reduce their addends, and the reduce-scatter over the same ranks follows."""
    plain = gather_scatter.experts

    def reduced(seat: Seat, x: Tensor, ids: Tensor) -> Tensor:
        y = plain(seat, x, ids)
        dist.all_reduce(y, group=seat.group("ep"))
        return y

    with patch.object(gather_scatter, "experts", reduced):
        yield


@contextmanager
def uneven_scatter_does_not_reduce() -> Iterator[None]:
    """The scatter for uneven batches slices what it promised to reduce; dense layers know."""

    def sliced(self: Communicator, y: Tensor, tap: str) -> Tensor:
        self.seat.tap(tap, y)
        return torch.split(y, self.counts)[self.seat.index("dp")].clone()

    with (
        patch.object(Communicator, "scatter_uneven", sliced),
        patch.object(Communicator, "reduces_mlp", lambda self: self.even),
    ):
        yield


@contextmanager
def dense_reduces_before_the_scatter() -> Iterator[None]:
    """What is left once only the scatter of `uneven_scatter_does_not_reduce` is mended."""
    with patch.object(Communicator, "reduces_mlp", lambda self: self.even):
        yield


@contextmanager
def shared_addend_left_out_of_the_sum() -> Iterator[None]:
    """Under attention DP only the routed experts' addend is reduced."""
    plain = gather_scatter.reduce

    def partly(seat: Seat, routed_addend: Tensor, shared_addend: Tensor) -> Tensor:
        if seat.size("dp") == 1:
            return plain(seat, routed_addend, shared_addend)
        return plain(seat, routed_addend, torch.zeros_like(shared_addend)) + shared_addend

    with patch.object(gather_scatter, "reduce", partly):
        yield


@contextmanager
def sum_over_ranks_with_other_tokens() -> Iterator[None]:
    """The last sum runs over DP x TP, though its addends are of each DP rank's own tokens."""

    def too_wide(seat: Seat, routed_addend: Tensor, shared_addend: Tensor) -> Tensor:
        total = routed_addend + shared_addend
        dist.all_reduce(total, group=seat.group("ep"))
        return total

    with patch.object(gather_scatter, "reduce", too_wide):
        yield


@contextmanager
def shared_weights_of_the_dense_group() -> Iterator[None]:
    """The shared expert's weights are sharded over TP, and its output is summed over DP x TP."""

    def dense_group(seat: Seat) -> tuple[int, int]:
        return seat.index("tp"), seat.size("tp")

    with patch.object(communicator, "shared_shard", dense_group):
        yield


@contextmanager
def shared_expert_on_dispatched_rows() -> Iterator[None]:
    """The shared expert runs on the gathered hidden states, and its first rows are taken."""
    gather, plain = gather_scatter.unpad, gather_scatter.shared
    gathered: dict[int, Tensor] = {}

    def keep(whole: Tensor, counts: list[int]) -> Tensor:
        rows = gather(whole, counts)
        gathered[dist.get_rank()] = rows
        return rows

    def on_dispatched(seat: Seat, x: Tensor) -> Tensor:
        return plain(seat, gathered[seat.rank])[: len(x)]

    with (
        patch.object(gather_scatter, "unpad", keep),
        patch.object(gather_scatter, "shared", on_dispatched),
    ):
        yield


@contextmanager
def experts_of_a_wrong_span() -> Iterator[None]:
    """Experts are cut over DP alone, as at TP = 1; the sum is still over DP x TP."""

    def over_dp(seat: Seat) -> range:
        count = tiny.EXPERTS // seat.size("dp")
        return range(seat.index("dp") * count, (seat.index("dp") + 1) * count)

    with patch.object(tiny, "local_experts", over_dp):
        yield


def _fault(name: str, report: str, **fields: Any) -> ProgramFault:
    fields.setdefault("program", gather_scatter.PROGRAM)
    return ProgramFault(name=name, report=report, **fields)


FAULTS: tuple[ProgramFault, ...] = (
    _fault(
        "dp-experts-reduced-before-scatter",
        "sglang#23731, #23431, #37199",
        mechanism="the experts all-reduce, and the communicator reduce-scatters over the same "
        "ranks",
        apply=experts_reduce_before_the_scatter,
        shows=("dp2", "dp2tp2", "dp4tp2"),
        hides=("tp1",),
        kinds=("counted too often",),
        at=("experts",),
    ),
    _fault(
        "dp-scatter-does-not-reduce",
        "sglang#36879",
        mechanism="experts leave their reduction to the communicator, whose scatter of uneven "
        "batches slices without reducing",
        program=communicator.PROGRAM,
        apply=uneven_scatter_does_not_reduce,
        shows=("dp2", "dp4"),
        hides=("tp1",),
        hiding_tokens=(2,),
        kinds=("reduction missing", "part missing"),
        at=("layers.1.scattered",),
    ),
    _fault(
        "dp-scatter-mended-alone",
        "sglang#36879, the second half",
        mechanism="the scatter of uneven batches reduces now, and dense layers still reduce "
        "before it",
        program=communicator.PROGRAM,
        apply=dense_reduces_before_the_scatter,
        shows=("dp2", "dp4"),
        hides=("tp1",),
        hiding_tokens=(2,),
        kinds=("counted too often",),
        at=("layers.0.scattered",),
    ),
    _fault(
        "dp-shared-left-partial",
        "tpu-inference#3435",
        mechanism="under attention DP the routed output is reduced over TP, and the shared "
        "expert's addend is not",
        apply=shared_addend_left_out_of_the_sum,
        shows=("dp2tp2", "dp4tp2"),
        hides=("tp2", "dp2", "dp4"),
        kinds=("reduction missing",),
        at=(".ffn",),
    ),
    _fault(
        "dp-sum-over-other-tokens",
        "tpu-inference#2248",
        mechanism="the axis over which tokens are sharded is in the sum over the experts' ranks",
        apply=sum_over_ranks_with_other_tokens,
        shows=("dp2", "dp2tp2"),
        hides=("tp1", "tp2"),
        kinds=("wrong group", "mismatch"),
        at=(".ffn", "all_reduce"),
    ),
    _fault(
        "dp-shared-of-the-dense-group",
        "tokenspeed#1713",
        mechanism="the shared expert's weights are sharded over the dense TP group, and its "
        "output is summed over the larger MoE group",
        program=communicator.PROGRAM,
        apply=shared_weights_of_the_dense_group,
        shows=("dp2", "dp4", "dp2tp2"),
        hides=("tp2", "tp4"),
        kinds=("counted too often",),
        at=("layers.1.scattered",),
    ),
    _fault(
        "dp-shared-on-dispatched-rows",
        "vllm#24538, #28740",
        mechanism="the shared expert runs on the dispatched hidden states, not on the rank's own",
        apply=shared_expert_on_dispatched_rows,
        shows=("dp2", "dp2tp2"),
        hides=("tp1", "tp2"),
        kinds=("wrong group", "wrong values"),
        at=("dp1.shared",),
    ),
    _fault(
        "dp-experts-cut-over-dp-alone",
        "of this project: right at TP = 1 and at DP = 1 with EP off",
        mechanism="experts are cut over DP alone, so that each is on all TP ranks, and the sum "
        "over DP x TP counts it TP times",
        apply=experts_of_a_wrong_span,
        shows=("dp2tp2", "dp4tp2"),
        hides=("dp2", "dp4"),
        kinds=("counted too often",),
        at=("experts",),
    ),
)
