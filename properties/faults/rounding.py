"""Differences as small as rounding, which no bound sees and which are bugs all the same: ranks that
drift apart, stages that round what they pass on, rows that depend on their batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from properties.faults.fault import Fault
from properties.faults.patches import Method, coordinator, minimax_m3, wrapped

STEPS = 2.0**22
"""Steps of the quantisation from zero to the largest value: about as fine as float32 is there."""


@contextmanager
def summed_in_own_order() -> Iterator[None]:
    """An all-reduce that gathers and adds up, beginning with the rank's own addend."""

    def rotated(own: Method) -> Method:
        def all_reduce(self: Any, value: torch.Tensor) -> torch.Tensor:
            if self.world_size == 1:
                return value
            parts = self.all_gather(value.unsqueeze(0), dim=0)
            order = [(self.rank_in_group + i) % self.world_size for i in range(self.world_size)]
            total: torch.Tensor = parts[order[0]].clone()
            for i in order[1:]:
                total += parts[i]
            return total

        return all_reduce

    with wrapped(coordinator(), "all_reduce", rotated):
        yield


@contextmanager
def sent_in_single_precision() -> Iterator[None]:
    """A stage sends its outputs in float32, and the next one widens them again."""

    def narrow(own: Method) -> Method:
        def send(self: Any, tensors: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
            return own(self, {n: t.float() for n, t in tensors.items()}, *args, **kwargs)

        return send

    def widen(own: Method) -> Method:
        def receive(self: Any, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
            return {n: t.double() for n, t in own(self, *args, **kwargs).items()}

        return receive

    with (
        wrapped(coordinator(), "send_tensor_dict", narrow),
        wrapped(coordinator(), "recv_tensor_dict", widen),
    ):
        yield


@contextmanager
def scaled_by_the_batch() -> Iterator[None]:
    """The dense FFN quantises its input with one scale, that of the batch's largest value."""

    def quantised(own: Method) -> Method:
        def forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if x.numel():
                step = x.abs().max() / STEPS
                x = torch.where(step > 0, (x / step).round() * step, x)
            out: torch.Tensor = own(self, x, *args, **kwargs)
            return out

        return forward

    with wrapped(minimax_m3().MiniMaxM3MLP, "forward", quantised):
        yield


FAULTS = (
    Fault(
        name="ranks-sum-in-their-own-order",
        report="found in design: an all-reduce must give all ranks the same bits",
        mechanism="each rank adds up the gathered addends beginning with its own, so that TP ranks "
        "differ in the last bits",
        apply=summed_in_own_order,
        shows=("tp4", "tp4pp2"),
        hides=("tp1", "tp2"),
        kinds=("ranks differ",),
        at=("embed", "layers.0"),
    ),
    Fault(
        name="stage-sends-narrowed",
        report="S1-6: stages change no bit",
        mechanism="a stage boundary rounds to a narrower dtype on its way, and widens it again",
        apply=sent_in_single_precision,
        shows=("pp2", "tp2pp2"),
        hides=("tp2",),
        kinds=("not as sent",),
        at=("stage.1.recv.",),
        needs=(("dtype", "float64"),),
    ),
    Fault(
        name="one-scale-for-the-batch",
        report="Megatron-Bridge#4635: logits move when only others' inputs change",
        mechanism="a dynamic quantisation takes one scale of the whole batch, so that a row's "
        "rounding depends on other rows",
        apply=scaled_by_the_batch,
        shows=("tp1", "tp2pp2"),
        kinds=("depends on other rows",),
        at=("layers.0.ffn",),
        needs=(("relation", "tokens changed"), ("layers", "ddm")),
    ),
)
