"""Padding rows, uneven batches, and ranks without tokens (class F)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from properties.faults.fault import Fault
from properties.faults.patches import (
    MEGA,
    Method,
    minimax_m3,
    overlay_layers,
    overlay_model,
    tp_rank,
    tp_size,
    wrapped,
)
from properties.faults.program import ProgramFault, Seat
from properties.faults.programs import all_to_all, gather_scatter, tiny


def _sharding() -> Any:
    """The module whose `sp_shard` cuts what enters a stage."""
    import sys

    return sys.modules[overlay_model().__module__]


@contextmanager
def fallback_skips_the_reduction() -> Iterator[None]:
    """With fewer tokens than TP ranks, attention's addends are cut by token and not summed."""

    def falling_back(own: Method) -> Method:
        def scatter(self: Any, partial_sum: Tensor) -> Tensor:
            if len(partial_sum) >= tp_size():
                return torch.as_tensor(own(self, partial_sum))
            padded = torch.nn.functional.pad(partial_sum, (0, 0, 0, tp_size() - len(partial_sum)))
            return padded[tp_rank() : tp_rank() + 1]

        return scatter

    with wrapped(overlay_layers().MiniMaxM3DecoderLayer, "scatter_attention_output", falling_back):
        yield


@contextmanager
def shards_without_padding() -> Iterator[None]:
    """Token shards are cut by `chunk`, which makes fewer or shorter ones where TP divides not T."""
    with patch.object(_sharding(), "sp_shard", lambda x: x.chunk(tp_size())[tp_rank()]):
        yield


@contextmanager
def residual_padding_is_not_a_number() -> Iterator[None]:
    """Rows past a rank's tokens are uninitialised, and a mean over all rows spreads them."""

    def spreading(own: Method) -> Method:
        def forward(self: Any, hidden_states: Tensor) -> Any:
            rows = -(-(len(hidden_states) + 1) // 2) * 2
            padded = hidden_states.new_full((rows, hidden_states.shape[1]), torch.nan)
            padded[: len(hidden_states)] = hidden_states
            # A product with zeros for the padding rows does not clear what is no number.
            keep = torch.eye(rows, dtype=padded.dtype)[: len(hidden_states)]
            return own(self, keep @ padded)

        return forward

    with wrapped(minimax_m3().MiniMaxM3MLP, "forward", spreading):
        yield


# --- attention DP, in stand-in programs ---


@contextmanager
def gather_pads_with_garbage() -> Iterator[None]:
    """Uneven DP batches are padded with uninitialised rows before the gather."""

    def uninitialised(x: Tensor, rows: int) -> Tensor:
        if not x.is_floating_point():
            return torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])
        return torch.cat([x, x.new_full((rows - len(x), *x.shape[1:]), torch.nan)])

    with patch.object(gather_scatter, "pad", uninitialised):
        yield


@contextmanager
def slots_keep_old_experts() -> Iterator[None]:
    """Slots past the received counts keep whatever expert ids the buffer held."""
    with patch.object(all_to_all, "received_experts", lambda arrived, counts: arrived):
        yield


@contextmanager
def largest_of_no_tokens() -> Iterator[None]:
    """The experts' groups are sized by the largest expert id received: there may be none."""

    def sized(load: Tensor) -> Tensor:
        received = torch.arange(load.shape[1]).repeat_interleave(load.sum(0))
        return torch.bincount(received, minlength=int(received.max()) + 1)

    plain = all_to_all.grouped

    def filled(seat: Seat, x: Tensor, expert: Tensor, sizes: Tensor) -> Tensor:
        missing = len(tiny.local_experts(seat)) - len(sizes)
        return plain(seat, x, expert, torch.cat([sizes, sizes.new_zeros(missing)]))

    with (
        patch.object(all_to_all, "group_sizes", sized),
        patch.object(all_to_all, "grouped", filled),
    ):
        yield


@contextmanager
def capacity_from_the_mean() -> Iterator[None]:
    """A dispatch that should drop nothing has as many slots as the ranks need on average."""

    def mean(seat: Seat, planned: all_to_all.Plan) -> int:
        needed = torch.tensor([float(planned.owner.numel()) / seat.size("ep") ** 2])
        dist.all_reduce(needed, group=seat.group("ep"))
        return -int(-needed.item() // 1)

    with patch.object(all_to_all, "capacity", mean):
        yield


@contextmanager
def combine_cuts_equal_parts() -> Iterator[None]:
    """The reduce-scatter over DP cuts the tokens of all DP ranks into equal parts."""

    def equal(seat: Seat, y: Tensor, counts: list[int]) -> Tensor:
        mine = y.new_empty(len(y) // len(counts), y.shape[1])
        dist.reduce_scatter(mine, [*y.chunk(len(counts))], group=seat.group("dp"))
        return mine

    with patch.object(gather_scatter, "combine", equal):
        yield


FAULTS: tuple[Fault, ...] = (
    Fault(
        name="fallback-skips-attention-sum",
        report="vllm#53191",
        mechanism="with fewer tokens than TP ranks a fallback cuts attention's addends by token "
        "and does not sum them",
        apply=fallback_skips_the_reduction,
        shows=("tep8", "tep8pp2"),
        hides=("tep2", "tep4"),
        kinds=("reduction missing", "part missing"),
        at=("layers.0.residual",),
        needs=(MEGA,),
    ),
    Fault(
        name="shards-cut-without-padding",
        report="torchtitan#3622",
        mechanism="the stream is cut into TP chunks without padding: 1, 2 or 3 tokens on 4 ranks "
        "fail",
        apply=shards_without_padding,
        shows=("tep4", "tep4pp2"),
        hides=("tep1",),
        kinds=("rank_failed", "mismatch", "ranks differ", "wrong shape"),
        at=("chunk", "padding.py", "embed", "layers.0", "all_gather"),
        needs=(MEGA,),
    ),
    Fault(
        name="padding-survives-its-mask",
        report="vllm#41249",
        mechanism="uninitialised padding rows are masked by a product with zero, which leaves "
        "what is no number",
        apply=residual_padding_is_not_a_number,
        shows=("tp1", "tp2pp2"),
        kinds=("not finite", "poison"),
        at=("layers.0.ffn",),
    ),
    ProgramFault(
        name="dp-gather-pads-with-garbage",
        report="ROCm/ATOM#1229, #1208",
        mechanism="the gather over DP pads uneven batches with uninitialised rows, and a product "
        "with zero does not clear them",
        program=gather_scatter.PROGRAM,
        apply=gather_pads_with_garbage,
        shows=("dp2", "dp2tp2"),
        hides=("tp1", "tp2"),
        hiding_tokens=(2,),
        kinds=("not finite",),
        at=("gathered",),
    ),
    ProgramFault(
        name="a2a-slots-keep-old-experts",
        report="sglang#24850",
        mechanism="receive slots past the counts keep the expert ids that the buffer held",
        program=all_to_all.PROGRAM,
        apply=slots_keep_old_experts,
        shows=("dp2", "dp2tp2"),
        kinds=("padding leaked", "wrong values"),
        at=(".slots",),
    ),
    ProgramFault(
        name="a2a-rank-without-tokens-fails",
        report="Megatron-LM#3626",
        mechanism="an EP rank that receives no token takes the largest of no expert ids",
        program=all_to_all.PROGRAM,
        apply=largest_of_no_tokens,
        shows=("dp4",),
        tokens=(2, 0, 0, 0),
        hiding_tokens=(8,),
        kinds=("rank_failed",),
        at=("padding.py",),
    ),
    ProgramFault(
        name="a2a-capacity-from-the-mean",
        report="Megatron-Bridge#4635: a rank's rows depend on other ranks' tokens",
        mechanism="a dispatch that is to drop nothing has the slots that ranks need on average",
        program=all_to_all.PROGRAM,
        apply=capacity_from_the_mean,
        shows=("dp2", "dp4"),
        kinds=("rows lost", "part missing", "wrong shape"),
        at=(".slots", ".routed"),
    ),
    ProgramFault(
        name="dp-combine-cuts-equal-parts",
        report="of this project: right for even batches",
        mechanism="the reduce-scatter over DP cuts uneven batches into equal parts",
        program=gather_scatter.PROGRAM,
        apply=combine_cuts_equal_parts,
        shows=("dp2", "dp2tp2"),
        hides=("tp1", "tp2"),
        tokens=(1, 3),
        hiding_tokens=(2,),
        kinds=("rows lost", "rows duplicated", "padding leaked", "wrong shape"),
        at=(".routed",),
    ),
)
