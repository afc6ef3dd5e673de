"""Reductions that are left to somebody who does not do them, or does too many (class B)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

from properties.faults.fault import Fault
from properties.faults.patches import (
    FUSED_NORM,
    Method,
    all_reduce,
    is_shared_expert,
    minimax_m3,
    own_layers,
    replaced,
    runs_experts,
    when_built,
    wrapped,
)


@contextmanager
def moe_skips_its_reduction() -> Iterator[None]:
    """Under PP the experts are told that somebody else reduces their output; nobody does."""

    def skipping(own: Method) -> Method:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            own(self, *args, **{**kwargs, "reduce_results": False})

        return init

    layer = minimax_m3().MiniMaxM3DecoderLayer
    # The layer's own flag, as the code that made the promise had it.
    deferred = replaced(layer, "ffn_all_reduce_deferred", property(lambda self: False))
    with wrapped(minimax_m3().MiniMaxM3MoE, "__init__", skipping), deferred:
        yield


@contextmanager
def norm_reduces(*, after_dense_too: bool) -> Iterator[None]:
    """Every MoE layer but a stage's last leaves its reduction to the next norm, under PP too.

    Args:
        after_dense_too: also the norm after a dense layer reduces, whose output is reduced
            already: the repair of one fault that arms another. False is right.
    """

    def deferring(backbone: Any) -> None:
        for layer, after in pairwise(own_layers(backbone)):
            if runs_experts(layer):
                layer.block_sparse_moe.experts.moe_config.skip_final_all_reduce = True
            after.fuse_input_allreduce = layer.ffn_all_reduce_deferred or after_dense_too

    with when_built(deferring):
        yield


@contextmanager
def dense_is_reduced_by_the_repair() -> Iterator[None]:
    """The next norm now reduces for the experts, and for the dense layers as well."""
    with norm_reduces(after_dense_too=True):
        yield


@contextmanager
def moe_defers_inside_stages() -> Iterator[None]:
    """The next norm reduces for the experts, which is right; but aux hidden states are taken
    before it."""
    with norm_reduces(after_dense_too=False):
        yield


@contextmanager
def final_norm_reduces_nothing() -> Iterator[None]:
    """Every FFN leaves its all-reduce to the next norm; the final norm is a plain one."""

    def plain(backbone: Any) -> None:
        backbone.fuse_final_norm_allreduce = False

    with when_built(plain):
        yield


@contextmanager
def ffn_defers_at_stage_ends() -> Iterator[None]:
    """FFNs leave their all-reduce to the next norm at every PP size; a stage's last one has none.

    Which layer is the last is asked of the whole model, not of the stage.
    """

    def deferring(own: Method) -> Method:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            own(self, *args, **{**kwargs, "reduce_results": False})

        return init

    module = minimax_m3()
    with (
        wrapped(module.MiniMaxM3MLP, "__init__", deferring),
        wrapped(module.MiniMaxM3MoE, "__init__", deferring),
    ):
        yield


CAPTURED_FOR = 8
"""Tokens of the batch for which the fault below takes its decision."""


@contextmanager
def decision_is_frozen() -> Iterator[None]:
    """The MLP decides at its construction, for the batch of a graph's capture, that its output is
    to be reduced by its caller; the caller decides anew in each step, for the batch at hand."""

    def decided(own: Method) -> Method:
        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            self.down_proj.reduce_results = False
            out = torch.as_tensor(own(self, x))
            return all_reduce(out) if x.shape[0] >= CAPTURED_FOR else out

        return forward

    def restored(own: Method) -> Method:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            own(self, *args, **kwargs)
            if kwargs.get("reduce_results") and not is_shared_expert(kwargs):
                self.forward = decided(type(self).forward).__get__(self)

        return init

    with wrapped(minimax_m3().MiniMaxM3MLP, "__init__", restored):
        yield


@contextmanager
def attention_is_not_reduced() -> Iterator[None]:
    """o_proj leaves its all-reduce to the norm after it, which is a plain one."""

    def plain(own: Method) -> Method:
        return lambda hidden, residual, norm: norm(hidden, residual)

    with wrapped(minimax_m3(), FUSED_NORM, plain):
        yield


LACKING = ("reduction missing",)


FAULTS = (
    Fault(
        name="moe-skips-on-a-promise",
        report="sglang#36879, sglang#36884: before the repair",
        mechanism="the experts skip their reduction, and nobody does it for them",
        apply=moe_skips_its_reduction,
        shows=("tp2pp2", "tep2pp2", "tep4pp2"),
        hides=("pp2",),
        kinds=LACKING,
        at=("layers.1.ffn",),
    ),
    Fault(
        name="dense-doubled-by-the-repair",
        report="sglang#36879, sglang#36884: after the repair of the experts alone",
        mechanism="the norm that now reduces for the experts also sums what a dense layer has",
        apply=dense_is_reduced_by_the_repair,
        shows=("tp2pp2", "tp4pp2"),
        hides=("pp2",),
        kinds=("counted too often",),
        at=("layers.0.stream",),
        needs=(("layers", "dmdm"),),
    ),
    Fault(
        name="final-norm-reduces-nothing",
        report="TensorRT-LLM#6850",
        mechanism="the last layer leaves its all-reduce to a next norm that does none",
        apply=final_norm_reduces_nothing,
        shows=("tp2", "tep2", "tp4"),
        hides=("tp1", "tp2pp2"),
        kinds=LACKING,
        at=("layers.1.stream",),
    ),
    Fault(
        name="stage-end-left-unreduced",
        report="vllm#47270; sglang#17823",
        mechanism="a stage's last FFN leaves its all-reduce to the next norm, on another stage",
        apply=ffn_defers_at_stage_ends,
        shows=("tp2pp2", "tep2pp2", "tp4pp2"),
        hides=("pp2", "tp2"),
        kinds=LACKING,
        at=("stage.0.send.hidden_states",),
    ),
    Fault(
        name="aux-taken-before-the-reduction",
        report="vllm#47270, for EAGLE-3's captures",
        mechanism="aux hidden states are taken while the FFN's all-reduce waits for the next norm",
        apply=moe_defers_inside_stages,
        shows=("tp2pp2", "tp4pp2"),
        hides=("pp2",),
        kinds=LACKING,
        at=("stage.0.send.aux_hidden_states_0",),
        needs=(("layers", "mdmd"), ("aux", (1,))),
    ),
    Fault(
        name="reduce-decision-frozen",
        report="vllm-ascend#10557",
        mechanism="an MLP decides for a capture's batch that its caller reduces; the caller, by "
        "the batch at hand, does not",
        apply=decision_is_frozen,
        shows=("tp2pp2", "tp4pp2"),
        hides=("pp2", "tp2"),
        kinds=LACKING,
        at=("layers.0.ffn",),
    ),
    Fault(
        name="attention-left-unreduced",
        report="TensorRT-LLM#6850, for attention",
        mechanism="o_proj leaves its all-reduce to the next norm, which does none",
        apply=attention_is_not_reduced,
        shows=("tp2", "tep4", "tp2pp2"),
        hides=("tp1",),
        kinds=LACKING,
        at=("layers.0.residual",),
    ),
)
