"""What a stage makes of what it received: buffers not filled or too small, entry work (class D)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from properties.faults.fault import Fault
from properties.faults.patches import (
    Method,
    coordinator,
    minimax_m3,
    tp_size,
    wrapped,
)

Tensors = dict[str, torch.Tensor]


def _received(change: Callable[[Any, Tensors], Tensors]) -> Any:
    """A patch that changes what a stage has received."""

    def received(own: Method) -> Method:
        def receive(self: Any, *args: Any, **kwargs: Any) -> Tensors:
            return change(self, own(self, *args, **kwargs))

        return receive

    return wrapped(coordinator(), "recv_tensor_dict", received)


@contextmanager
def buffers_sized_by_shards() -> Iterator[None]:
    """Receive buffers are sized by a rank's share of the tokens, though a stage sends them all."""

    def cut(self: Any, received: Tensors) -> Tensors:
        share = {name: -(-len(value) // tp_size()) for name, value in received.items()}
        return {name: value[: share[name]].clone() for name, value in received.items()}

    with _received(cut):
        yield


@contextmanager
def buffers_never_filled() -> Iterator[None]:
    """A stage runs on its persistent buffers, into which nobody copies what has arrived."""

    def unfilled(self: Any, received: Tensors) -> Tensors:
        return {name: torch.zeros_like(value) for name, value in received.items()}

    with _received(unfilled):
        yield


@contextmanager
def residual_buffer_filled_in_part() -> Iterator[None]:
    """Of the stream's two parts only the hidden states are copied into the persistent buffers."""

    def unfilled(self: Any, received: Tensors) -> Tensors:
        return {**received, "residual": torch.zeros_like(received["residual"])}

    with _received(unfilled):
        yield


@contextmanager
def one_row_fills_the_buffer() -> Iterator[None]:
    """A sharded tensor's first row is copied into the receive buffer, and is broadcast to all."""

    def spread(self: Any, received: Tensors) -> Tensors:
        return {name: value[:1].expand_as(value).clone() for name, value in received.items()}

    with _received(spread):
        yield


@contextmanager
def residual_left_behind() -> Iterator[None]:
    """Entry work is done at every stage: each starts with no residual, as the first one does."""

    def emptied(own: Method) -> Method:
        def forward(self: Any, ids: Any, positions: Any, received: Any, *rest: Any) -> Any:
            if received is not None:
                received["residual"].zero_()
            return own(self, ids, positions, received, *rest)

        return forward

    with wrapped(minimax_m3().MiniMaxM3Model, "forward", emptied):
        yield


@contextmanager
def positions_restart() -> Iterator[None]:
    """Later stages number the tokens from 0 in every rank's share of them."""

    def numbered(own: Method) -> Method:
        def forward(self: Any, ids: Any, positions: torch.Tensor, received: Any, *rest: Any) -> Any:
            if received is not None:
                positions = positions % max(1, -(-len(positions) // tp_size()))
            return own(self, ids, positions, received, *rest)

        return forward

    with wrapped(minimax_m3().MiniMaxM3Model, "forward", numbered):
        yield


FAULTS = (
    Fault(
        name="receive-buffers-sized-by-shards",
        report="sglang#36095",
        mechanism="receive buffers have a rank's share of the rows, and the rest is cut off",
        apply=buffers_sized_by_shards,
        shows=("tep2pp2", "tp2pp2", "tep4pp2"),
        hides=("tp2", "pp2"),
        kinds=("rows lost", "wrong shape"),
        at=("stage.1.recv.",),
    ),
    Fault(
        name="receive-buffers-never-filled",
        report="vllm#13417",
        mechanism="a stage runs on persistent buffers into which nothing received is copied",
        apply=buffers_never_filled,
        shows=("pp2", "tp2pp2", "tep2pp2"),
        hides=("tp1", "tp2"),
        kinds=("rows lost",),
        at=("stage.1.recv.hidden_states",),
    ),
    Fault(
        name="receive-buffers-filled-in-part",
        report="vllm#13417, for one of the stream's parts",
        mechanism="the hidden states are copied into a stage's buffers, and the residual is not",
        apply=residual_buffer_filled_in_part,
        shows=("pp2", "tp2pp2"),
        hides=("tp1", "tp2"),
        kinds=("rows lost",),
        at=("stage.1.recv.residual",),
    ),
    Fault(
        name="one-row-fills-the-buffer",
        report="found in design: a copy of one row into many broadcasts silently",
        mechanism="one received row is broadcast over all rows of the receive buffer",
        apply=one_row_fills_the_buffer,
        shows=("pp2", "tp2pp2"),
        hides=("tp1", "tp2"),
        kinds=("rows duplicated",),
        at=("stage.1.recv.",),
    ),
    Fault(
        name="entry-work-at-every-stage",
        report="vllm-ascend#9473",
        mechanism="each stage starts without a residual, as only the first one may",
        apply=residual_left_behind,
        shows=("pp2", "tp2pp2"),
        hides=("tp1", "tp2"),
        kinds=("part missing",),
        at=("layers.0.stream",),
    ),
    Fault(
        name="positions-restart-at-a-stage",
        report="found in design",
        mechanism="later stages number a sequence's tokens from 0 in every rank's share of them",
        apply=positions_restart,
        shows=("tp2pp2", "tp4pp2"),
        hides=("pp2", "tp2"),
        kinds=("wrong values",),
        at=("layers.1.attn",),
    ),
)
