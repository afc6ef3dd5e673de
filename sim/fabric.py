"""The rendezvous: where the calls of all ranks meet, are checked, carried out and recorded.

It sees every rank's operands at once. The ledger, the agreement checks and the reports hang here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import torch

from . import reports
from .agreement import UNEVEN, disagreement
from .baton import Baton
from .buffers import copy_of, write
from .calls import Call, describe, dtype_name
from .callsite import CallSites
from .collectives import COLLECTIVES, Collective
from .errors import Mismatch, RankAborted, SimError, Undelivered
from .late import LateDelivery
from .ledger import Entry, Ledger
from .mailbox import Mailbox, Post
from .observer import Observer
from .schedule import Schedule
from .work import FoldedWork


@dataclass(slots=True)
class Slot:
    """One operation of a group, until all its ranks have called it. Keys: rank in the group."""

    calls: dict[int, Call] = field(default_factory=dict)
    works: dict[int, FoldedWork] = field(default_factory=dict)


class Group:
    """What the process-group objects of all ranks of a group share.

    Invariant: `slots` holds exactly the operations that some but not all members have called.
    """

    def __init__(self, name: str, ranks: tuple[int, ...]) -> None:
        self.name = name
        self.ranks = ranks
        self.label = name
        """How reports and the ledger call the group."""
        self.members: set[int] = set()
        """The members, as ranks in the group, that have a handle now."""
        self.awaited = set(range(len(ranks)))
        """The members that have never had a handle."""
        self.next = [0] * len(ranks)
        """How many operations each member has called."""
        self.slots: dict[int, Slot] = {}
        self.mailbox = Mailbox()

    def __str__(self) -> str:
        return f"{self.label}{list(self.ranks)}"

    def renumber(self) -> None:
        """Count operations from 0 again. Only while nothing is pending."""
        self.next = [0] * len(self.ranks)
        self.mailbox.renumber()


class Fabric:
    """The transport between the ranks of one world."""

    def __init__(
        self,
        baton: Baton,
        sites: CallSites,
        *,
        rendezvous_sends: bool = False,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.baton = baton
        self.sites = sites
        self.ledger = Ledger()
        self.failure: SimError | None = None
        """Why the run broke, once it has."""
        self.groups: dict[tuple[str, tuple[int, ...]], Group] = {}
        self._late: LateDelivery | None = None
        self._rendezvous_sends = rendezvous_sends
        self._observers = tuple(observers)
        self._alive: set[FoldedWork] = set()

    def group(self, name: str, ranks: tuple[int, ...]) -> Group:
        """The group of this name and these global ranks, shared by all who ask for it."""
        key = (name, ranks)
        if key not in self.groups:
            self.groups[key] = Group(name, ranks)
        return self.groups[key]

    def leave(self, group: Group, index: int) -> None:
        """A member has destroyed its handle; the group is let go with the last one.

        Not before all have had one: a rank may send, and end, before its peer begins.
        """
        group.members.discard(index)
        if not group.members and not group.awaited:
            self.groups.pop((group.name, group.ranks), None)

    def begin(self, schedule: Schedule) -> None:
        """Before a run: follow this schedule until `reset`, and count operations from 0."""
        for group in self.groups.values():
            group.renumber()
        if schedule.late:
            self._late = LateDelivery(
                self.fail,
                lambda flight, change: reports.changed(self, flight, change),
                lambda flight, operation, group: reports.passed_on(self, flight, operation, group),
            )

    def collective(self, group: Group, index: int, call: Call) -> FoldedWork:
        """Start a collective for the member at `index`; the last member to call carries it out."""
        self.baton.preempt()
        call.site = self.sites.here()
        call.sequence = group.next[index]
        group.next[index] += 1
        slot = group.slots.get(call.sequence)
        if slot is None:
            slot = group.slots[call.sequence] = Slot()
        outputs = [t for bucket in call.outputs for t in bucket]
        work = FoldedWork(self.baton, call.rank, outputs, call, group, self._alive)
        slot.calls[index] = call
        slot.works[index] = work
        if self._late is not None:
            self._late.call(work, call, group)
        if len(slot.calls) == len(group.ranks):
            members = range(len(group.ranks))
            self._complete(
                group, [slot.calls[i] for i in members], [slot.works[i] for i in members]
            )
            del group.slots[call.sequence]
            for each in slot.works.values():
                each.finish()
        return work

    def post(self, group: Group, post: Post) -> FoldedWork:
        """Post a send or a receive, and deliver the message that it completes, if any.

        A send's payload is copied at once. Under plain delivery its buffer is free again then.
        """
        self.baton.preempt()
        post.site = self.sites.here()
        outputs = [] if post.op == "send" else [post.tensor]
        work = FoldedWork(self.baton, post.rank, outputs, post, group, self._alive)
        post.work = work
        if post.op == "send":
            buffer = post.original = post.tensor
            post.tensor = copy_of(buffer)
            if self._late is not None:
                self._late.send(work, post, group, buffer)
        elif self._late is not None:
            self._late.receive(work, post, group)
        pair = group.mailbox.post(post)
        if pair is not None:
            self._deliver(group, *pair)
        elif post.op == "send" and not self._rendezvous_sends:
            work.finish()
        return work

    def fail(self, failure: SimError) -> NoReturn:
        """Break the run: record why, and unwind this rank; the world unwinds the others."""
        if not failure.ranks:
            failure = type(failure)(failure.headline, reports.of_ranks(self))
        self.failure = self.failure or failure
        self.baton.aborting = True
        raise RankAborted

    def break_run(self, failure: SimError) -> NoReturn:
        """Break the run from a thread that is no rank, which gets the failure raised."""
        self.failure = self.failure or failure
        self.baton.aborting = True
        raise failure

    def check_drained(self) -> None:
        """Check that nothing is pending once all ranks are done.

        Raises:
            Undelivered: a message that nobody received, a receive that nothing matched, or a
                collective that some members called and none waited for.
        """
        left = reports.pending(self)
        if left:
            count = "an operation" if len(left) == 1 else f"{len(left)} operations"
            raise Undelivered(f"all ranks are done, but {count} never completed", left)

    def rank_ends(self, rank: int) -> None:
        """The program of `rank` has come to its end."""
        if self._late is not None:
            self._late.end(rank)

    def reset(self) -> None:
        """After a run: let go of handles that nobody waited for, and deliver plainly again."""
        self._alive.clear()
        self._late = None

    def _complete(self, group: Group, calls: list[Call], works: list[FoldedWork]) -> None:
        collective = COLLECTIVES[calls[0].op]
        wrong = disagreement(calls) or collective.check(calls)
        if wrong:
            self.fail(Mismatch(f"mismatch on {group}: {wrong}"))
        if self._late is not None:
            self._late.verify(works)
        for observer in self._observers:
            observer.collective(group, calls)
        late = self._late
        _write_outputs(collective, calls if late is None else late.carried_out(calls, works))
        self.ledger.append(entry_of(group, calls, collective.moved(calls)))

    def _deliver(self, group: Group, send: Post, recv: Post) -> None:
        sent, buffer = send.tensor, recv.tensor
        if wrong := unlike(send, recv):
            headline = f"mismatch on {group}: {wrong}"
            now = {send.rank: (send, group), recv.rank: (recv, group)}
            self.fail(Mismatch(headline, reports.of_ranks(self, now=now)))
        for observer in self._observers:
            observer.message(group, send, recv)
        send.original = None
        flight = None if recv.work is None else recv.work.flight
        if flight is None:
            write(buffer, sent)
        else:
            flight.landing = [(buffer, sent)]
            flight.sender = None if send.work is None else send.work.flight
        self.ledger.append(message_entry(group, send, recv))
        if recv.work is not None:
            recv.work.source = send.source
        for post in (send, recv):
            if post.work is not None and not post.work.done:
                post.work.finish()


def unlike(send: Post, recv: Post) -> str | None:
    """What a send and the receive that takes it disagree on, in one line."""
    sent, buffer = send.tensor, recv.tensor
    if sent.numel() == buffer.numel() and sent.dtype == buffer.dtype:
        return None
    return (
        f"rank {send.rank} sends {describe(sent)}, but rank {recv.rank} expects {describe(buffer)}"
    )


def message_entry(group: Group, send: Post, recv: Post) -> Entry:
    """The ledger's entry of a message."""
    sent = send.tensor
    return Entry(
        op="send",
        group=group.label,
        ranks=(send.rank, recv.rank),
        sequence=send.sequence,
        dtype=dtype_name(sent.dtype),
        shapes=((sent.shape,), (recv.tensor.shape,)),
        bytes=sent.numel() * sent.element_size(),
        detail=f"tag {send.tag}" if send.tag else "",
        sites=(send.site, recv.site),
    )


def entry_of(group: Group, calls: Sequence[Call], moved: int) -> Entry:
    """The ledger's entry of a collective, of which `moved` bytes crossed between ranks."""
    first = calls[0]
    operands = first.operands()
    if first.op in UNEVEN:
        by_rank = tuple(tuple([t.shape for t in call.operands()]) for call in calls)
    else:
        by_rank = (tuple([t.shape for t in operands]),) * len(calls)
    root = "" if first.root_rank is None else f"root {first.root_rank}"
    return Entry(
        op=first.op,
        group=group.label,
        ranks=group.ranks,
        sequence=first.sequence,
        dtype=dtype_name(operands[0].dtype) if operands else "",
        shapes=by_rank,
        bytes=moved,
        detail=str(first.reduction) if first.reduction else root,
        sites=tuple([call.site for call in calls]),
    )


def _write_outputs(collective: Collective, calls: list[Call]) -> None:
    """Carry out a collective in a mode in which the transport may write into all its outputs.

    A caller's autograd must not see the writes, as it does not see NCCL's; and tensors made in
    inference mode can only be written to in it, whatever mode the writing rank is in.
    """
    if any(t.is_inference() for call in calls for bucket in call.outputs for t in bucket):
        with torch.inference_mode():
            collective.run(calls)
        return
    # As torch.no_grad() does, at a tenth of its cost.
    recording = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    try:
        collective.run(calls)
    finally:
        torch._C._set_grad_enabled(recording)
