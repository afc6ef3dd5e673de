"""One run on rank processes: waits for all ranks, and says what is wrong if they do not come back.

Deaths are seen at once, since the rank's socket closes. Ranks that wait for calls which nobody
will make are seen as soon as nothing moves any more, from their journals; only a rank that hangs
in its own code takes the time limit.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import (
    Deadlock,
    Mismatch,
    RankDied,
    RankFailed,
    RankHung,
    RankReport,
    SimError,
    Undelivered,
)
from . import wire
from .pool import Member, ready
from .replay import Replay

LOOK = 0.1
"""Seconds between two looks at the journals, while no rank comes back."""
SETTLE = 5.0
"""Seconds that the others get to come to rest once a rank has raised, so that what they do until
then is known."""
DEATH = 0.5
"""The same, once a rank has died."""


class Run:
    """Attends to the ranks until they have all come back, or never will.

    Args:
        members: the ranks, by rank.
        reap: the exit code of a member that has died; None where it is not known.
        limit: seconds without any sign of life after which the ranks hang.
    """

    def __init__(
        self, members: Sequence[Member], reap: Callable[[Member], int | None], limit: float
    ) -> None:
        self._members, self._reap, self._limit = members, reap, limit
        self._results: dict[int, Any] = {}
        self._raised: dict[int, wire.Raised] = {}
        self._died: dict[int, int | None] = {}
        """The exit codes of ranks whose processes have ended."""
        self._hung = False
        self._stuck = False
        for member in members:
            member.journal.clear()
        self.replay = Replay([member.journal for member in members])

    def results(self, request: bytes | Sequence[bytes]) -> list[Any]:
        """Send the request, the same for all ranks or one for each; return the results by rank.

        Raises:
            SimError: a rank failed, died or hangs, or they disagree or wait for ever.
        """
        size = len(self._members)
        requests = [request] * size if isinstance(request, bytes) else list(request)
        for rank, (member, data) in enumerate(zip(self._members, requests, strict=True)):
            try:
                member.channel.send_bytes(data)
            except OSError:
                self._died[rank] = self._reap(member)
        self._attend()
        self.replay.look()
        failure = self._failure()
        if failure is not None:
            error = next((r.error for r in self._raised.values()), None)
            raise failure from (error if isinstance(failure, RankFailed) else None)
        return [self._results[rank] for rank in range(size)]

    @property
    def dead(self) -> set[int]:
        """The ranks whose processes have ended."""
        return set(self._died)

    def _attend(self) -> None:
        alive = time.monotonic()
        until = float("inf")
        quiet = 0
        while left := self._left():
            now = time.monotonic()
            said = ready([self._members[rank] for rank in left], LOOK)
            for rank in left:
                if self._members[rank] in said:
                    self._hear(rank)
            if self._died:
                until = min(until, now + DEATH)
            elif self._raised:
                until = min(until, now + SETTLE)
            if said and not (self._died or self._raised):
                alive = time.monotonic()
                continue
            news = self.replay.look()
            if self.replay.mismatch:
                return
            if news or said:
                alive, quiet = time.monotonic(), 0
            elif all(map(self.replay.stuck, self._left())):
                # Twice: a note may be on its way that says that the wait is over.
                quiet += 1
                if quiet == 2:
                    self._stuck = bool(self._left())
                    return
            if time.monotonic() >= until:
                return
            if time.monotonic() - alive >= self._limit:
                self._hung = True
                return

    def _left(self) -> list[int]:
        """The ranks of which nothing has been heard."""
        heard = self._results.keys() | self._raised.keys() | self._died.keys()
        return [rank for rank in range(len(self._members)) if rank not in heard]

    def _hear(self, rank: int) -> None:
        try:
            reply = wire.load(self._members[rank].channel.recv_bytes())
        except (EOFError, OSError):
            self._died[rank] = self._reap(self._members[rank])
            return
        if isinstance(reply, wire.Raised):
            self._raised[rank] = reply
        else:
            self._results[rank] = reply

    # --- what went wrong ---

    def _failure(self) -> SimError | None:
        if self.replay.mismatch:
            return Mismatch(self.replay.mismatch, self._reports())
        if self._died:
            return self._dead()
        if self._raised:
            return self._failed()
        if self._stuck:
            return self._never()
        if self._hung:
            left = self._left()
            idle = [rank for rank in left if not self.replay.waits(rank)] or left
            return RankHung(
                f"{_ranks(idle)} showed no sign of life for {self._limit:g} s: neither came back "
                "nor started an operation",
                self._reports(hung=idle),
            )
        if not self.replay.whole:
            return SimError("a rank's journal cannot be read, so the ledger would lack operations")
        pending = self.replay.pending()
        if pending:
            count = "an operation" if len(pending) == 1 else f"{len(pending)} operations"
            return Undelivered(f"all ranks are done, but {count} never completed", pending)
        return None

    def _dead(self) -> SimError:
        # gloo aborts a process that is sent more than it expects. That is what the others did.
        by_gloo = all(code == -signal.SIGABRT for code in self._died.values())
        if by_gloo and any("gloo" not in raised.trace for raised in self._raised.values()):
            return self._failed()
        wrong = self.replay.partial_disagreement() if by_gloo else None
        if wrong:
            return Mismatch(wrong, self._reports())
        who = ", ".join(f"rank {rank} {_ending(code)}" for rank, code in sorted(self._died.items()))
        return RankDied(f"a rank's process ended: {who}", self._reports())

    def _failed(self) -> SimError:
        rank, first = min(self._raised.items())
        if isinstance(first.error, SimError):
            return type(first.error)(first.error.headline, first.error.ranks or self._reports())
        return RankFailed(f"rank {rank} raised {first.said}", self._reports())

    def _never(self) -> SimError:
        wrong = self.replay.partial_disagreement()
        if wrong:
            return Mismatch(wrong, self._reports())
        waiting = self._left()
        ended = sorted(self._results)
        one = len(waiting) == 1
        finished = f"; {_ranks(ended)} finished" if ended else ""
        return Deadlock(
            f"deadlock: {_ranks(waiting)} {'waits' if one else 'wait'} for calls that nobody can "
            f"make any more{finished}",
            self._reports(),
        )

    def _reports(self, hung: Sequence[int] = ()) -> tuple[RankReport, ...]:
        return tuple(self._report(rank, rank in hung) for rank in range(len(self._members)))

    def _report(self, rank: int, hung: bool) -> RankReport:
        if rank in self._died:
            return self.replay.report(rank, "died", _ending(self._died[rank]))
        if rank in self._raised:
            return self.replay.report(rank, "raised", self._raised[rank].said)
        if rank in self._results:
            return self.replay.report(rank, "has finished")
        return self.replay.report(rank, "hangs" if hung else "runs")


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def _ending(code: int | None) -> str:
    if code is None:
        return "ended"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
