"""Reductions that are left out or that do not count (class B)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from properties.faults.fault import Fault
from properties.faults.patches import (
    FUSED_NORM,
    MEGA,
    Method,
    all_reduce,
    coordinator,
    minimax_m3,
    moe_runner,
    overlay_layers,
    replaced,
    tp_rank,
    wrapped,
)


@contextmanager
def shared_output_stays_partial() -> Iterator[None]:
    """The routed output is reduced before the sum with the shared one, which then is not."""

    def early(own: Method) -> Method:
        def reduce(self: Any, routed: torch.Tensor, is_reduced: bool) -> tuple[torch.Tensor, bool]:
            routed, is_reduced = own(self, routed, is_reduced)
            return (routed if is_reduced else all_reduce(routed)), True

        return reduce

    def left(own: Method) -> Method:
        return lambda self, shared_output, *args: shared_output

    runner = moe_runner()
    with (
        wrapped(runner, "_maybe_reduce_routed_output_before_transform", early),
        wrapped(runner, "_maybe_reduce_shared_expert_output", left),
    ):
        yield


@contextmanager
def copy_is_reduced() -> Iterator[None]:
    """down_proj's output is not contiguous; a contiguous copy of it is all-reduced in place, and
    the original goes on."""
    from vllm.distributed import get_tp_group
    from vllm.model_executor.layers.linear import RowParallelLinear

    def copied(own: Method) -> Method:
        def forward(self: Any, x: torch.Tensor) -> Any:
            if not (self.reduce_results and self.tp_size > 1):
                return own(self, x)
            with replaced(self, "reduce_results", False):
                output, bias = own(self, x)
            strided = output.t().contiguous().t()
            torch.distributed.all_reduce(
                strided.contiguous().clone(), group=get_tp_group().device_group
            )
            return strided, bias

        return forward

    with wrapped(RowParallelLinear, "forward", copied):
        yield


@contextmanager
def embedding_is_not_reduced() -> Iterator[None]:
    """Each rank looks up the tokens of its part of the vocabulary; nobody sums."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    def local(own: Method) -> Method:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            own(self, *args, **kwargs)
            self.reduce_results = False

        return init

    with wrapped(VocabParallelEmbedding, "__init__", local):
        yield


@contextmanager
def sums_are_averaged() -> Iterator[None]:
    """The group's all-reduce averages over the ranks."""

    def averaged(own: Method) -> Method:
        return lambda self, x: own(self, x) / self.world_size

    with wrapped(coordinator(), "all_reduce", averaged):
        yield


@contextmanager
def attention_scatter_only_slices() -> Iterator[None]:
    """Attention under sequence parallelism takes its own rows of its addend, unsummed."""
    from vllm.models.common.ops.sequence_parallel import sp_shard

    layer = overlay_layers().MiniMaxM3DecoderLayer
    with replaced(layer, "scatter_attention_output", lambda self, addend: sp_shard(addend)):
        yield


@contextmanager
def mlp_is_not_scattered() -> Iterator[None]:
    """Where ranks have a token each or fewer, the MLP skips its reduce-scatter: the rows fit."""

    def skipped(own: Method) -> Method:
        def reduce(self: Any, addend: torch.Tensor) -> torch.Tensor:
            return addend if addend.shape[0] <= 1 else torch.as_tensor(own(self, addend))

        return reduce

    with wrapped(overlay_layers().MiniMaxM3SequenceParallelMLP, "reduce_output", skipped):
        yield


@contextmanager
def one_rank_skips_the_reduction() -> Iterator[None]:
    """TP rank 1 believes that it has nothing to reduce and goes on; the others wait."""

    def skipping(own: Method) -> Method:
        def fused(hidden: torch.Tensor, residual: torch.Tensor, norm: Any) -> Any:
            if tp_rank() == 1:
                return norm(hidden, residual)
            return own(hidden, residual, norm)

        return fused

    with wrapped(minimax_m3(), FUSED_NORM, skipping):
        yield


@contextmanager
def one_rank_pads() -> Iterator[None]:
    """TP rank 1 pads the tokens to a multiple of four before the sum; the others do not."""

    def padding(own: Method) -> Method:
        def fused(hidden: torch.Tensor, residual: torch.Tensor, norm: Any) -> Any:
            more = (0, 0, 0, -hidden.shape[0] % 4 if tp_rank() == 1 else 0)
            hidden, residual = (torch.nn.functional.pad(x, more) for x in (hidden, residual))
            return own(hidden, residual, norm)

        return fused

    with wrapped(minimax_m3(), FUSED_NORM, padding):
        yield


@contextmanager
def shared_expert_is_sharded() -> Iterator[None]:
    """Under sequence parallelism the shared expert is sharded by feature, and works on its rank's
    tokens: the other ranks' features of these tokens are nowhere."""
    from model.megamoe import block

    def sharded(*args: Any, **kwargs: Any) -> Any:
        return minimax_m3().MiniMaxM3MLP(*args, reduce_results=False, **kwargs)

    with replaced(block, "MiniMaxM3ReplicatedMLP", sharded):
        yield


LACKING = ("reduction missing",)


FAULTS = (
    Fault(
        name="shared-output-left-partial",
        report="tpu-inference#3435",
        mechanism="the routed output is reduced, and the shared one added to it is not",
        apply=shared_output_stays_partial,
        shows=("tp2pp2", "tep2pp2", "tep4pp2"),
        hides=("pp2",),
        kinds=LACKING,
        at=("layers.1.ffn",),
    ),
    Fault(
        name="reduced-copy-dropped",
        report="Megatron-LM#5337",
        mechanism="a contiguous copy of the output is all-reduced, and the original goes on",
        apply=copy_is_reduced,
        shows=("tp2pp2", "tp4pp2"),
        hides=("pp2", "tp2"),
        kinds=(*LACKING, "dropped result"),
        at=("layers.0.ffn", "all_reduce"),
    ),
    Fault(
        name="embedding-left-unreduced",
        report="found in design",
        mechanism="each rank keeps the embedding of the tokens of its part of the vocabulary",
        apply=embedding_is_not_reduced,
        shows=("tp2", "tp2pp2", "tp4"),
        hides=("tp1", "pp2"),
        kinds=LACKING,
        at=("embed",),
    ),
    Fault(
        name="sums-averaged",
        report="found in design",
        mechanism="the all-reduce averages over the ranks where it should sum",
        apply=sums_are_averaged,
        shows=("tp2", "tp4", "tp2pp2"),
        hides=("tp1", "pp2"),
        kinds=("scaled",),
        at=("embed",),
    ),
    Fault(
        name="sp-attention-sliced-not-summed",
        report="vllm#53191",
        mechanism="a rank takes its rows of o_proj's addend where it should reduce-scatter",
        apply=attention_scatter_only_slices,
        shows=("tep2", "tep4", "tep2pp2"),
        hides=("tep1",),
        kinds=LACKING,
        at=("layers.0.residual",),
        needs=(MEGA,),
    ),
    Fault(
        name="sp-one-token-not-reduced",
        report="vllm#53191, where one token is a shard",
        mechanism="the reduce-scatter is skipped for one token, whose rows fit a shard",
        apply=mlp_is_not_scattered,
        shows=("tep2", "tep4"),
        hides=("tep1",),
        kinds=LACKING,
        at=("layers.0.ffn",),
        needs=(MEGA, ("seq_lens", (1,))),
    ),
    Fault(
        name="sp-shared-expert-sharded",
        report="tpu-inference#3435, under sequence parallelism",
        mechanism="a shared expert sharded by feature sees only its own rank's tokens",
        apply=shared_expert_is_sharded,
        shows=("tep2", "tep4"),
        hides=("tep1",),
        kinds=(*LACKING, "part missing", "has the wrong part"),
        at=("layers.1.ffn", "layers.1.block_sparse_moe.shared_experts"),
        needs=(MEGA,),
    ),
    Fault(
        name="rank-skips-a-reduction",
        report="vllm#43547, on the TP axis",
        mechanism="one rank goes past an all-reduce that the others wait in",
        apply=one_rank_skips_the_reduction,
        shows=("tp2", "tp4"),
        hides=("tp1",),
        kinds=("deadlock", "mismatch"),
        at=("tp[", "all_reduce"),
    ),
    Fault(
        name="rank-pads-a-reduction",
        report="tokenspeed#419, on the TP axis",
        mechanism="one rank pads its operand of an all-reduce, and the others do not",
        apply=one_rank_pads,
        shows=("tp2", "tp4", "tp2pp2"),
        hides=("tp1",),
        kinds=("mismatch",),
        at=("all_reduce",),
    ),
)
