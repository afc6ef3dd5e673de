"""Memory that is shared or written over while somebody still needs it (class H)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from properties.faults.fault import Fault
from properties.faults.patches import MEGA, Method, minimax_m3, moe_runner, wrapped


@contextmanager
def experts_write_over_their_input() -> Iterator[None]:
    """The routed experts work in place, and the shared expert reads its input after them."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExpertsOrder

    def in_place(own: Method) -> Method:
        def forward_modular(self: Any, x: Tensor, **kwargs: Any) -> Tensor:
            shared, given = kwargs["shared_experts"], kwargs["shared_experts_input"]
            x.copy_(own(self, x=x, **kwargs))
            if shared is not None:
                shared(given, SharedExpertsOrder.NO_OVERLAP)
            return x.clone()

        return forward_modular

    def not_yet(own: Method) -> Method:
        return lambda self, given, order: None

    with (
        wrapped(RoutedExperts, "forward_modular", in_place),
        wrapped(moe_runner(), "_maybe_apply_shared_experts", not_yet),
    ):
        yield


@contextmanager
def aux_shares_the_residual() -> Iterator[None]:
    """An aux hidden state is the residual itself, which the next norm completes in place; the
    norm after that adds to it again."""

    def sharing(own: Method) -> Method:
        def capture(
            self: Any, aux: list[Tensor], layer: int, hidden: Tensor, residual: Tensor | None
        ) -> list[Tensor]:
            if residual is not None and layer in self.aux_hidden_state_layers:
                aux.append(residual)
                return aux
            own(self, aux, layer, hidden, residual)
            return aux

        return capture

    with wrapped(minimax_m3().MiniMaxM3Model, "_maybe_add_hidden_state", sharing):
        yield


@contextmanager
def entry_aux_is_not_copied() -> Iterator[None]:
    """The aux hidden state of the model's input is the tensor that becomes the residual."""

    def sharing(own: Method) -> Method:
        def capture(
            self: Any, aux: list[Tensor], layer: int, hidden: Tensor, residual: Tensor | None
        ) -> list[Tensor]:
            if layer == self.start_layer and layer in self.aux_hidden_state_layers:
                # vLLM copies what is in the list when this returns, so it goes in later.
                self.entry_aux = hidden
                return aux
            if "entry_aux" in self.__dict__:
                aux.insert(0, self.__dict__.pop("entry_aux"))
            own(self, aux, layer, hidden, residual)
            return aux

        return capture

    with wrapped(minimax_m3().MiniMaxM3Model, "_maybe_add_hidden_state", sharing):
        yield


@contextmanager
def dense_ffn_writes_over_its_residual() -> Iterator[None]:
    """A layer's FFN writes its output into the buffer of the norm's other output."""

    def reusing(own: Method) -> Method:
        def forward(self: Any, positions: Tensor, hidden_states: Tensor, residual: Any) -> Any:
            hidden_states, residual = own(self, positions, hidden_states, residual)
            if not self.is_moe_layer:
                residual.copy_(hidden_states)
                return residual, residual
            return hidden_states, residual

        return forward

    with wrapped(minimax_m3().MiniMaxM3DecoderLayer, "forward", reusing):
        yield


@contextmanager
def gate_scales_in_place() -> Iterator[None]:
    """The router normalises its input in place, and the experts read it afterwards."""

    def in_place(own: Method) -> Method:
        def forward(self: Any, hidden_states: Tensor) -> Any:
            self.gate.register_forward_pre_hook(_halve)
            return own(self, hidden_states)

        return forward

    with wrapped(minimax_m3().MiniMaxM3MoE, "forward", in_place):
        yield


def _halve(module: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
    args[0].div_(args[0].norm(dim=-1, keepdim=True))


FAULTS: tuple[Fault, ...] = (
    Fault(
        name="experts-write-over-their-input",
        report="vllm#28942",
        mechanism="routed experts write over the hidden states before the shared expert reads them",
        apply=experts_write_over_their_input,
        shows=("tp1", "tp8", "tep2pp2"),
        kinds=("overwritten",),
        at=("layers.1",),
    ),
    Fault(
        name="aux-shares-the-residual",
        report="sglang#39286",
        mechanism="an aux hidden state shares its storage with the residual, which later norms "
        "update in place",
        apply=aux_shares_the_residual,
        shows=("tep2", "tep4"),
        kinds=("overwritten", "stale"),
        at=("aux.1",),
        needs=(MEGA, ("aux", (1,))),
    ),
    Fault(
        name="entry-aux-is-not-copied",
        report="sglang#39286, at the model's input",
        mechanism="the aux hidden state of the model's input is not copied, and becomes the "
        "residual",
        apply=entry_aux_is_not_copied,
        shows=("tep2", "tp2pp2", "tep2pp2"),
        kinds=("overwritten", "stale"),
        at=("aux.0", "send.aux_hidden_states_0"),
        needs=(("aux", (0,)),),
        limits="aliasing sees it under the next id, and the oracle only that the value is another",
    ),
    Fault(
        name="ffn-writes-over-the-residual",
        report="of this project: one buffer for both outputs of a layer",
        mechanism="a dense layer's FFN output takes the residual's buffer",
        apply=dense_ffn_writes_over_its_residual,
        shows=("tp2pp2", "tp4pp2"),
        kinds=("overwritten", "stale"),
        at=("stage.0.send.residual",),
    ),
    Fault(
        name="router-scales-in-place",
        report="vllm#28942, by the router",
        mechanism="the router normalises its input in place, and the experts read it after that",
        apply=gate_scales_in_place,
        shows=("tp1", "tep2pp2"),
        kinds=("overwritten",),
        at=("layers.1",),
    ),
)
