"""A world whose ranks are processes over real gloo groups: the same programs as folded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from ..errors import Misuse, RankDied, SimError
from ..ledger import Ledger
from ..rank_local import Entry
from ..topology import Topology
from ..world import RankContext
from . import wire
from .pool import Pool
from .rank import Joining, Leaving, Running
from .run import Run

P = ParamSpec("P")
R = TypeVar("R")

LIMIT = 30.0
"""Seconds without a sign of life after which ranks hang."""
_LEAVE = 10.0
"""Seconds that ranks are given to leave a world."""
_SALVAGE = 5.0
"""Seconds that a rank is given to answer after a run that broke."""


class GlooWorld:
    """Rank processes that are one world until it is closed; a context manager.

    Programs and their arguments go to the ranks by pickle, and results come back by it: functions
    are top-level ones of a module, and what a rank is to keep stays in `ctx.kept`.
    """

    def __init__(
        self,
        topology: Topology | str | int,
        *,
        pool: Pool,
        rank_local: Iterable[Entry] = (),
        plumbing: tuple[str, ...] = (),
        within: Callable[[], AbstractContextManager[None]] | None = None,
        limit: float = LIMIT,
    ) -> None:
        """Take ranks from the pool and connect them.

        Args:
            topology: a topology, its word, or a number of ranks.
            pool: where the processes come from, and go back to.
            rank_local: process-global state, beyond torch's own, that starts fresh in a new world.
            plumbing: parts of paths whose frames only pass calls on; see `CallSites`.
            within: makes a context in which each rank's programs run; a top-level function.
            limit: seconds without a sign of life (an operation started or completed, a rank come
                back) after which a run is said to hang.

        Raises:
            TopologyError: the topology's word means nothing.
            Misuse: the pool's preparation failed.
            SimError: the ranks could not connect.
        """
        if isinstance(topology, int):
            topology = Topology(tp=topology)
        elif isinstance(topology, str):
            topology = Topology.parse(topology)
        self.topology = topology
        self.size = topology.world_size
        self.ledger = Ledger()
        self.limit = limit
        self._pool = pool
        self._dead: set[int] = set()
        self._broken: SimError | None = None
        self._closed = False
        joining = Joining(
            rank=0,
            topology=topology,
            store=("", 0, ""),
            rank_local=tuple(rank_local),
            plumbing=plumbing,
            within=within,
        )
        try:
            self._join(joining)
        except RankDied:
            # One may have died while it waited in the pool, just before it was taken.
            self._join(joining)

    def _join(self, joining: Joining) -> None:
        self._members = self._pool.take(self.size)
        self._closed, self._broken = False, None
        self._dead.clear()
        try:
            there = replace(joining, store=self._pool.store())
            self._run([wire.dump(replace(there, rank=rank)) for rank in range(self.size)])
        except BaseException:
            self._drop()
            raise

    @property
    def pids(self) -> list[int]:
        """The ranks' process ids, by rank."""
        return [member.pid for member in self._members]

    def run(
        self, program: Callable[Concatenate[RankContext, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Run `program(context, ...)` on every rank and return the results by rank.

        The operations of each group are numbered from 0. After an error the world is broken and
        can only be closed.

        Raises:
            RankFailed: a rank raised; its exception is the cause, where it can be pickled.
            RankDied, RankHung, Deadlock, Mismatch, NotAMember, Undelivered: see `sim.errors`.
            Misuse: the world is closed or broken, or the program cannot be pickled.
        """
        if self._closed or self._broken is not None:
            state = "closed" if self._closed else f"broken ({self._broken})"
            raise Misuse(f"this world is {state}; make a new one")
        if kwargs:
            raise Misuse("over processes a program takes its arguments by position")
        try:
            request = wire.dump(Running(program=program, arguments=args))
        except Exception as error:
            name = getattr(program, "__qualname__", repr(program))
            raise Misuse(
                f"{name} and its arguments cannot go to another process ({error}); use a "
                "top-level function of a module, and plain data"
            ) from error
        results: list[R] = self._run(request)
        return results

    def salvage(self, look: Callable[..., R], *args: Any) -> list[R | None]:
        """After a run that broke: `look(context, ...)` on every rank, beside what it is stuck in.

        Ranks that have died or do not answer give None.
        """
        request = wire.dump(Running(program=look, arguments=args))
        asked = set()
        for rank, member in enumerate(self._members):
            if rank not in self._dead:
                try:
                    member.control.send_bytes(request)
                    asked.add(rank)
                except OSError:
                    self._dead.add(rank)
        until = time.monotonic() + _SALVAGE
        return [self._answer(rank, until) if rank in asked else None for rank in range(self.size)]

    def _answer(self, rank: int, until: float) -> Any:
        control = self._members[rank].control
        try:
            if not control.poll(max(0.0, until - time.monotonic())):
                return None
            reply = wire.load(control.recv_bytes())
        except (EOFError, OSError):
            return None
        return None if isinstance(reply, wire.Raised) else reply

    def close(self) -> None:
        """Give the ranks back to the pool; those of a broken world are ended."""
        if self._closed:
            return
        self._closed = True
        if self._broken is None:
            try:
                Run(self._members, self._pool.reap, _LEAVE).results(wire.dump(Leaving()))
            except SimError:
                self._drop()
                return
            self._pool.give(self._members)
        else:
            self._drop()

    def _run(self, request: bytes | list[bytes]) -> list[Any]:
        run = Run(self._members, self._pool.reap, self.limit)
        try:
            return run.results(request)
        except SimError as error:
            self._broken = error
            raise
        except BaseException as interrupt:
            self._broken = Misuse(f"interrupted by {type(interrupt).__name__}")
            self._drop()
            raise
        finally:
            self._dead |= run.dead
            self.ledger.entries.extend(run.replay.ledger())

    def _drop(self) -> None:
        self._closed = True
        self._pool.drop(self._members)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
