"""The rules: what a wrong operation looks like, from all ranks' operands.

A rule compares bits, exactly. It says something only where equal bits mean that the tensors are
the same one (`bits.telling`): a value that ranks may reach on their own is never reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from properties.sanitizer import bits
from properties.sanitizer.origins import Origin
from sim.calls import Call

SUMS = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
GATHERS = ("all_gather", "all_gather_into_tensor")
_LISTED = ("reduce_scatter",)
"""Ops whose bucket is one operand in pieces, rather than several operands."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operand of a collective whose bits are equal on all ranks, and are telling."""

    op: str
    is_sum: bool
    size: int
    """R, the number of ranks; at least 2."""
    parts: bits.Parts
    """The operand, the same on all ranks."""
    origin: Origin | None
    """The earlier operation of the group that gave it to all ranks, if there is one."""


@dataclass(frozen=True, kw_only=True)
class Said:
    """What a rule says about an operation."""

    what: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule. At most one rule of the table says something about an operation: the first."""

    name: str
    explanation: str
    says: Callable[[Operation], Said | None] | None = None
    """None for a rule that the operands alone do not decide; see `dropped.py`."""
    by_habit: bool = False
    """Whether one operation alone is too little: it counts only if no operation at this site ever
    had different operands, for ranks may hold the same rows once, by their data."""


def operands(calls: Sequence[Call]) -> list[list[bits.Parts]]:
    """The operands of a collective, each as its parts by rank, in group order."""
    if calls[0].op in _LISTED:
        return [[c.inputs[b] for c in calls] for b in range(len(calls[0].inputs))]
    return [
        [[c.inputs[b][i]] for c in calls]
        for b, bucket in enumerate(calls[0].inputs)
        for i in range(len(bucket))
    ]


def _reduced_again(operation: Operation) -> Said | None:
    origin = operation.origin
    if not operation.is_sum or origin is None or not origin.is_sum:
        return None
    return Said(
        what=f"adds up, {operation.size} times, what {origin} has summed already",
        why=f"the result is {operation.size} x the sum; drop one of the two reductions",
    )


def _equal_addends(operation: Operation) -> Said | None:
    if not operation.is_sum:
        return None
    whole = f"; it is the output of {operation.origin}" if operation.origin else ""
    return Said(
        what=f"every rank adds the same tensor: the result is {operation.size} times it",
        why=f"the input is whole already{whole}. Drop the reduction; where an average is meant, "
        "use op=avg",
    )


def _has_rows(operation: Operation) -> bool:
    """Whether there are rows to tell apart. Shards of one row, or flattened ones as vLLM's stages
    send them, are equal on all ranks when all tokens are, as in a warm-up."""
    tensor = operation.parts[0]
    return tensor.dim() > 1 and len(tensor) > 1


def _gathers_again(operation: Operation) -> Said | None:
    if operation.is_sum or operation.origin is None or not _has_rows(operation):
        return None
    return Said(
        what=f"gathers what {operation.origin} gave to every rank already",
        why=f"the result holds it {operation.size} times over; drop the gather, or gather shards",
    )


def _gathers_whole(operation: Operation) -> Said | None:
    if operation.is_sum or not _has_rows(operation):
        return None
    return Said(
        what=f"every rank gives the same tensor: the result holds it {operation.size} times over",
        why="the input is whole already, and no shard; drop the gather, or gather shards",
    )


DROPPED = Rule(
    name="dropped result",
    explanation="An all-reduce of a contiguous copy of a tensor, which nobody can have read: the "
    "tensor itself stays unreduced.",
)

RULES: tuple[Rule, ...] = (
    Rule(
        name="reduced again",
        explanation="A sum over ranks of what an earlier sum over the same ranks has given to all "
        "of them: the second one multiplies it by their number.",
        says=_reduced_again,
    ),
    Rule(
        name="equal addends",
        explanation="A sum over ranks that all add the same floating-point tensor.",
        says=_equal_addends,
    ),
    Rule(
        name="gathered again",
        explanation="An all-gather of what an earlier operation over the same ranks has given to "
        "all of them.",
        says=_gathers_again,
    ),
    Rule(
        name="gathers what is whole",
        explanation="An all-gather to which all ranks give the same floating-point rows, each "
        "time that it is called.",
        says=_gathers_whole,
        by_habit=True,
    ),
    DROPPED,
)
