"""Faults of the experts and the shared expert of data-parallel ranks, in vLLM's own code.

What runs between the dispatch and the combine, and beside them, sees rows of all DP ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from properties.faults.deployment import DeploymentFault, dp_fault
from properties.faults.missing import shared_output_stays_partial
from properties.faults.patches import (
    Method,
    minimax_m3,
    moe_runner,
    own_layers,
    runs_experts,
    when_built,
    wrapped,
)


@contextmanager
def one_scale_for_all_rows() -> Iterator[None]:
    """Experts scale the gathered rows by the largest of them, and back: others' rows round mine."""
    from model.experts_method import FoldedExperts

    def scaled(own: Method) -> Method:
        def apply(self: Any, *, hidden_states: torch.Tensor, **rest: Any) -> None:
            x = hidden_states
            largest = x.abs().max() if x.numel() else x.new_ones(())
            own(self, hidden_states=x / largest * largest, **rest)

        return apply

    with wrapped(FoldedExperts, "apply", scaled):
        yield


def _gathered_over_dp(x: torch.Tensor) -> torch.Tensor:
    """All DP ranks' rows."""
    from vllm.distributed import get_dp_group
    from vllm.forward_context import get_forward_context

    sizes = get_forward_context().dp_metadata.num_tokens_across_dp_cpu.tolist()
    return torch.as_tensor(get_dp_group().all_gatherv(x, 0, sizes))


@contextmanager
def shared_expert_on_dispatched_rows() -> Iterator[None]:
    """The shared expert runs on the gathered hidden states, and its first rows are taken."""

    def change(backbone: Any) -> None:
        for layer in filter(runs_experts, own_layers(backbone)):
            shared = layer.block_sparse_moe.shared_experts
            own = type(shared).forward.__get__(shared)
            shared.forward = lambda x, own=own: own(_gathered_over_dp(x))[: x.shape[0]]

    with when_built(change):
        yield


@contextmanager
def shared_of_the_dense_group() -> Iterator[None]:
    """Every DP rank adds the shared expert, of its TP group's weights, to the experts' addend,
    which is summed over all DP ranks."""
    from vllm.model_executor.layers.fused_moe.prepare_finalize.naive_dp_ep import (
        MoEPrepareAndFinalizeNaiveDPEPModular as Naive,
    )

    here: dict[int, tuple[Any, torch.Tensor]] = {}

    def gathers(own: Method) -> Method:
        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            here[dist.get_rank()] = (self.shared_experts, _gathered_over_dp(x))
            return torch.as_tensor(own(self, x))

        return forward

    def adds(own: Method) -> Method:
        def finalize(self: Any, output: torch.Tensor, addend: torch.Tensor, *args: Any) -> None:
            shared, rows = here[dist.get_rank()]
            own(self, output, addend + shared(rows), *args)

        return finalize

    def leaves(own: Method) -> Method:
        return lambda self, shared, *args: torch.zeros_like(own(self, shared, *args))

    with (
        wrapped(minimax_m3().MiniMaxM3MoE, "forward", gathers),
        wrapped(Naive, "finalize", adds),
        wrapped(moe_runner(), "_maybe_reduce_shared_expert_output", leaves),
    ):
        yield


@contextmanager
def experts_cut_over_dp_alone() -> Iterator[None]:
    """Experts are cut over DP alone, so that each is on all TP ranks, which are summed over."""
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig

    def over_dp(own: Method) -> Method:
        return staticmethod(lambda tp_size, dp_size, dp_rank, *pcp: (dp_size, dp_rank))

    with wrapped(FusedMoEParallelConfig, "flatten_tp_across_dp_and_pcp", over_dp):
        yield


@contextmanager
def last_sum_over_other_tokens() -> Iterator[None]:
    """The last sum of the experts' output runs over DP x TP, though DP ranks have other tokens."""
    from vllm.distributed import get_ep_group
    from vllm.model_executor.layers.fused_moe.runner import moe_runner as module

    def wide(own: Method) -> Method:
        return lambda x: get_ep_group().all_reduce(x)

    with wrapped(module, "tensor_model_parallel_all_reduce", wide):
        yield


FAULTS: tuple[DeploymentFault, ...] = (
    dp_fault(
        "one-scale-for-all-rows",
        "Megatron-Bridge#4635",
        mechanism="a scale of all gathered rows rounds a rank's own, so that others' tokens move "
        "its bits",
        apply=one_scale_for_all_rows,
        shows=("dep2", "dp2tp2"),
        tokens=(3, 1),
        kinds=("depends on other rows",),
        at=("layers.1.ffn",),
    ),
    dp_fault(
        "shared-left-partial",
        "tpu-inference#3435",
        mechanism="the routed output is reduced over TP, and the shared expert's is not",
        apply=shared_output_stays_partial,
        shows=("dp2tep2",),
        hides=("dep2",),
        kinds=("reduction missing",),
        at=("layers.1.ffn",),
    ),
    dp_fault(
        "shared-of-the-dense-group",
        "tokenspeed#1713",
        mechanism="the shared expert's addend is of the dense TP group, and is summed over DP too",
        apply=shared_of_the_dense_group,
        shows=("dep2", "dp2tp2"),
        kinds=("counted too often",),
        at=("layers.1.ffn",),
    ),
    dp_fault(
        "shared-on-dispatched-rows",
        "vllm#24538, #28740",
        mechanism="the shared expert runs on the dispatched hidden states, not on the rank's own",
        apply=shared_expert_on_dispatched_rows,
        shows=("dep2", "dp2tp2"),
        kinds=("wrong values", "wrong group"),
        at=("dp1.layers.1.ffn",),
    ),
    dp_fault(
        "experts-cut-over-dp-alone",
        "of this project: right at TP = 1",
        mechanism="experts are cut over DP alone, so that each is on all TP ranks",
        apply=experts_cut_over_dp_alone,
        shows=("dp2tep2",),
        hides=("dep2",),
        kinds=("is loaded by 2 ranks", "counted too often"),
        at=(".experts.", "layers.1.ffn"),
    ),
    dp_fault(
        "last-sum-over-other-tokens",
        "tpu-inference#2248",
        mechanism="the last sum of the experts' output runs over DP x TP",
        apply=last_sum_over_other_tokens,
        shows=("dp2tep2",),
        hides=("tep2",),
        tokens=(4, 4),
        kinds=("wrong group", "mismatch", "wrong values"),
        at=("layers.1.ffn", "all_reduce"),
    ),
)
