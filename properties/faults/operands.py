"""The right parameters, left out of the computation or looked up wrongly (class I)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from properties.faults.fault import Fault
from properties.faults.patches import Method, replaced, wrapped

DECODE = 8
"""Most tokens of the path that leaves the router's bias out."""


def _router() -> Any:
    import vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router as router

    return router


def _experts() -> Any:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    return RoutedExperts


@contextmanager
def bias_left_out_of_short_batches() -> Iterator[None]:
    """The path for few tokens passes zeros for the router's bias."""

    def without(own: Method) -> Method:
        def topk(*args: Any) -> Any:
            weights, ids, slots, logits, renormalise, bias, *rest = args
            if len(logits) <= DECODE:
                bias = torch.zeros_like(bias)
            return own(weights, ids, slots, logits, renormalise, bias, *rest)

        return topk

    with wrapped(_router(), "vllm_topk_sigmoid", without):
        yield


@contextmanager
def routed_scaling_left_out() -> Iterator[None]:
    """The router's weights are not scaled, and nobody else scales the experts' output."""

    def unscaled(own: Method) -> Method:
        return lambda *args: own(*args[:6], 1.0)

    with wrapped(_router(), "vllm_topk_sigmoid", unscaled):
        yield


@contextmanager
def expert_map_off_by_one() -> Iterator[None]:
    """At run time, experts are looked up under the next one's number."""
    own = _experts().expert_map

    def shifted(self: Any) -> Tensor | None:
        mapped = own.fget(self)
        return None if mapped is None else torch.as_tensor(mapped.roll(1))

    with replaced(_experts(), "expert_map", property(shifted)):
        yield


FAULTS: tuple[Fault, ...] = (
    Fault(
        name="router-bias-left-out",
        report="tt-metal#52698",
        mechanism="the path for few tokens leaves the router's bias out of the choice of experts",
        apply=bias_left_out_of_short_batches,
        shows=("tp1", "tp2", "tep4pp2"),
        kinds=("wrong experts",),
        at=("layers.1.experts_chosen",),
    ),
    Fault(
        name="routed-scaling-left-out",
        report="of this project",
        mechanism="the routed experts' output is not multiplied by the model's factor",
        apply=routed_scaling_left_out,
        shows=("tp1", "tep4pp2"),
        kinds=("scaled",),
        at=("layers.1.ffn",),
    ),
    Fault(
        name="expert-map-off-by-one",
        report="of this project",
        mechanism="at run time an expert is looked up under the next one's number",
        apply=expert_map_off_by_one,
        shows=("tep2", "tep4pp2"),
        hides=("tp1", "tp2"),
        kinds=("has an expert in the wrong slot",),
        at=("layers.1.block_sparse_moe.experts", "layers.1.ffn"),
        limits="no check compares the map in use with the slots as they were loaded",
    ),
)
