"""Aux hidden states over stages: lost, or taken at the wrong layer (class E)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from properties.faults.fault import Fault
from properties.faults.patches import (
    Method,
    all_reduce,
    minimax_m3,
    replaced,
    tp_size,
    wrapped,
)

Tensors = dict[str, torch.Tensor]


def _captured(change: Any) -> Any:
    """A patch of the hook that takes a layer's aux hidden state: (model, taken, id, hidden,
    residual) to the arguments that vLLM's own gets in their place."""

    def changed(own: Method) -> Method:
        return lambda self, *args: own(self, *change(self, *args))

    return wrapped(minimax_m3().MiniMaxM3Model, "_maybe_add_hidden_state", changed)


@contextmanager
def earlier_aux_dropped() -> Iterator[None]:
    """Only the last stage's aux hidden states are looked for: the others take none."""

    def last_only(own: Method) -> Method:
        def pack(self: Any, aux: list[torch.Tensor]) -> Tensors:
            return {}

        return pack

    with wrapped(minimax_m3().MiniMaxM3Model, "pack_local_aux_hidden_states", last_only):
        yield


@contextmanager
def relay_forgotten() -> Iterator[None]:
    """A stage in the middle hands on its own aux hidden states, and not those it received."""
    from vllm.v1.worker.gpu.pp_utils import PPHandler

    def own_only(self: Any, received: Any, output: Any) -> Any:
        return output

    with replaced(PPHandler, "relay_aux_hidden_states", own_only):
        yield


@contextmanager
def slots_start_at_zero() -> Iterator[None]:
    """Every stage numbers its aux hidden states from 0: those of two stages have one name."""

    def from_zero(own: Method) -> Method:
        def pack(self: Any, aux: list[torch.Tensor]) -> Tensors:
            return {f"{self.AUX_HIDDEN_STATE_KEY}{i}": value for i, value in enumerate(aux)}

        return pack

    with wrapped(minimax_m3().MiniMaxM3Model, "pack_local_aux_hidden_states", from_zero):
        yield


@contextmanager
def local_index_compared() -> Iterator[None]:
    """Each stage counts its layers from 0, and compares that with the ids of the whole model."""
    with _captured(lambda self, aux, i, *stream: (aux, i - self.start_layer, *stream)):
        yield


@contextmanager
def one_layer_late() -> Iterator[None]:
    """Id k is taken after layer k, where it stands for the stream before it."""

    def late(self: Any, aux: Any, i: int, *stream: Any) -> tuple[Any, ...]:
        return (aux, i - 1, *stream)

    with _captured(late):
        yield


@contextmanager
def residual_forgotten() -> Iterator[None]:
    """The hidden states alone are taken, without the residual they are still to be added to."""
    with _captured(lambda self, aux, i, hidden, residual: (aux, i, hidden.clone(), None)):
        yield


@contextmanager
def first_taken_twice() -> Iterator[None]:
    """A stage takes the stream on entry too, which the stage before has taken on exit. The drafter
    reads as many as it asked for, from the front."""

    def entry(own: Method) -> Method:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            output = own(self, *args, **kwargs)
            if self.start_layer == 0 or not isinstance(output, tuple):
                return output
            hidden, aux = output
            return hidden, [aux[0], *aux][: len(aux)]

        return forward

    with wrapped(minimax_m3().MiniMaxM3Model, "forward", entry):
        yield


@contextmanager
def every_rank_adds_its_aux() -> Iterator[None]:
    """Aux hidden states, whole on every rank, are all-reduced on their way to the drafter."""

    def summed(own: Method) -> Method:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            output = own(self, *args, **kwargs)
            if not isinstance(output, tuple):
                return output
            return output[0], [all_reduce(value) if tp_size() > 1 else value for value in output[1]]

        return forward

    with wrapped(minimax_m3().MiniMaxM3Model, "forward", summed):
        yield


STAGE = ("layers", "dmd")


def _aux(*ids: int) -> tuple[str, object]:
    return ("aux", ids)


FAULTS = (
    Fault(
        name="aux-of-earlier-stages-dropped",
        report="vllm#45985; vllm-rbln#1007",
        mechanism="stages before the last one do not hand on what they captured",
        apply=earlier_aux_dropped,
        shows=("pp2", "tp2pp2"),
        hides=("tp1",),
        kinds=("rank_failed", "not computed"),
        at=("aux_hidden_states_0",),
        needs=(_aux(1, 2),),
    ),
    Fault(
        name="aux-relay-forgotten",
        report="vllm#45985, for the stages in the middle",
        mechanism="a stage in the middle does not pass on the aux hidden states that it received",
        apply=relay_forgotten,
        shows=("pp3", "tp2pp3"),
        hides=("pp2", "tp2pp2"),
        kinds=("rank_failed", "not computed"),
        at=("aux_hidden_states_0",),
        needs=(STAGE, _aux(1)),
    ),
    Fault(
        name="aux-slots-start-at-zero",
        report="found in design",
        mechanism="a stage in the middle gives its aux hidden states the names of earlier ones",
        apply=slots_start_at_zero,
        shows=("pp3", "tp2pp3"),
        hides=("pp2", "tp2pp2"),
        kinds=("rank_failed", "not computed"),
        at=("aux_hidden_states_1",),
        needs=(STAGE, _aux(1, 2)),
    ),
    Fault(
        name="aux-by-local-index",
        report="vllm#36731",
        mechanism="a stage's own count of its layers is compared with ids of the whole model",
        apply=local_index_compared,
        shows=("pp2", "tp2pp2"),
        hides=("tp1",),
        # Where the ids do not happen to be as many, the stages disagree on how many there are.
        kinds=("stale", "rank_failed"),
        at=("aux.4", "aux_hidden_states_", "zip()"),
        needs=(("layers", "dmdm"), _aux(1, 4)),
    ),
    Fault(
        name="aux-one-layer-late",
        report="vllm#36731, by one",
        mechanism="aux hidden state k is the stream after layer k instead of before it",
        apply=one_layer_late,
        shows=("tp1", "pp2"),
        kinds=("stale", "rank_failed"),
        at=("aux.1", "aux_hidden_states_0", "zip()"),
        needs=(STAGE, _aux(1)),
    ),
    Fault(
        name="aux-without-residual",
        report="found in design",
        mechanism="an aux hidden state is taken without the residual",
        apply=residual_forgotten,
        shows=("tp1", "tp2pp2"),
        kinds=("part missing", "stale"),
        at=("aux.1", "stage.0.send.aux_hidden_states_0"),
        needs=(STAGE, _aux(1)),
    ),
    Fault(
        name="aux-taken-twice",
        report="found in design",
        mechanism="a later stage takes again what the stage before has taken, and the last is cut",
        apply=first_taken_twice,
        shows=("pp2", "tp2pp2"),
        hides=("tp1",),
        kinds=("stale",),
        at=("aux.2",),
        needs=(_aux(1, 2),),
    ),
    Fault(
        name="aux-reduced-again",
        report="sglang#37199, for aux hidden states",
        mechanism="aux hidden states that every rank has whole are summed over the ranks",
        apply=every_rank_adds_its_aux,
        shows=("tp2pp2", "tp4pp2"),
        hides=("tp1", "pp2"),
        kinds=("counted too often", "equal addends"),
        at=("aux.1", "all_reduce"),
        needs=(_aux(1),),
    ),
)
