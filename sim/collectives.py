"""The collectives as a table: how sizes must agree, what moves where, and how many bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import agreement, movement
from .calls import Call, nbytes


@dataclass(frozen=True)
class Collective:
    """What a collective is. `calls` are in group order."""

    run: Callable[[Sequence[Call]], None]
    check: Callable[[Sequence[Call]], str | None]
    moved: Callable[[Sequence[Call]], int]
    """Bytes that cross between ranks in all, by the ring algorithm (NCCL's count for its
    bus bandwidth): 2 (R-1) N for all_reduce of N bytes, (R-1) N for the others of N full bytes."""


def _moved_all_reduce(calls: Sequence[Call]) -> int:
    return 2 * (len(calls) - 1) * nbytes(calls[0].inputs)


def _moved_inputs(calls: Sequence[Call]) -> int:
    """(R-1) times what one full operand has: every rank's input goes to all others."""
    return (len(calls) - 1) * sum(nbytes(c.inputs) for c in calls)


def _moved_full(calls: Sequence[Call]) -> int:
    return (len(calls) - 1) * nbytes(calls[0].inputs)


def _moved_to_root(calls: Sequence[Call]) -> int:
    return sum(nbytes(c.inputs) for i, c in enumerate(calls) if i != calls[0].root)


def _moved_from_root(calls: Sequence[Call]) -> int:
    return sum(nbytes(c.outputs) for i, c in enumerate(calls) if i != calls[0].root)


def _moved_exchange(calls: Sequence[Call]) -> int:
    return sum(
        t.numel() * t.element_size()
        for i, c in enumerate(calls)
        for j, t in enumerate(c.inputs[0])
        if i != j
    )


def _moved_splits(calls: Sequence[Call]) -> int:
    total = 0
    for i, call in enumerate(calls):
        tensor = call.inputs[0][0]
        row = tensor[:1].numel() * tensor.element_size()
        total += row * sum(n for j, n in enumerate(call.in_splits or ()) if j != i)
    return total


def _moved_none(calls: Sequence[Call]) -> int:
    return 0


COLLECTIVES: dict[str, Collective] = {
    "all_reduce": Collective(movement.all_reduce, agreement.no_sizes, _moved_all_reduce),
    "reduce": Collective(movement.reduce, agreement.no_sizes, _moved_full),
    "broadcast": Collective(movement.broadcast, agreement.no_sizes, _moved_from_root),
    "all_gather": Collective(movement.all_gather, agreement.gathered, _moved_inputs),
    "all_gather_into_tensor": Collective(
        movement.all_gather_into_tensor, agreement.output_sizes(lambda r: r), _moved_inputs
    ),
    "gather": Collective(movement.all_gather, agreement.gathered, _moved_to_root),
    "scatter": Collective(movement.scatter, agreement.scattered, _moved_from_root),
    "reduce_scatter": Collective(movement.reduce_scatter, agreement.scattered, _moved_full),
    "reduce_scatter_tensor": Collective(
        movement.reduce_scatter_tensor, agreement.output_sizes(lambda r: 1 / r), _moved_full
    ),
    "all_to_all": Collective(movement.all_to_all, agreement.exchange, _moved_exchange),
    "all_to_all_single": Collective(
        movement.all_to_all_single, agreement.splits_match, _moved_splits
    ),
    "barrier": Collective(movement.barrier, agreement.no_sizes, _moved_none),
}
