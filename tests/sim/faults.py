"""Faults: programs that break, each with what the report must say and its right twin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sim import Deadlock, Mismatch, RankContext, SimError, Undelivered
from tests.sim import fault_programs as programs

WORLD = "default_pg"


@dataclass(frozen=True, kw_only=True)
class At:
    """Where a report must say that one rank is."""

    operation: str
    line: str
    """A text that only this line of the program has."""
    sequence: int = 0
    group: str = f"{WORLD}[0, 1]"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A program that is wrong, its right twin, and the report."""

    wrong: Callable[[RankContext], Any]
    right: Callable[[RankContext], Any]
    error: type[SimError]
    says: tuple[str, ...]
    """What the headline must contain."""
    ranks: Mapping[int, At | str]
    """For each rank where it is, or a text of its state."""
    topology: str = "tp2"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.wrong.__name__


def both(operations: tuple[str, str], **rest: Any) -> dict[int, At | str]:
    """Ranks 0 and 1 on the line marked `# both`."""
    return {rank: At(operation=op, line="# both", **rest) for rank, op in enumerate(operations)}


def apart(operations: tuple[str, str], **rest: Any) -> dict[int, At | str]:
    """Ranks 0 and 1 on the lines marked with their names."""
    return {
        rank: At(operation=op, line=f"# rank {rank}", **rest) for rank, op in enumerate(operations)
    }


FOUR = f"{WORLD}[0, 1, 2, 3]"
ALL_BUT_ONE = At(operation="all_reduce(sum) float32[2]", line="# all but", sequence=1, group=FOUR)

FAULTS = [
    Fault(
        wrong=programs.missing_collective,
        right=programs.every_collective,
        error=Deadlock,
        says=("0, 1, 3", "2 finished"),
        ranks={0: ALL_BUT_ONE, 1: ALL_BUT_ONE, 2: "finished", 3: ALL_BUT_ONE},
        topology="tp4",
    ),
    Fault(
        wrong=programs.wrong_shape,
        right=programs.same_shape,
        error=Mismatch,
        says=(f"{WORLD}[0, 1]", "shapes", "rank 0 has [2]", "rank 1 has [3]"),
        ranks=apart(("all_reduce(sum) float32[2]", "all_reduce(sum) float32[3]")),
    ),
    Fault(
        wrong=programs.wrong_dtype,
        right=programs.same_dtype,
        error=Mismatch,
        says=("dtypes", "rank 0 has bfloat16", "rank 1 has float64"),
        ranks=both(("broadcast(root 0) bfloat16[2]", "broadcast(root 0) float64[2]")),
    ),
    Fault(
        wrong=programs.wrong_reduce_op,
        right=programs.same_reduce_op,
        error=Mismatch,
        says=("reduce ops", "rank 0 has sum", "rank 1 has max"),
        ranks=both(("all_reduce(sum) float32[2]", "all_reduce(max) float32[2]")),
    ),
    Fault(
        # Ranks are global in every report, also where torch counts within the group.
        wrong=programs.wrong_root,
        right=programs.same_root,
        error=Mismatch,
        says=("roots", "rank 2 has 2", "rank 3 has 3"),
        ranks={
            rank: At(operation=f"broadcast(root {rank}) float32[2]", line="# both", group="[2, 3]")
            for rank in (2, 3)
        },
        topology="tp4",
    ),
    Fault(
        wrong=programs.wrong_order,
        right=programs.same_order,
        error=Mismatch,
        says=("operations", "rank 0 has all_reduce", "rank 1 has broadcast"),
        ranks=apart(("all_reduce(sum) float32[2]", "broadcast(root 0) float32[2]")),
    ),
    Fault(
        wrong=programs.wrong_splits,
        right=programs.matching_splits,
        error=Mismatch,
        says=("splits", "rank 0 gives 2 rows to rank 1, which expects 1"),
        ranks=both(("splits [1, 2] -> [1, 1]) float32[3]", "splits [1, 1] -> [1, 1]) float32[2]")),
    ),
    Fault(
        wrong=programs.wrong_output_size,
        right=programs.right_output_size,
        error=Mismatch,
        says=("rank 0 has output float32[3]", "input float32[2]", "group of 2"),
        ranks=both(("all_gather_into_tensor() float32[2]",) * 2),
    ),
    Fault(
        wrong=programs.wrong_slot_size,
        right=programs.right_slot_size,
        error=Mismatch,
        says=("sizes", "rank 1 gives float32[3]", "rank 0 expects float32[2]"),
        ranks=both(("all_gather() float32[2]", "all_gather() float32[3]")),
    ),
    Fault(
        wrong=programs.not_received,
        right=programs.received,
        error=Undelivered,
        says=("done", "never completed"),
        ranks={0: At(operation="send(to rank 1, tag 5) float32[3]", line="# rank 0", sequence=1)},
    ),
    Fault(
        wrong=programs.not_sent,
        right=programs.sent,
        error=Deadlock,
        says=("rank 1 waits", "rank 0 finished"),
        ranks={0: "finished", 1: At(operation="recv(from rank 0) float32[3]", line="# rank 1")},
    ),
    Fault(
        wrong=programs.other_tag,
        right=programs.same_tag,
        error=Deadlock,
        says=("rank 1 waits", "rank 0 finished"),
        ranks={
            0: "finished",
            1: At(operation="recv(from rank 0, tag 4) float32[3]", line="# rank 1"),
        },
    ),
    Fault(
        wrong=programs.never_sent,
        right=programs.sent,
        error=Undelivered,
        says=("done", "never completed"),
        ranks={1: At(operation="recv(from rank 0) float32[3]", line="# rank 1")},
    ),
    Fault(
        wrong=programs.never_joined,
        right=programs.joined,
        error=Undelivered,
        says=("done", "never completed"),
        ranks={1: At(operation="all_reduce(sum) float32[3]", line="# rank 1")},
    ),
    Fault(
        wrong=programs.wrong_message_size,
        right=programs.sent,
        error=Mismatch,
        says=("rank 0 sends float32[3]", "rank 1 expects float32[4]"),
        ranks=apart(("send(to rank 1) float32[3]", "recv(from rank 0) float32[4]")),
    ),
    Fault(
        wrong=programs.wrong_message_dtype,
        right=programs.sent,
        error=Mismatch,
        says=("rank 0 sends float32[3]", "rank 1 expects float64[3]"),
        ranks=apart(("send(to rank 1) float32[3]", "recv(from rank 0) float64[3]")),
    ),
    Fault(
        wrong=programs.nested_groups,
        right=programs.ordered_groups,
        error=Deadlock,
        says=("ranks 0, 1 wait",),
        ranks={
            0: At(operation="all_reduce(sum)", line="group=a)  # rank 0", group="A[0, 1]"),
            1: At(operation="all_reduce(sum)", line="group=b)  # rank 1", group="B[0, 1]"),
        },
    ),
    Fault(
        wrong=programs.head_to_head,
        right=programs.one_after_the_other,
        error=Deadlock,
        says=("ranks 0, 1 wait",),
        ranks=both(("send(to rank 1) float32[2]", "send(to rank 0) float32[2]")),
        options={"rendezvous_sends": True},
    ),
]
