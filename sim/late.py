"""Late delivery: every operation takes effect at the last moment that a transport may choose.

- A send's buffer is read when the sender sees it complete, when the receiver does, or when the
  sender's program ends, whichever comes first.
- A receive's buffer holds poison from the post on, and the message once the receiver sees it
  complete.
- A collective that is not blocking reads its inputs, and writes its outputs, when the rank sees it
  complete. Outputs that are no inputs hold poison until then.
- A rank sees an operation complete when it waits for the handle or its future, or asks a second
  time whether it is complete. A handle vouches for its own operation only.

Buffers in flight are compared bit by bit with what they held at the call. So code that is right
only because the transport was quick fails, and code that keeps to the rules computes what it does
under plain delivery. A blocking collective has no flight: its caller can do nothing meanwhile.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NoReturn

import torch

from .buffers import may_overlap, poison, surely_overlap
from .calls import Buckets, Call
from .errors import SimError
from .flight import Flight, Guard
from .mailbox import Post
from .work import FoldedWork

Describe = Callable[[Flight, str], SimError]
"""Makes the error for a buffer in flight that was changed, from what changed."""

Conflict = Callable[[Flight, Call | Post, object], SimError]
"""Makes the error for a buffer in flight that was passed to another operation, on that group."""


class LateDelivery:
    """The operations in flight of one run, by rank.

    Args:
        fail: breaks the run.
        changed, passed_on: make the errors.
    """

    def __init__(
        self, fail: Callable[[SimError], NoReturn], changed: Describe, passed_on: Conflict
    ) -> None:
        self._fail = fail
        self._changed = changed
        self._passed_on = passed_on
        self._works: defaultdict[int, list[FoldedWork]] = defaultdict(list)

    def call(self, work: FoldedWork, call: Call, group: object) -> None:
        """A rank calls a collective."""
        written = _filled(call.written())
        read = _filled(call.inputs)
        in_place = call.inputs is call.outputs
        self._check_free(call, group, read, written)
        if call.blocking or not (read or written):
            return
        guards = []
        for tensor in written:
            # What lies within an input has to keep its value until it is read.
            if not any(may_overlap(tensor, other) for other in read):
                poison(tensor)
            guards.append(Guard.of(tensor, written=True))
        if not (in_place and written):
            guards += [Guard.of(tensor, written=False) for tensor in read]
        self._start(work, Flight(call, group, guards, self._reused))

    def send(self, work: FoldedWork, post: Post, group: object, buffer: torch.Tensor) -> None:
        """A rank posts a send from `buffer`; `post.tensor` is a copy."""
        if buffer.numel():
            self._check_free(post, group, [buffer], [])
            guard = Guard.of(buffer, written=False)
            self._start(work, Flight(post, group, [guard], self._reused))

    def receive(self, work: FoldedWork, post: Post, group: object) -> None:
        """A rank posts a receive."""
        if post.tensor.numel():
            self._check_free(post, group, [], [post.tensor])
            poison(post.tensor)
            guard = Guard.of(post.tensor, written=True)
            self._start(work, Flight(post, group, [guard], self._reused))

    def carried_out(self, calls: Sequence[Call], works: Sequence[FoldedWork]) -> list[Call]:
        """All ranks have called a collective: what to carry out, with outputs that land later."""
        return [
            call if work.flight is None or work.flight.ended else _staged(call, work.flight)
            for call, work in zip(calls, works, strict=True)
        ]

    def verify(self, works: Sequence[FoldedWork]) -> None:
        """Check the buffers of an operation that is about to be carried out."""
        for work in works:
            if work.flight is not None:
                work.flight.verify()

    def end(self, rank: int) -> None:
        """A rank's program has ended: what it has not waited for takes effect."""
        for work in list(self._works[rank]):
            if work.flight is not None:
                work.flight.settle()
                work.flight.ended = True
                if work.done:
                    work.land()
        self._works[rank] = []

    def _start(self, work: FoldedWork, flight: Flight) -> None:
        work.flight = flight
        self._works[work.rank].append(work)

    def _check_free(
        self,
        operation: Call | Post,
        group: object,
        read: Sequence[torch.Tensor],
        written: Sequence[torch.Tensor],
    ) -> None:
        """Check that no buffer of a new operation is in flight, other than both being read."""
        works = self._works[operation.rank]
        if not works:
            return
        works[:] = [work for work in works if work.flight is not None]
        for work in works:
            assert work.flight is not None
            for guard in work.flight.guards:
                wanted = [*read, *written] if guard.written else written
                if any(surely_overlap(guard.tensor, tensor) for tensor in wanted):
                    self._fail(self._passed_on(work.flight, operation, group))

    def _reused(self, flight: Flight, change: str) -> NoReturn:
        self._fail(self._changed(flight, change))


def _filled(buckets: Buckets) -> list[torch.Tensor]:
    return [t for bucket in buckets for t in bucket if t.numel()]


def _staged(call: Call, flight: Flight) -> Call:
    """The call with other outputs, from which the rank's own are written when it lands."""
    if not call.written():
        return call
    staged = [
        [torch.empty_like(t, memory_format=torch.contiguous_format) for t in bucket]
        for bucket in call.outputs
    ]
    flight.landing = [
        (target, value)
        for targets, values in zip(call.outputs, staged, strict=True)
        for target, value in zip(targets, values, strict=True)
    ]
    return replace(call, outputs=staged)
