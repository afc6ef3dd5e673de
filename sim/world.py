"""A world: N ranks folded into this process, running one SPMD function at a time."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, overload

from . import c10d, reports
from .baton import Baton, start_rank_thread, thread_rank
from .callsite import CallSites
from .errors import Misuse, RankAborted, RankFailed, SimError
from .fabric import Fabric
from .ledger import Ledger
from .observer import Observer
from .rank_local import TORCH_STATE, Entry, StateSwap
from .schedule import Schedule
from .store import FoldedStore
from .topology import Topology

P = ParamSpec("P")
R = TypeVar("R")

_PATIENCE = 10.0
"""Seconds that a running rank is given to notice that the run was interrupted."""


@dataclass(frozen=True)
class RankContext:
    """What an SPMD function is given: who it is. The default process group is ready, unless the
    world leaves it to the program (`init=False`)."""

    rank: int
    world_size: int
    topology: Topology
    kept: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    """What this rank's programs keep from one run of the world to the next."""


class World:
    """Folded ranks that live until the world is closed; a context manager.

    Invariant: while `run` is not executing, no rank runs and the process holds the caller's
    state, not a rank's.

    Examples:
        >>> def program(ctx):
        ...     x = torch.full((2,), float(ctx.rank))
        ...     dist.all_reduce(x)
        ...     return x
        >>> with World("tp4") as world:
        ...     world.run(program)[0]
        tensor([6., 6.])
    """

    def __init__(
        self,
        topology: Topology | str | int,
        *,
        rank_local: Iterable[Entry] = (),
        seed: int | None = None,
        plumbing: tuple[str, ...] = (),
        rendezvous_sends: bool = False,
        observers: Sequence[Observer] = (),
        init: bool = True,
    ) -> None:
        """Start the ranks.

        Args:
            topology: a topology, its word, or a number of ranks.
            rank_local: process-global state, beyond torch's own, that each rank has for itself.
            seed: the order of the ranks in all runs. None resumes them first come, first served;
                a number draws the order from it. The same seed gives the same run. For a
                schedule of one run, see `run`.
            plumbing: parts of paths whose frames only pass calls on; see `CallSites`.
            rendezvous_sends: a send completes only when it is received, as a large one does
                over NCCL; by default it is buffered, as over gloo.
            observers: what is shown every operation; see `sim.observer`.
            init: make the default process group. False leaves it to the program, which calls
                `init_process_group` itself, as under torchrun.

        Raises:
            TopologyError: the topology's word means nothing.
        """
        if isinstance(topology, int):
            topology = Topology(tp=topology)
        elif isinstance(topology, str):
            topology = Topology.parse(topology)
        self.topology = topology
        self.size = topology.world_size
        self._swap = StateSwap([*TORCH_STATE, *rank_local], c10d.launcher_environment(self.size))
        self._baton = Baton(self.size, self._swap, seed)
        self._fabric = Fabric(
            self._baton,
            CallSites(plumbing),
            rendezvous_sends=rendezvous_sends,
            observers=observers,
        )
        self._job: Callable[[RankContext], Any] | None = None
        self._results: list[Any] = [None] * self.size
        self._errors: dict[int, BaseException] = {}
        self._broken: SimError | None = None
        self._closed = False
        self._contexts = [RankContext(rank, self.size, self.topology) for rank in range(self.size)]
        for rank in range(self.size):
            self._swap.new_rank(rank)
        c10d.install()
        self._threads = [
            start_rank_thread(rank, self._baton, lambda r=rank: self._live(r))  # type: ignore[misc]
            for rank in range(self.size)
        ]
        # Kept here: torch holds it from C++, which does not keep a Python object alive.
        self._store = store = FoldedStore(self._baton)
        try:
            self.run(
                lambda ctx: c10d.init_rank(
                    self._fabric, store, ctx.rank, self.size, default_group=init
                )
            )
        except BaseException:
            self.close()
            raise

    @property
    def ledger(self) -> Ledger:
        """Every operation that the ranks completed, in order."""
        return self._fabric.ledger

    @property
    def switches(self) -> int:
        """How many times the baton has changed hands."""
        return self._baton.switches

    @overload
    def run(
        self, program: Callable[Concatenate[RankContext, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]: ...

    @overload
    def run(
        self, program: Callable[..., R], *args: Any, schedule: Schedule | None, **kwargs: Any
    ) -> list[R]: ...

    # A ParamSpec might have a `schedule` of its own, for all that mypy knows.
    def run(  # type: ignore[misc]
        self, program: Callable[..., R], *args: Any, schedule: Schedule | None = None, **kwargs: Any
    ) -> list[R]:
        """Run `program(context, ...)` on every rank and return the results by rank.

        A schedule holds for this run only, in place of the world's seed. The same program under
        the same schedule gives the same entries of the ledger, whatever the world ran before: the
        operations of each group are numbered from 0. Groups that a program makes have c10d's
        running numbers as names.

        State that the ranks keep (process groups, module globals of the table) lasts until the
        next run. After an error the world is broken and can only be closed.

        Raises:
            RankFailed: a rank raised; its exception is the cause.
            Deadlock, Mismatch, NotAMember, Undelivered, BufferReuse: see `sim.errors`.
            Misuse: the world is closed or broken, or this is called from inside a rank.
        """
        if self._closed or self._broken is not None:
            state = "closed" if self._closed else f"broken ({self._broken})"
            raise Misuse(f"this world is {state}; make a new one")
        if self._baton.current is not None:
            raise Misuse("World.run was called from inside one of its ranks")
        self._job = lambda context: program(context, *args, **kwargs)
        self._results = [None] * self.size
        self._errors = {}
        self._swap.save(None)
        order = self._baton.random
        if schedule is not None:
            self._baton.random = schedule.generator()
            self._fabric.begin(schedule)
        try:
            self._baton.start()
            failure = self._failure()
            if failure is not None:
                self._broken = failure
                self._baton.abort(_PATIENCE)
        except BaseException as interrupt:
            self._broken = Misuse(f"interrupted by {type(interrupt).__name__}")
            self._interrupt()
            raise
        finally:
            self._swap.load(None)
            self._job = None
            self._baton.random = order
            self._fabric.reset()
        if failure is not None:
            self._raise(failure)
        try:
            self._fabric.check_drained()
        except SimError as left:
            self._broken = left
            raise
        results, self._results = self._results, []
        return results

    def salvage(self, look: Callable[..., R], *args: Any) -> list[R | None]:
        """After a run that broke: `look(context, ...)` for every rank, outside of its turn.

        For what the ranks keep; nothing may be sent or received there. Over processes a rank
        that has died gives None.
        """
        return [look(context, *args) for context in self._contexts]

    def close(self) -> None:
        """End the ranks and restore torch. Closing again is harmless."""
        if self._closed:
            return
        if self._baton.current is not None and thread_rank() is not None:
            raise Misuse("World.close was called from inside one of its ranks")
        self._closed = True
        self._job = None
        for context in self._contexts:
            context.kept.clear()
        self._swap.save(None)
        for rank, thread in enumerate(self._threads):
            if not self._baton.running[rank]:
                self._baton.dismiss(rank)
                thread.join(_PATIENCE)
        self._swap.load(None)
        c10d.uninstall()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- a rank's thread ---

    def _live(self, rank: int) -> None:
        context = self._contexts[rank]
        while True:
            try:
                self._baton.await_turn(rank)
                if self._job is None:
                    c10d.leave_rank()
                    break
                self._run_job(context)
                self._baton.end(rank)
            except RankAborted:
                # An interrupt that came when the program was over; it must not lose the baton.
                if self._baton.current == rank:
                    self._baton.end(rank)
        self._baton.leave(rank)

    def _run_job(self, context: RankContext) -> None:
        job = self._job
        if job is None or self._baton.aborting:
            return
        try:
            self._results[context.rank] = job(context)
            self._fabric.rank_ends(context.rank)
        except BaseException as error:
            if isinstance(error, RankAborted) and self._baton.aborting:
                return
            self._errors[context.rank] = error.with_traceback(_own(error.__traceback__))

    # --- when a run breaks ---

    def _failure(self) -> SimError | None:
        """Why the run broke, once no rank can run; None if all went well."""
        if self._fabric.failure is not None:
            return self._fabric.failure
        if self._errors:
            rank, error = next(iter(self._errors.items()))
            said = {r: reports.in_a_line(e, self._fabric.sites) for r, e in self._errors.items()}
            ranks = reports.of_ranks(self._fabric, said)
            if isinstance(error, SimError):
                return error if error.ranks else type(error)(error.headline, ranks)
            return RankFailed(f"rank {rank} raised {said[rank]}", ranks)
        if any(self._baton.running):
            return reports.stuck(self._fabric)
        return None

    def _raise(self, failure: SimError) -> None:
        cause = next(iter(self._errors.values()), None)
        raise failure from (cause if isinstance(failure, RankFailed) else None)

    def _interrupt(self) -> None:
        """Stop the ranks after Ctrl-C or the like, also one that computes and never waits."""
        self._baton.aborting = True
        running = self._baton.current
        if running is not None:
            ident = self._threads[running].ident
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(ident or 0), ctypes.py_object(RankAborted)
            )
        self._baton.abort(_PATIENCE)


def _own(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without this package's frames around the rank's program."""
    own = trace
    while own is not None and own.tb_frame.f_code.co_filename == __file__:
        own = own.tb_next
    return own or trace
