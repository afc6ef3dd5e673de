"""What a stage hands on: shards sent as wholes, stale or crossed tensors, cuts (class D)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from properties.faults.fault import Fault
from properties.faults.patches import (
    MEGA,
    Method,
    minimax_m3,
    overlay_model,
    wrapped,
)

STREAM = ("hidden_states", "residual")

Tensors = dict[str, torch.Tensor]


@contextmanager
def residual_sent_as_shards() -> Iterator[None]:
    """The residual stays sharded on exit and on entry; between them every rank sends its slice of
    its own shard, and the receivers gather slices of different tensors."""

    def exit_(own: Method) -> Method:
        def gather(self: Any, outputs: Mapping[str, torch.Tensor], tokens: int) -> Tensors:
            others = {name: shard for name, shard in outputs.items() if name != "residual"}
            return {**own(self, others, tokens), "residual": outputs["residual"]}

        return gather

    def entry(own: Method) -> Method:
        def shard(self: Any, received: Mapping[str, torch.Tensor]) -> Tensors:
            return {**own(self, received), "residual": received["residual"]}

        return shard

    model = overlay_model()
    with (
        wrapped(model, "gather_stage_outputs", exit_),
        wrapped(model, "shard_on_entry", entry),
    ):
        yield


@contextmanager
def last_layer_by_global_index() -> Iterator[None]:
    """The gather on exit is left to the model's last layer, which is on another stage: the others
    exit with shards."""

    def only_last(own: Method) -> Method:
        def gather(self: Any, outputs: Mapping[str, torch.Tensor], tokens: int) -> Tensors:
            last = self.end_layer == len(self.layers)
            return dict(own(self, outputs, tokens) if last else outputs)

        return gather

    with wrapped(overlay_model(), "gather_stage_outputs", only_last):
        yield


def _sent(change: Callable[[Any, Tensors], Tensors]) -> Any:
    """A patch that changes what a stage hands on."""

    def changed(own: Method) -> Method:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            output = own(self, *args, **kwargs)
            if hasattr(output, "tensors"):
                return type(output)(change(self, output.tensors))
            return output

        return forward

    return wrapped(minimax_m3().MiniMaxM3Model, "forward", changed)


@contextmanager
def residual_merged_and_sent() -> Iterator[None]:
    """A stage adds the residual to the hidden states before it sends them, and sends it as well."""

    def merged(self: Any, outputs: Tensors) -> Tensors:
        return {**outputs, "hidden_states": outputs["hidden_states"] + outputs["residual"]}

    with _sent(merged):
        yield


@contextmanager
def parts_sent_crosswise() -> Iterator[None]:
    """A stage packs hidden states and residual in one order, and the next unpacks in another."""

    def crossed(self: Any, outputs: Tensors) -> Tensors:
        hidden, residual = (outputs[name] for name in STREAM)
        return {**outputs, "hidden_states": residual, "residual": hidden}

    with _sent(crossed):
        yield


@contextmanager
def stale_residual_sent() -> Iterator[None]:
    """A stage sends the residual from before its last layer."""

    def kept(own: Method) -> Method:
        def forward(self: Any, positions: Any, hidden: torch.Tensor, residual: Any) -> Any:
            # With no residual yet, the first layer makes the hidden states its residual.
            self.before = (hidden if residual is None else hidden + residual).clone()
            return own(self, positions, hidden, residual)

        return forward

    def stale(self: Any, outputs: Tensors) -> Tensors:
        before = getattr(self.layers[self.end_layer - 1], "before", None)
        return dict(outputs) if before is None else {**outputs, "residual": before}

    with wrapped(minimax_m3().MiniMaxM3DecoderLayer, "forward", kept), _sent(stale):
        yield


def _cut(shift: Callable[[int, int], tuple[int, int]]) -> Any:
    """A patch of the layers that the stages after the first have: [start, end)."""
    from vllm.distributed import utils

    def shifted(own: Method) -> Method:
        def indices(layers: int, stage: int, stages: int) -> tuple[int, int]:
            start, end = own(layers, stage, stages)
            return shift(start, end) if stage else (start, end)

        return indices

    return wrapped(utils, "get_pp_indices", shifted)


@contextmanager
def layer_skipped_at_a_cut() -> Iterator[None]:
    """Stages after the first start one layer too late: the layer at the cut is on none."""
    with _cut(lambda start, end: (start + 1, end)):
        yield


@contextmanager
def layer_doubled_at_a_cut() -> Iterator[None]:
    """Stages after the first start one layer too early: the layer at the cut runs twice."""
    with _cut(lambda start, end: (start - 1, end)):
        yield


FAULTS = (
    Fault(
        name="residual-sent-as-shards",
        report="vllm#24021; sglang#33280",
        mechanism="ranks send slices of their own residual shards, which the receivers gather",
        apply=residual_sent_as_shards,
        shows=("tep2pp2", "tep4pp2"),
        hides=("tep2", "tep1"),
        kinds=("gather missing",),
        at=("stage.0.send.residual",),
        needs=(MEGA,),
    ),
    Fault(
        name="last-layer-by-global-index",
        report="sglang#17823",
        mechanism="only the model's last layer gathers, so other stages exit with shards",
        apply=last_layer_by_global_index,
        shows=("tep2pp2", "tep4pp2"),
        hides=("tep2", "tep1"),
        kinds=("gather missing",),
        at=("stage.0.send.",),
        needs=(MEGA,),
    ),
    Fault(
        name="residual-merged-and-sent",
        report="vllm-ascend#9473, on exit",
        mechanism="a stage adds the residual to what it sends, and sends it too",
        apply=residual_merged_and_sent,
        shows=("pp2", "tp2pp2"),
        hides=("tp1", "tp2"),
        kinds=("counted too often",),
        at=("stage.0.send.hidden_states",),
    ),
    Fault(
        name="stream-parts-crossed",
        report="sglang#20834, sglang#30015",
        mechanism="hidden states and residual are packed and unpacked in different orders",
        apply=parts_sent_crosswise,
        shows=("pp2", "tp2pp2"),
        hides=("tp1", "tp2"),
        kinds=("stale",),
        at=("stage.0.send.hidden_states",),
    ),
    Fault(
        name="stale-residual-sent",
        report="found in design",
        mechanism="a stage sends the residual from before its last layer",
        apply=stale_residual_sent,
        shows=("pp2", "tp2pp2"),
        hides=("tp1", "tp2"),
        kinds=("stale",),
        at=("stage.0.send.residual",),
    ),
    Fault(
        name="layer-skipped-at-a-cut",
        report="found in design",
        mechanism="the layer at a stage boundary is on neither stage",
        apply=layer_skipped_at_a_cut,
        shows=("pp2", "tp2pp2"),
        hides=("tp1", "tp2"),
        kinds=("not computed", "is not loaded"),
        at=("layers.2.",),
        needs=(("layers", "dmdm"),),
    ),
    Fault(
        name="layer-doubled-at-a-cut",
        report="found in design",
        mechanism="the layer at a stage boundary is on both stages",
        apply=layer_doubled_at_a_cut,
        shows=("pp2", "tp2pp2"),
        hides=("tp1", "tp2"),
        kinds=("is loaded by another stage",),
        at=("layers.1.",),
        needs=(("layers", "dmdm"),),
    ),
)
