"""Streams sharded by token: rows at the wrong rank, gathers left out, pads let in (class C)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import pad

from properties.faults.fault import Fault
from properties.faults.patches import (
    MEGA,
    Method,
    all_reduce,
    minimax_m3,
    overlay_layers,
    overlay_model,
    replaced,
    tp_size,
    wrapped,
)


@contextmanager
def gather_goes_by_row_count() -> Iterator[None]:
    """What has as many rows as there are tokens is taken for whole: of one token, so is a shard."""

    def unless_whole(own: Method) -> Method:
        def gather(shard: torch.Tensor, num_tokens: int) -> torch.Tensor:
            return shard if shard.shape[0] == num_tokens else own(shard, num_tokens)

        return gather

    with wrapped(overlay_layers(), "gather_tokens", unless_whole):
        yield


def _falls_back(tokens: int) -> bool:
    return tokens < tp_size()


@contextmanager
def fallback_forgets_attention() -> Iterator[None]:
    """Fewer tokens than TP ranks stay replicated; o_proj then has no reduce-scatter to reduce it,
    and no all-reduce either."""

    def gather(own: Method) -> Method:
        return lambda self, x, tokens: x if _falls_back(tokens) else own(self, x, tokens)

    def scatter(own: Method) -> Method:
        return lambda self, addend: addend if _falls_back(len(addend)) else own(self, addend)

    layer = overlay_layers().MiniMaxM3DecoderLayer
    with (
        wrapped(overlay_model(), "shard_embedding", _whole_where(_falls_back)),
        wrapped(layer, "gather_for_attention", gather),
        wrapped(layer, "scatter_attention_output", scatter),
    ):
        yield


def _whole_where(condition: Any) -> Any:
    def keep(own: Method) -> Method:
        return lambda self, hidden: hidden if condition(len(hidden)) else own(self, hidden)

    return keep


@contextmanager
def experts_sum_other_tokens() -> Iterator[None]:
    """MegaMoE's output, rows of this rank's own tokens, is all-reduced over the experts' group."""

    def summed(own: Method) -> Method:
        return lambda self, *args, **kwargs: all_reduce(own(self, *args, **kwargs))

    with wrapped(overlay_layers().MiniMaxM3MegaMoE, "forward", summed):
        yield


@contextmanager
def residual_sliced_from_row_0() -> Iterator[None]:
    """The first layer takes the first rows of the whole residual, on every rank."""

    def embedded(own: Method) -> Method:
        def shard(self: Any, hidden: torch.Tensor) -> torch.Tensor:
            mine = torch.as_tensor(own(self, hidden))
            self.first_rows = pad(hidden, (0, 0, 0, len(mine)))[: len(mine)].clone()
            return mine

        return shard

    def sliced(own: Method) -> Method:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            own(self, *args, **kwargs)
            if self.use_sequence_parallel and self.start_layer == 0:
                norm = self.layers[0].post_attention_layernorm
                norm.register_forward_pre_hook(lambda norm, inputs: (inputs[0], self.first_rows))

        return init

    model = overlay_model()
    with wrapped(model, "shard_embedding", embedded), wrapped(model, "__init__", sliced):
        yield


@contextmanager
def residual_stays_whole() -> Iterator[None]:
    """Embeddings that come from outside are not sharded, and become the whole residual; o_proj
    reduce-scatters as ever."""

    def whole(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def first_is_whole(own: Method) -> Method:
        def gather(self: Any, hidden: torch.Tensor, num_tokens: int) -> torch.Tensor:
            return hidden if self.layer_id == 0 else own(self, hidden, num_tokens)

        return gather

    layer = overlay_layers().MiniMaxM3DecoderLayer
    with (
        replaced(overlay_model(), "shard_embedding", whole),
        wrapped(layer, "gather_for_attention", first_is_whole),
    ):
        yield


@contextmanager
def scatter_pads_in_front() -> Iterator[None]:
    """The dense MLP's reduce-scatter pads before the first token; all shards pad after the last."""

    def in_front(own: Method) -> Method:
        return lambda self, addend: own(self, pad(addend, (0, 0, -len(addend) % tp_size(), 0)))

    with wrapped(overlay_layers().MiniMaxM3SequenceParallelMLP, "reduce_output", in_front):
        yield


@contextmanager
def dense_mlp_works_on_its_shard() -> Iterator[None]:
    """The dense MLP, sharded by feature, does not gather its input: it all-reduces what its ranks
    made of different tokens."""

    def local(self: Any, x: torch.Tensor, num_tokens: int) -> torch.Tensor:
        return all_reduce(minimax_m3().MiniMaxM3MLP.forward(self, x))

    with replaced(overlay_layers().MiniMaxM3SequenceParallelMLP, "forward", local):
        yield


FAULTS = (
    Fault(
        name="sp-gather-by-row-count",
        report="vllm#50685; vllm#50691, vllm#50154, vllm#50155",
        mechanism="a shard with as many rows as there are tokens is taken for whole: of one token",
        apply=gather_goes_by_row_count,
        shows=("tep2", "tep4", "tep2pp2"),
        hides=("tep1",),
        kinds=("gather missing", "poison"),
        at=("layers.0.attn",),
        needs=(MEGA, ("seq_lens", (1,))),
    ),
    Fault(
        name="sp-fallback-forgets-attention",
        report="vllm#53191",
        mechanism="fewer tokens than ranks stay replicated, and nobody reduces o_proj's output",
        apply=fallback_forgets_attention,
        shows=("tep2", "tep4"),
        hides=("tep1",),
        kinds=("reduction missing",),
        at=("layers.0.residual",),
        needs=(MEGA, ("seq_lens", (1,))),
    ),
    Fault(
        name="sp-experts-sum-other-tokens",
        report="tpu-inference#2248",
        mechanism="token shards are summed over the group by which they are sharded",
        apply=experts_sum_other_tokens,
        shows=("tep2", "tep4", "tep2pp2"),
        hides=("tep1",),
        kinds=("shards summed", "counted too often"),
        at=("layers.1.ffn",),
        needs=(MEGA, ("seq_lens", (8,))),
    ),
    Fault(
        name="sp-residual-from-row-0",
        report="vllm#33322, vllm#49303",
        mechanism="every rank takes the first rows of the residual for its own",
        apply=residual_sliced_from_row_0,
        shows=("tep2", "tep4"),
        hides=("tep1",),
        kinds=("rows mixed", "rows duplicated"),
        at=("layers.0.residual",),
        needs=(MEGA,),
    ),
    Fault(
        name="sp-residual-stays-whole",
        report="vllm-ascend#10951",
        mechanism="the residual has all tokens where o_proj's output is reduce-scattered",
        apply=residual_stays_whole,
        shows=("tep2", "tep4"),
        hides=("tep1",),
        kinds=("rank_failed", "not sharded"),
        at=("layers.0", "norm", "layers.py"),
        needs=(MEGA,),
    ),
    Fault(
        name="sp-scatter-pads-in-front",
        report="found in design",
        mechanism="a reduce-scatter pads before the first token, and so shifts every row",
        apply=scatter_pads_in_front,
        shows=("tep2", "tep4", "tep2pp2"),
        hides=("tep1",),
        kinds=("padding leaked",),
        at=("layers.0.ffn",),
        needs=(MEGA, ("seq_lens", (7,))),
    ),
    Fault(
        name="sp-dense-mlp-on-its-shard",
        report="tpu-inference#2248, for the dense MLP",
        mechanism="addends of different tokens are summed over the ranks",
        apply=dense_mlp_works_on_its_shard,
        shows=("tep2", "tep4"),
        hides=("tep1",),
        kinds=("gather missing", "wrong group"),
        at=("layers.0.ffn",),
        needs=(MEGA, ("seq_lens", (8,))),
        limits="a sum of addends of different tokens is in no relation to the full value",
    ),
)
