"""Handles of operations in flight: what `async_op=True`, `isend` and `irecv` return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .baton import Baton
from .errors import Misuse

if TYPE_CHECKING:
    from .flight import Flight


class FoldedFuture(torch.futures.Future):  # type: ignore[type-arg]
    """A future whose `wait` lets the other ranks run, instead of blocking the whole process."""

    def __init__(self, work: FoldedWork) -> None:
        super().__init__()
        self._work = work

    def wait(self) -> Any:
        """Wait for the operation and return its output tensors."""
        self._work.wait()
        return super().wait()

    def done(self) -> bool:
        """Whether it has its value. If not, others run first, as when a handle is asked."""
        return super().done() or (self._work.is_completed() and super().done())

    def then(self, callback: Callable[[FoldedFuture], Any]) -> FoldedFuture:
        """A future of what `callback` makes of this one once it is done."""
        following = FoldedFuture(self._work)

        def run(_: Any) -> None:
            try:
                following.set_result(callback(self))
            except Exception as error:
                following.set_exception(error)

        self.add_done_callback(run)
        return following


class CollectedFuture(torch.futures.Future):  # type: ignore[type-arg]
    """All of several futures; waiting for it waits for each in turn."""

    def __init__(self, futures: Sequence[Any]) -> None:
        super().__init__()
        self._futures = list(futures)
        self._left = len(self._futures)
        for future in self._futures:
            future.add_done_callback(self._one_done)
        if not self._futures:
            self.set_result([])

    def _one_done(self, _: Any) -> None:
        self._left -= 1
        if not self._left:
            self.set_result(self._futures)

    def wait(self) -> Any:
        """Wait for all of them and return them."""
        for future in self._futures:
            future.wait()
        return super().wait()

    def done(self) -> bool:
        """Whether all of them are done."""
        return all(future.done() for future in self._futures) and super().done()


class FoldedWork(dist.Work):
    """One rank's part in an operation. `done` says whether it has been carried out; its outputs
    are written then, or, under late delivery, when the rank sees it complete.

    Args:
        baton: the scheduler.
        rank: global rank whose part it is.
        outputs: the tensors that it writes.
        operation: the call or post this is part of.
        group: the group it is on.
        alive: keeps the handle until it is waited for; C++ may hold the only other reference,
            which does not keep a Python object.
    """

    def __init__(
        self,
        baton: Baton,
        rank: int,
        outputs: list[torch.Tensor],
        operation: object,
        group: object,
        alive: set[FoldedWork],
    ) -> None:
        super().__init__()
        self.done = False
        self.rank = rank
        self.outputs = outputs
        self.operation = operation
        self.group = group
        self._baton = baton
        self._alive = alive
        self._future: FoldedFuture | None = None
        self.flight: Flight | None = None
        """What late delivery has yet to do; None from when the rank has seen it complete."""
        self.source: int | None = None
        """The sender of a received message, as a rank in the group."""
        alive.add(self)

    def finish(self) -> None:
        """Say that it has been carried out, and wake the rank if it waits for this."""
        self.done = True
        self._baton.wake(self.rank, self)
        if self.flight is None:
            self._resolve()
        elif self.flight.ended:
            self.land()

    def land(self) -> None:
        """The rank sees it complete: late outputs are written now."""
        flight, self.flight = self.flight, None
        if flight is not None:
            flight.land()
            self._resolve()

    def _resolve(self) -> None:
        if self._future is not None:
            self._future.set_result(self.outputs)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let other ranks run until this is done. Waiting again is harmless.

        Raises:
            Misuse: another rank waits for it, which no process could.
        """
        if self._baton.current != self.rank:
            raise Misuse(f"rank {self._baton.current} waited for a handle of rank {self.rank}")
        if self.flight is None:
            self._baton.wait_for(self)
        else:
            # The rank cannot write while it waits, so this is the last look at its buffers.
            self.flight.settle()
            self._baton.wait_for(self)
            self.land()
        self._alive.discard(self)
        return True

    def synchronize(self) -> None:
        """Same as `wait`: there are no streams here."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it is complete. If not, others run first, or a loop that asks would never end.

        Late delivery says no once when it could say yes, and delivers when it says yes.
        """
        if not self.done:
            self._baton.give_way()
        if self.flight is None:
            return self.done
        if self.done and self.flight.asked:
            self.land()
            return True
        self.flight.asked = self.done
        return False

    def is_success(self) -> bool:
        """Whether it is complete; an operation that fails ends the run instead."""
        return self.done and self.flight is None

    def exception(self) -> None:
        """None: an operation that fails ends the run instead."""
        return None

    def result(self) -> list[torch.Tensor]:
        """The output tensors."""
        return self.outputs

    def source_rank(self) -> int:
        """The sender of a received message, as a rank in the group.

        Raises:
            RuntimeError: it is no receive, or not done.
        """
        if self.source is None:
            raise RuntimeError("only a receive that is done has a source rank")
        return self.source

    _source_rank = source_rank

    def get_future(self) -> FoldedFuture:
        """A future of the output tensors."""
        if self._future is None:
            self._future = FoldedFuture(self)
            if self.done and self.flight is None:
                self._resolve()
        return self._future


class GroupedWork(dist.Work):
    """Several operations behind one handle, as the coalescing manager returns them."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = list(works)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all of them."""
        for work in self._works:
            work.wait()
        return True

    def synchronize(self) -> None:
        """Same as `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether all are done; never blocks."""
        return all(work.is_completed() for work in self._works)
