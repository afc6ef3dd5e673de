"""Counted too often in the experts: sums of what is summed or whole already (class A)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from properties.faults.fault import Fault
from properties.faults.patches import (
    Method,
    all_reduce,
    is_shared_expert,
    minimax_m3,
    moe_runner,
    own_layers,
    runs_experts,
    when_built,
    wrapped,
)


@contextmanager
def model_reduces_moe_again() -> Iterator[None]:
    """The runner reduces inside; the model's own block, written for one that does not, again."""

    def again(own: Method) -> Method:
        def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
            out = own(self, hidden_states)
            return out if self.experts.moe_config.skip_final_all_reduce else all_reduce(out)

        return forward

    with wrapped(minimax_m3().MiniMaxM3MoE, "forward", again):
        yield


@contextmanager
def experts_reduce_what_the_norm_reduces() -> Iterator[None]:
    """The experts all-reduce, although their reduction was left to the next layer's norm."""

    def anyway(own: Method) -> Method:
        def reduce(self: Any, states: torch.Tensor, *args: Any) -> torch.Tensor:
            out = torch.as_tensor(own(self, states, *args))
            return all_reduce(out) if self.moe_config.skip_final_all_reduce else out

        return reduce

    with wrapped(moe_runner(), "_maybe_reduce_final_output", anyway):
        yield


@contextmanager
def shared_expert_reduces_first() -> Iterator[None]:
    """The shared expert's down_proj all-reduces; the runner then sums it with the routed part."""

    def reducing(own: Method) -> Method:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            if is_shared_expert(kwargs):
                kwargs["reduce_results"] = True
            own(self, *args, **kwargs)

        return init

    with wrapped(minimax_m3().MiniMaxM3MLP, "__init__", reducing):
        yield


@contextmanager
def shared_expert_is_replicated() -> Iterator[None]:
    """The shared expert has whole weights on every rank; its output joins the routed partial."""

    def whole(own: Method) -> Method:
        from model.megamoe.block import MiniMaxM3ReplicatedMLP

        def build(*args: Any, **kwargs: Any) -> Any:
            if not is_shared_expert(kwargs):
                return own(*args, **kwargs)
            kwargs.pop("reduce_results")
            return MiniMaxM3ReplicatedMLP(*args, **kwargs)

        return build

    with wrapped(minimax_m3(), "MiniMaxM3MLP", whole):
        yield


@contextmanager
def residual_joins_the_moe_sum() -> Iterator[None]:
    """Every rank adds the residual to its experts' addend before the all-reduce."""

    def remember(backbone: Any) -> None:
        for layer in filter(runs_experts, own_layers(backbone)):
            runner = layer.block_sparse_moe.experts

            def keep(norm: Any, inputs: Any, output: Any, runner: Any = runner) -> None:
                runner.residual_before = output[1]

            layer.post_attention_layernorm.register_forward_hook(keep)

    def joined(own: Method) -> Method:
        return lambda self, states, *args: own(self, states + self.residual_before, *args)

    def added(own: Method) -> Method:
        def forward(self: Any, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
            hidden, residual = own(self, *args)
            return hidden, torch.zeros_like(residual) if runs_experts(self) else residual

        return forward

    layer = minimax_m3().MiniMaxM3DecoderLayer
    with (
        when_built(remember),
        wrapped(layer, "forward", added),
        wrapped(moe_runner(), "_maybe_reduce_final_output", joined),
    ):
        yield


TWO_BATCHES = 4
"""Tokens from which the fault below splits a batch in two."""


@contextmanager
def overlap_scales_again() -> Iterator[None]:
    """The router has scaled its weights; the path for two overlapping batches scales the output."""

    def scaled(own: Method) -> Method:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            shared, routed = own(self, *args, **kwargs)
            if routed.shape[0] >= TWO_BATCHES:
                routed = routed * self.router.routed_scaling_factor
            return shared, routed

        return run

    with wrapped(moe_runner(), "_apply_quant_method", scaled):
        yield


OFTEN = ("counted too often",)

WHOLE = "has the wrong part"
"""What weights say that are whole where a rank should have a shard."""


FAULTS = (
    Fault(
        name="moe-reduced-by-model-again",
        report="vllm-ascend#10443; sglang#23431",
        mechanism="the MoE runner all-reduces inside, and the model's block all-reduces its output",
        apply=model_reduces_moe_again,
        shows=("tp2pp2", "tep2pp2", "tp4pp2"),
        hides=("pp2", "tp2"),
        kinds=OFTEN,
        at=("layers.1.ffn",),
    ),
    Fault(
        name="moe-reduced-before-the-norm-does",
        report="sglang#23731",
        mechanism="the experts all-reduce although the next layer's norm does so for them",
        apply=experts_reduce_what_the_norm_reduces,
        shows=("tp2", "tep2", "tep4"),
        hides=("tp1", "tp2pp2"),
        kinds=OFTEN,
        at=("layers.1.ffn",),
    ),
    Fault(
        name="shared-expert-reduced-first",
        report="vllm#49366, vllm#49122",
        mechanism="the shared expert reduces its output, which is then summed with the routed one",
        apply=shared_expert_reduces_first,
        shows=("tp2", "tp2pp2", "tep4"),
        hides=("tp1", "pp2"),
        kinds=OFTEN,
        at=("layers.1.ffn",),
    ),
    Fault(
        name="shared-expert-replicated",
        report="TensorRT-LLM#15922; sglang#35535",
        mechanism="a shared expert with whole weights on every rank joins a sum over the ranks",
        apply=shared_expert_is_replicated,
        shows=("tp2", "tp2pp2", "tep4"),
        hides=("tp1", "pp2"),
        kinds=(*OFTEN, WHOLE),
        at=("layers.1.ffn", "layers.1.block_sparse_moe.shared_experts"),
    ),
    Fault(
        name="residual-in-the-moe-sum",
        report="mirage#722",
        mechanism="every rank adds the residual before the experts' all-reduce",
        apply=residual_joins_the_moe_sum,
        shows=("tp2pp2", "tep4pp2"),
        kinds=OFTEN,
        at=("layers.1.ffn",),
    ),
    Fault(
        name="routed-scaling-twice-in-overlap",
        report="vllm#45037, vllm#24119; sglang#35152",
        mechanism="batches of four or more tokens get the routed scaling factor a second time",
        apply=overlap_scales_again,
        shows=("tp1", "tp2", "tp2pp2"),
        kinds=("counted too often", "scaled"),
        at=("layers.1.ffn",),
    ),
)
