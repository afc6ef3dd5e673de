"""What the folded runtime says when a run breaks: which rank, which group, which line.

Every error here carries the same report: for each rank what it was doing, on which group, as
which operation of that group, with which shapes, and from which line of the caller's code.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What one rank was doing when the run broke."""

    rank: int
    """Global rank."""
    state: str
    """"waits in", "is in", "has finished", "raised", "runs" or "left"; of a process "died",
    "died in", "hangs" or "hangs in"; of a reused buffer "changed
    a buffer of" or "passed a buffer in flight to"."""
    operation: str = ""
    """The pending operation with its operands, such as "all_reduce(sum) float32[4, 8]"."""
    group: str = ""
    """The group's name and its global ranks, such as "tp[0, 1]"."""
    sequence: int | None = None
    """How many operations this rank had started on this group before this one."""
    site: str = ""
    """file:line in the caller's code."""
    detail: str = ""
    """What is wrong with this rank, if the report is about it."""

    def __str__(self) -> str:
        text = f"rank {self.rank} {self.state}"
        if self.operation:
            text += f" {self.operation}"
        if self.group:
            text += f" on {self.group}"
        if self.sequence is not None:
            text += f" (operation {self.sequence} of that group)"
        if self.site:
            text += f" at {self.site}"
        return text + (f": {self.detail}" if self.detail else "")


class SimError(RuntimeError):
    """A run that broke. `headline` says what and why in one line; `ranks` has each rank's state."""

    def __init__(self, headline: str, ranks: tuple[RankReport, ...] = ()) -> None:
        self.headline = headline
        self.ranks = ranks
        super().__init__("\n  ".join([headline, *map(str, ranks)]))

    @property
    def kind(self) -> str:
        """The error's kind as a word: deadlock, mismatch, rank_failed and so on."""
        name = type(self).__name__
        return "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "kind": self.kind,
            "headline": self.headline,
            "ranks": [asdict(rank) for rank in self.ranks],
        }


class Deadlock(SimError):
    """No rank can run and some are not done."""


class Mismatch(SimError):
    """The ranks of a group disagree on an operation: op, shape, dtype, reduce op, root or sizes."""


class RankFailed(SimError):
    """A rank raised. The exception is `__cause__`, with the rank's own traceback."""


class RankDied(SimError):
    """The process of a rank ended: it was killed, crashed, or called exit."""


class RankHung(SimError):
    """A rank neither came back nor started an operation for longer than the limit."""


class NotAMember(SimError):
    """A rank used a group that it is not in."""


class Undelivered(SimError):
    """The ranks are done, but a message was never received or an operation never completed."""


class BufferReuse(SimError):
    """A rank changed a buffer, or passed it on, that an operation still had in flight. Only a
    schedule with late delivery looks for this."""


class Misuse(SimError):
    """The runtime was used in a way that cannot work, such as from a thread that is no rank."""


class RankAborted(BaseException):
    """Raised inside the ranks of a run that broke elsewhere, so that their stacks unwind.

    Not an `Exception`: code under test that catches those must not swallow it.
    """
