"""The scheduler: ranks are threads, and one baton lets exactly one of them run.

The baton changes hands only when a rank waits for another, when it ends, or, under a schedule
seed, at a point where it could wait. So a run is deterministic, nothing needs a lock, and a
deadlock is a fact known at once: no rank can run, and some are not done.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from .errors import Misuse, RankAborted
from .rank_local import StateSwap


class Waitable(Protocol):
    """What a rank can wait for: the owner sets `done`, then tells the baton to `wake` the rank."""

    done: bool


class Baton:
    """Hands control from rank to rank.

    Invariants: at most one of the rank threads and the caller runs; `current` is the rank that
    holds the baton, or None while the caller does; a rank is in `_ready` at most once.

    Args:
        size: number of ranks.
        swap: the process-global state to swap at each hand-over.
        seed: None always resumes the rank that has been ready for longest; a number draws from
            the ready ranks, and may also preempt a rank at its communication calls.
    """

    def __init__(self, size: int, swap: StateSwap, seed: int | None) -> None:
        self.size = size
        self.current: int | None = None
        self.aborting = False
        self.switches = 0
        self.waiting: list[Waitable | None] = [None] * size
        self.running = [False] * size
        """Whether a rank's program has started and not ended."""
        self._swap = swap
        self.random = None if seed is None else random.Random(seed)
        """What draws the order; None for the plain one."""
        self._ready: deque[int] = deque()
        self._turn = [_taken_lock() for _ in range(size)]
        self._caller_turn = _taken_lock()

    # --- called by the thread that runs the world ---

    def start(self) -> None:
        """Run all ranks until none can: all have ended, or the rest wait for each other."""
        self.aborting = False
        self.running = [True] * self.size
        self.waiting = [None] * self.size
        self._ready = deque(range(self.size))
        self._give(self._pick())
        # An interrupt that comes just before the wait begins would only be seen after it.
        while not self._caller_turn.acquire(timeout=0.5):
            pass

    def abort(self, patience: float) -> list[int]:
        """Unwind the ranks that are not done, one by one; return those that would not end.

        Args:
            patience: seconds to wait for a rank that runs, rather than waits, when called.
        """
        self.aborting = True
        stuck = []
        if self.current is not None and not self._caller_turn.acquire(timeout=patience):
            return [self.current]
        for rank in range(self.size):
            if self.running[rank]:
                self._give(rank)
                if not self._caller_turn.acquire(timeout=patience):
                    stuck.append(rank)
        return stuck

    def dismiss(self, rank: int) -> None:
        """Give `rank`, which runs no program, a last turn to clean up and end its thread."""
        self._give(rank)
        self._caller_turn.acquire()

    # --- called by the rank that holds the baton ---

    def await_turn(self, rank: int) -> None:
        """Block the thread of `rank` until it is given the baton for the first time."""
        self._turn[rank].acquire()

    def wait_for(self, waitable: Waitable) -> None:
        """Let others run until `waitable` is done.

        Raises:
            RankAborted: the run has broken; unwind.
            Misuse: the calling thread does not hold the baton.
        """
        rank = self.holder()
        if self.aborting:
            raise RankAborted
        if waitable.done:
            return
        self.waiting[rank] = waitable
        self._next(rank)
        self.waiting[rank] = None
        if self.aborting:
            raise RankAborted

    def give_way(self) -> None:
        """Let the ranks that can run go first; return at once if there is none."""
        if self.aborting:
            raise RankAborted
        if self._ready:
            rank = self.holder()
            self._ready.append(rank)
            self._next(rank)
            if self.aborting:
                raise RankAborted

    def preempt(self) -> None:
        """Under a schedule seed, perhaps let another rank run first."""
        if self.aborting:
            raise RankAborted
        if self.random is None or not self._ready or self.random.random() < 0.5:
            return
        rank = self.holder()
        self._ready.append(rank)
        self._next(rank)
        if self.aborting:
            raise RankAborted

    def wake(self, rank: int, waitable: Waitable) -> None:
        """Say that `waitable`, which `rank` may be waiting for, is done."""
        if self.waiting[rank] is waitable:
            self.waiting[rank] = None
            self._ready.append(rank)

    def end(self, rank: int) -> None:
        """`rank` has ended its program; pass the baton on."""
        self.running[rank] = False
        self._swap.save(rank)
        self._pass_on()

    def leave(self, rank: int) -> None:
        """`rank` has cleaned up; its thread ends."""
        self._to_caller()

    def holder(self) -> int:
        """The rank that holds the baton, which must be the caller.

        Raises:
            Misuse: the calling thread is not that rank's own.
        """
        rank = self.current
        if rank is None or thread_rank() != rank:
            raise Misuse(
                "a collective was called from a thread that is not a rank's own; "
                "call it from the function given to World.run"
            )
        return rank

    def _next(self, rank: int) -> None:
        nxt = self._pick() if self._ready else None
        if nxt == rank:
            return
        self._swap.save(rank)
        if nxt is None or self.aborting:
            self._to_caller()
        else:
            self._give(nxt)
        self._turn[rank].acquire()

    def _pass_on(self) -> None:
        if self._ready and not self.aborting:
            self._give(self._pick())
        else:
            self._to_caller()

    def _pick(self) -> int:
        if self.random is None:
            return self._ready.popleft()
        index = self.random.randrange(len(self._ready))
        self._ready.rotate(-index)
        return self._ready.popleft()

    def _give(self, rank: int) -> None:
        self.switches += 1
        self.current = rank
        self._swap.load(rank)
        self._turn[rank].release()

    def _to_caller(self) -> None:
        self.current = None
        self._caller_turn.release()


def _taken_lock() -> threading.Lock:
    """A lock that its first `acquire` waits for: the cheapest signal between two threads."""
    lock = threading.Lock()
    lock.acquire()
    return lock


_thread = threading.local()


def thread_rank() -> int | None:
    """The rank whose own thread this is; None on any other thread."""
    return getattr(_thread, "rank", None)


def thread_baton() -> Baton | None:
    """The scheduler of the world whose rank's own thread this is; None on any other thread."""
    return getattr(_thread, "baton", None)


def start_rank_thread(rank: int, baton: Baton, body: Callable[[], None]) -> threading.Thread:
    """Start the thread that is `rank` for the life of the world that `baton` schedules."""

    def main() -> None:
        _thread.rank = rank
        _thread.baton = baton
        body()

    # A daemon, so that a rank stuck in native code cannot keep the process from exiting.
    thread = threading.Thread(target=main, name=f"rank{rank}", daemon=True)
    thread.start()
    return thread
