"""Counted too often around the experts: embedding, attention and dense FFN (class A)."""

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
    is_shared_expert,
    minimax_m3,
    overlay_layers,
    wrapped,
)


@contextmanager
def residual_joins_the_attention_sum() -> Iterator[None]:
    """Every rank adds the residual to its heads' addend before the fused all-reduce."""

    def joined(own: Method) -> Method:
        def fused(hidden: torch.Tensor, residual: torch.Tensor, norm: Any) -> Any:
            return own(hidden + residual, torch.zeros_like(residual), norm)

        return fused

    with wrapped(minimax_m3(), FUSED_NORM, joined):
        yield


@contextmanager
def dense_mlp_is_not_sharded() -> Iterator[None]:
    """The dense MLP is built without its TP arguments: each rank computes all of it, and the next
    norm's fused all-reduce sums whole outputs."""

    def whole(own: Method) -> Method:
        from model.megamoe.block import MiniMaxM3ReplicatedMLP

        def build(*args: Any, reduce_results: bool = True, **kwargs: Any) -> Any:
            if is_shared_expert(kwargs):
                return own(*args, reduce_results=reduce_results, **kwargs)
            mlp = MiniMaxM3ReplicatedMLP(*args, **kwargs)
            # What vLLM's layer goes by; with TP 1 inside, it reduces nothing either way.
            mlp.down_proj.reduce_results = reduce_results
            return mlp

        return build

    with wrapped(minimax_m3(), "MiniMaxM3MLP", whole):
        yield


@contextmanager
def embedding_is_reduced_again() -> Iterator[None]:
    """The vocabulary-parallel embedding reduces, and so does a wrapper around it."""

    def again(own: Method) -> Method:
        return lambda self, token_ids: all_reduce(own(self, token_ids))

    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    with wrapped(VocabParallelEmbedding, "forward", again):
        yield


def _reducing_o_proj(own: Method) -> Method:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        self.o_proj.reduce_results = True

    return init


@contextmanager
def attention_reduces_what_the_norm_reduces() -> Iterator[None]:
    """o_proj all-reduces, and the norm after it with its fused all-reduce again."""
    with wrapped(minimax_m3().MiniMaxM3Attention, "__init__", _reducing_o_proj):
        yield


@contextmanager
def attention_gathers_the_residual_in() -> Iterator[None]:
    """Every rank adds its residual rows to what it reduce-scatters, and the norm adds them too."""

    def joined(own: Method) -> Method:
        def forward(self: Any, positions: Any, hidden: torch.Tensor, residual: Any) -> Any:
            self.entered_with = hidden if residual is None else hidden + residual
            return own(self, positions, hidden, residual)

        return forward

    def scattered(own: Method) -> Method:
        return lambda self, partial_sum: own(self, partial_sum) + self.entered_with

    layer = overlay_layers().MiniMaxM3DecoderLayer
    with wrapped(layer, "forward", joined), wrapped(layer, "scatter_attention_output", scattered):
        yield


@contextmanager
def last_layer_reduces_again() -> Iterator[None]:
    """The model's last layer is special-cased, and all-reduces its dense output once more."""

    def again(own: Method) -> Method:
        def forward(self: Any, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
            hidden, residual = own(self, *args)
            return all_reduce(hidden) if self.layer_id == 2 else hidden, residual

        return forward

    with wrapped(minimax_m3().MiniMaxM3DecoderLayer, "forward", again):
        yield


OFTEN = ("counted too often",)

WHOLE = "has the wrong part"
"""What weights say that are whole where a rank should have a shard."""


FAULTS = (
    Fault(
        name="residual-in-the-attention-sum",
        report="mirage#722, for attention",
        mechanism="every rank adds the residual before the all-reduce of attention's output",
        apply=residual_joins_the_attention_sum,
        shows=("tp2", "tp4", "tp2pp2"),
        hides=("tp1",),
        kinds=OFTEN,
        at=("layers.0.residual",),
    ),
    Fault(
        name="dense-mlp-not-sharded",
        report="tokenspeed#80",
        mechanism="the dense MLP is whole on every rank, and the next norm sums it over the ranks",
        apply=dense_mlp_is_not_sharded,
        shows=("tp2", "tp4"),
        hides=("tp1",),
        kinds=(*OFTEN, WHOLE),
        at=("layers.0.ffn", "layers.0.mlp"),
    ),
    Fault(
        name="embedding-reduced-twice",
        report="found in design",
        mechanism="the embedding's sum over the vocabulary shards is summed over the ranks again",
        apply=embedding_is_reduced_again,
        shows=("tp2", "tp2pp2", "tp4"),
        hides=("tp1", "pp2"),
        kinds=OFTEN,
        at=("embed",),
    ),
    Fault(
        name="attention-reduced-twice",
        report="found in design",
        mechanism="o_proj all-reduces, and the norm after it with its fused all-reduce again",
        apply=attention_reduces_what_the_norm_reduces,
        shows=("tp2", "tp2pp2", "tp4"),
        hides=("tp1", "pp2"),
        kinds=OFTEN,
        at=("layers.0.residual",),
    ),
    Fault(
        name="sp-attention-reduced-twice",
        report="found in design: S1-4 for attention",
        mechanism="o_proj all-reduces what is reduce-scattered afterwards",
        apply=attention_reduces_what_the_norm_reduces,
        shows=("tep2", "tep4", "tep2pp2"),
        hides=("tep1",),
        kinds=OFTEN,
        at=("layers.0.residual",),
        needs=(MEGA,),
    ),
    Fault(
        name="sp-residual-added-twice",
        report="found in design",
        mechanism="the residual is added to the scattered attention output, and by the norm again",
        apply=attention_gathers_the_residual_in,
        shows=("tep2", "tep4"),
        kinds=OFTEN,
        at=("layers.0.residual",),
        needs=(MEGA,),
    ),
    Fault(
        name="third-layer-reduced-twice",
        report="found in design: a fault deep in a model is to be named there",
        mechanism="the dense output of the third layer alone is all-reduced twice",
        apply=last_layer_reduces_again,
        shows=("tp2pp2", "tp4pp2"),
        hides=("pp2",),
        kinds=OFTEN,
        at=("layers.2.",),
        needs=(("layers", "dmd"),),
    ),
)
