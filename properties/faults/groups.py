"""The wrong group, rank or size, and calls that the ranks do not make alike (class G)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from properties.faults.fault import Fault
from properties.faults.patches import Method, minimax_m3, replaced, tp_rank, wrapped
from properties.faults.program import ProgramFault, Seat
from properties.faults.programs import all_to_all, gather_scatter
from properties.placement import shard_rows
from sim import Schedule


@contextmanager
def experts_by_global_rank() -> Iterator[None]:
    """The expert map is that of the global rank: beyond the EP group's size it has no expert."""
    import vllm.model_executor.layers.fused_moe.expert_map_manager as manager

    def by_rank(own: Method) -> Method:
        def determine(ep_size: int, ep_rank: int, *args: Any, **kwargs: Any) -> Any:
            count, experts, mask = own(ep_size, ep_rank, *args, **kwargs)
            if dist.get_rank() >= ep_size and experts is not None:
                # The slice of the map that the rank would fill lies behind its end.
                experts.fill_(-1)
            return count, experts, mask

        return determine

    with wrapped(manager, "determine_expert_map", by_rank):
        yield


@contextmanager
def norm_sums_over_the_world() -> Iterator[None]:
    """The all-reduce before a norm runs over all ranks, those of other stages too."""
    import vllm.model_executor.layers.fused_allreduce_gemma_rms_norm as fused

    def over_all(x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    with replaced(fused, "tensor_model_parallel_all_reduce", over_all):
        yield


@contextmanager
def one_rank_skips_the_experts() -> Iterator[None]:
    """A TP rank whose share of the batch is empty returns before the experts' collectives."""

    def early(own: Method) -> Method:
        def forward(self: Any, hidden_states: Tensor) -> Any:
            if tp_rank() >= len(hidden_states):
                return torch.zeros_like(hidden_states)
            return own(self, hidden_states)

        return forward

    with wrapped(minimax_m3().MiniMaxM3MoE, "forward", early):
        yield


# --- attention DP, in stand-in programs ---


@contextmanager
def rank_without_tokens_returns() -> Iterator[None]:
    """A DP rank without tokens returns before the collectives of the MoE block."""
    plain = gather_scatter.moe

    def early(seat: Seat, x: Tensor, ids: Tensor) -> Tensor:
        return plain(seat, x, ids) if len(x) else x

    with patch.object(gather_scatter, "moe", early):
        yield


@contextmanager
def way_by_own_tokens() -> Iterator[None]:
    """Each rank chooses between two ways of communication by its own number of tokens."""
    with patch.object(all_to_all, "is_small", lambda counts, own: own <= all_to_all.SMALL):
        yield


@contextmanager
def sizes_before_the_split() -> Iterator[None]:
    """The join over TP has the sizes of the batch before it was split."""
    with patch.object(all_to_all, "shared_rows", lambda seat, count: count):
        yield


@contextmanager
def split_over_the_default_group() -> Iterator[None]:
    """Tokens are split over the default group, and joined over the TP group."""

    def over_all(seat: Seat, x: Tensor) -> Tensor:
        rows = shard_rows(len(x), dist.get_world_size())
        return x[dist.get_rank() * rows : (dist.get_rank() + 1) * rows]

    with patch.object(all_to_all, "share", over_all):
        yield


@contextmanager
def ids_are_not_awaited() -> Iterator[None]:
    """The token ids are gathered on a side stream, which their reader does not wait for."""

    def unawaited(parts: list[Tensor], work: dist.Work | None, counts: list[int]) -> Tensor:
        early = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
        if work is not None:
            # Something later waits; it is not what reads the ids.
            work.wait()
        return early

    with patch.object(gather_scatter, "finish_ids", unawaited):
        yield


@contextmanager
def ids_and_hidden_states_cross() -> Iterator[None]:
    """On every second DP rank the two gathers of one group are issued the other way round."""
    plain = gather_scatter.gather
    waiting: dict[int, list[tuple[list[Tensor], Tensor]]] = {}

    def late(seat: Seat, ids: Tensor, counts: list[int]) -> tuple[list[Tensor], dist.Work | None]:
        mine = gather_scatter.pad(ids, max(counts))
        parts = [torch.zeros_like(mine) for _ in counts]
        if seat.index("dp") % 2:
            waiting.setdefault(seat.rank, []).append((parts, mine))
            return parts, None
        return parts, dist.all_gather(parts, mine, group=seat.group("dp"), async_op=True)

    def then(seat: Seat, x: Tensor, counts: list[int]) -> Tensor:
        whole = plain(seat, x, counts)
        for parts, mine in waiting.pop(seat.rank, []):
            dist.all_gather(parts, mine, group=seat.group("dp"))
        return whole

    with (
        patch.object(gather_scatter, "start_ids", late),
        patch.object(gather_scatter, "gather", then),
    ):
        yield


@contextmanager
def gather_over_tp() -> Iterator[None]:
    """The gather of the DP ranks' tokens runs over the TP group, which has them already."""
    plain = gather_scatter.gather

    def over_tp(seat: Seat, x: Tensor, counts: list[int]) -> Tensor:
        if seat.size("tp") != len(counts):
            return plain(seat, x, counts)
        mine = gather_scatter.pad(x, max(counts))
        parts = [torch.empty_like(mine) for _ in counts]
        dist.all_gather(parts, mine, group=seat.group("tp"))
        return torch.cat(parts)

    with patch.object(gather_scatter, "gather", over_tp):
        yield


def _stand_in(name: str, report: str, **fields: Any) -> ProgramFault:
    return ProgramFault(name=name, report=report, **fields)


FAULTS: tuple[Fault, ...] = (
    Fault(
        name="experts-by-global-rank",
        report="vllm#46441",
        mechanism="the global rank is used for the rank in the EP group: the second stage maps no "
        "experts",
        apply=experts_by_global_rank,
        shows=("tep2pp2", "tep4pp2"),
        hides=("tep2", "tep4"),
        kinds=("is loaded by no rank", "is not loaded"),
        at=("layers.1.block_sparse_moe.experts",),
    ),
    Fault(
        name="norm-sums-over-the-world",
        report="of this project: at PP = 1 the world is the TP group",
        mechanism="the all-reduce fused into a norm runs over the world group",
        apply=norm_sums_over_the_world,
        shows=("tp2pp2", "tp4pp2"),
        hides=("tp2", "tp4"),
        kinds=("deadlock", "mismatch"),
        at=("all_reduce",),
    ),
    Fault(
        name="rank-beyond-tokens-skips-experts",
        report="vllm#43547, over TP",
        mechanism="a rank with no row of its own returns before the experts' all-reduce",
        apply=one_rank_skips_the_experts,
        shows=("tp8pp2",),
        hides=("tp2pp2", "tp4pp2"),
        kinds=("deadlock", "mismatch"),
        at=("all_reduce",),
    ),
    _stand_in(
        "dp-rank-without-tokens-returns",
        "vllm#43547, #44954",
        mechanism="a DP rank without tokens returns before the collectives",
        program=gather_scatter.PROGRAM,
        apply=rank_without_tokens_returns,
        shows=("dp2", "dp2tp2"),
        hides=("tp1", "tp2"),
        tokens=(3, 0),
        hiding_tokens=(3, 1),
        kinds=("deadlock", "mismatch"),
        at=("all_gather",),
    ),
    _stand_in(
        "dp-way-by-own-tokens",
        "vllm-ascend#12195",
        mechanism="the kind of MoE communication is chosen by the rank's own number of tokens",
        program=all_to_all.PROGRAM,
        apply=way_by_own_tokens,
        shows=("dp2", "dp2tp2"),
        hides=("tp1", "tp2"),
        hiding_tokens=(2,),
        kinds=("deadlock", "mismatch"),
        at=("all_gather", "all_to_all", "all_reduce"),
    ),
    _stand_in(
        "dp-sizes-before-the-split",
        "tokenspeed#419",
        mechanism="the gather of split tokens has the sizes of before the split",
        program=all_to_all.PROGRAM,
        apply=sizes_before_the_split,
        shows=("tp2", "dp2tp2"),
        hides=("dp2", "dp4"),
        kinds=("rows lost", "padding leaked"),
        at=(".routed",),
    ),
    _stand_in(
        "dp-split-over-the-default-group",
        "Megatron-LM#7452",
        mechanism="the scatter runs over the default group, and the gather over the explicit one",
        program=all_to_all.PROGRAM,
        apply=split_over_the_default_group,
        shows=("dp2tp2", "dp4tp2"),
        hides=("tp2", "tp4"),
        tokens=(4, 4),
        kinds=("rows lost", "padding leaked", "wrong group", "wrong shape"),
        at=(".slots", ".routed"),
    ),
    _stand_in(
        "dp-ids-not-awaited",
        "ROCm/ATOM#1208",
        mechanism="token ids are gathered on a side stream, and the router reads them early",
        program=gather_scatter.PROGRAM,
        apply=ids_are_not_awaited,
        shows=("dp2", "dp2tp2"),
        schedule=Schedule(seed=0, late=True),
        kinds=("stale", "wrong values"),
        at=("ids",),
    ),
    _stand_in(
        "dp-gathers-cross",
        "ROCm/ATOM#1208, the other way round on some ranks",
        mechanism="two gathers of one group are issued in different orders on different ranks",
        program=gather_scatter.PROGRAM,
        apply=ids_and_hidden_states_cross,
        shows=("dp2", "dp2tp2"),
        hides=("tp1", "tp2"),
        kinds=("mismatch",),
        at=("all_gather",),
    ),
    _stand_in(
        "dp-gather-over-tp",
        "vllm#32705: a broadcast of naive all2all in the wrong group at DP2 TP2",
        mechanism="the tokens of the DP ranks are gathered over a TP group",
        program=gather_scatter.PROGRAM,
        apply=gather_over_tp,
        shows=("dp2tp2",),
        hides=("dp2", "dp4", "tp2"),
        kinds=("wrong group", "rows duplicated"),
        at=("gathered", "all_gather"),
        tokens=(2, 2),
    ),
)
