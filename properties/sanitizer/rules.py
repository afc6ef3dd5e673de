"""The rules: what a wrong operation looks like, from all ranks' operands.

A rule compares bits, exactly. It says something only where equal bits mean that the tensors are
the same one (`bits.telling`): a value that ranks may reach on their own is never reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from properties.sanitizer import bits, intent
from properties.sanitizer.origins import Origin
from sim.calls import Call
from sim.callsite import Frame
from sim.reduction import reduce_tensors

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
    """None for a rule that needs more than one operation's operands; see the package's table."""
    excuse: Callable[[Frame, int], bool] | None = None
    """Whether the caller's source says that the operation is meant, given its line and R."""
    excused_as: str = ""
    """What it is taken for then."""
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


def given_to_all(calls: Sequence[Call], is_sum: bool) -> list[bits.Parts]:
    """What a collective will write on every rank; [] for one that gives ranks different things."""
    first = calls[0]
    if first.op == "all_reduce" and is_sum:
        reduction = first.reduction
        assert reduction is not None
        return [
            [reduce_tensors([parts[0] for parts in by_rank], reduction)]
            for by_rank in operands(calls)
            if by_rank[0][0].is_floating_point()
        ]
    if first.op in GATHERS:
        return [[parts[0] for parts in by_rank] for by_rank in operands(calls)]
    if first.op == "broadcast":
        return [[tensor] for tensor in calls[first.root or 0].inputs[0]]
    return []


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


def _compares(frame: Frame, size: int) -> bool:
    return intent.compares(frame)


DROPPED = Rule(
    name="dropped result",
    explanation="An all-reduce of a contiguous copy of a tensor, which nobody can have read: the "
    "tensor itself stays unreduced.",
)

WRONG_GROUP = Rule(
    name="wrong group",
    explanation="An all-gather over a group that does not hold the shards of anything: each of its "
    "ranks gives the same tensor, or the same slice, and the other slices are on the ranks of "
    "another group.",
)

SLICED_SHARDS = Rule(
    name="sliced shards",
    explanation="Each rank sends one slice of a tensor of its own, and the receivers gather the "
    "slices, which is right only if all senders have the same tensor; they have not.",
)

NOT_REPLICATED = Rule(
    name="not replicated",
    explanation="A value that the program declares replicated differs between the ranks: by "
    "DTensor.from_local with Replicate(), `rankfold.replicated`, or --replicated.",
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
        explanation="A sum over ranks that all add the same floating-point tensor, and is not "
        "divided by their number afterwards.",
        says=_equal_addends,
        excuse=intent.averages,
        excused_as="an average, for the sum is divided by the number of ranks",
    ),
    Rule(
        name="gathered again",
        explanation="An all-gather of what an earlier operation over the same ranks has given to "
        "all of them.",
        says=_gathers_again,
        excuse=_compares,
        excused_as="a check of replicas, for the result is compared",
    ),
    Rule(
        name="gathers what is whole",
        explanation="An all-gather to which all ranks give the same floating-point rows, each "
        "time that it is called.",
        says=_gathers_whole,
        excuse=_compares,
        excused_as="a check of replicas, for the result is compared",
        by_habit=True,
    ),
    DROPPED,
    WRONG_GROUP,
    SLICED_SHARDS,
    NOT_REPLICATED,
)
