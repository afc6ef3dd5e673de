"""The ranks' journals put together: what completed, what is pending, and who disagrees.

The calls of all ranks meet here a second time, after gloo carried them out or while it tries to,
and are held to the same rules as at the folded rendezvous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..agreement import disagreement
from ..calls import Call
from ..collectives import COLLECTIVES
from ..errors import RankReport
from ..fabric import Group, Slot, entry_of, message_entry, unlike
from ..ledger import Entry, canonical
from ..mailbox import Post
from .journal import (
    CallNote,
    Done,
    GroupNote,
    Note,
    PostNote,
    Reader,
    ToldSite,
    Waits,
    as_buckets,
    as_tensor,
)

Operation = Call | Post
_SHOWN = 3
"""Operations that a report on a dead rank shows."""


@dataclass
class _Rank:
    """What one rank has noted."""

    reader: Reader
    groups: dict[int, Group] = field(default_factory=dict)
    operations: list[tuple[Operation, Group]] = field(default_factory=list)
    waits_in: int | None = None
    """The number of the operation that it waits in."""


class Replay:
    """Follows the journals of one run."""

    def __init__(self, readers: Sequence[Reader]) -> None:
        self.entries: list[Entry] = []
        self.mismatch: str | None = None
        """The first disagreement, in one line."""
        self._ranks = [_Rank(reader) for reader in readers]
        self._groups: dict[tuple[str, tuple[int, ...]], Group] = {}
        self._complete: set[int] = set()
        """id of the operations that all their members have called."""

    def look(self) -> bool:
        """Read on; returns whether there was anything new."""
        news = False
        for rank, its in enumerate(self._ranks):
            for note in its.reader.news():
                news = True
                self._take(rank, its, note)
        return news

    @property
    def whole(self) -> bool:
        """Whether every journal was read to its end."""
        return all(its.reader.whole for its in self._ranks)

    def ledger(self) -> list[Entry]:
        """What completed, in canonical order: over gloo nobody knows which group came first."""
        return canonical(self.entries)

    def stuck(self, rank: int) -> bool:
        """Whether a rank waits in an operation that some member has not called yet."""
        its = self._ranks[rank]
        if its.waits_in is None:
            return False
        return id(its.operations[its.waits_in][0]) not in self._complete

    def waits(self, rank: int) -> bool:
        """Whether a rank waits in an operation."""
        return self._ranks[rank].waits_in is not None

    def partial_disagreement(self) -> str | None:
        """What those disagree on who have called an operation that others have not."""
        for group in self._groups.values():
            for slot in group.slots.values():
                wrong = disagreement([slot.calls[i] for i in sorted(slot.calls)])
                if wrong:
                    return f"mismatch on {group}: {wrong}"
        return None

    def pending(self) -> tuple[RankReport, ...]:
        """What is left when all ranks are done."""
        left = []
        for group in self._groups.values():
            for slot in group.slots.values():
                left += [_report(c.rank, "left", c, group, "") for c in slot.calls.values()]
            for post in group.mailbox.sends:
                left.append(_report(post.rank, "left", post, group, "nobody received it"))
            for post in group.mailbox.recvs:
                left.append(_report(post.rank, "left", post, group, "nothing was sent to it"))
        return tuple(sorted(left, key=lambda report: report.rank))

    def report(self, rank: int, state: str, detail: str = "") -> RankReport:
        """What a rank does: the operation it waits in, else its last one as a part of the detail.

        Args:
            rank: global rank.
            state: what it does if it waits in nothing: "runs", "has finished", "raised", "died".
            detail: what is wrong with it.
        """
        its = self._ranks[rank]
        if its.waits_in is not None and state not in ("raised", "has finished"):
            operation, group = its.operations[its.waits_in]
            before = self._before(rank, its.waits_in)
            said = "waits in" if state == "runs" else f"{state} in"
            return _report(rank, said, operation, group, "; ".join(filter(None, (detail, before))))
        said = detail
        if state in ("died", "hangs"):
            said = "; ".join(filter(None, (detail, self._before(rank, len(its.operations)))))
        return RankReport(rank=rank, state=state, detail=said)

    def _before(self, rank: int, number: int) -> str:
        last = self._ranks[rank].operations[max(0, number - _SHOWN) : number]
        if not last:
            return ""
        shown = (f"{operation} on {group} at {operation.site}" for operation, group in last)
        return "before: " + ", ".join(shown)

    def _take(self, rank: int, its: _Rank, note: Note) -> None:
        if isinstance(note, GroupNote):
            group = self._groups.setdefault((note.name, note.ranks), Group(note.name, note.ranks))
            group.label = note.label
            its.groups[note.number] = group
        elif isinstance(note, CallNote):
            self._call(rank, its, note)
        elif isinstance(note, PostNote):
            self._post(rank, its, note)
        elif isinstance(note, Waits):
            its.waits_in = note.operation
        elif isinstance(note, Done) and its.waits_in == note.operation:
            its.waits_in = None

    def _call(self, rank: int, its: _Rank, note: CallNote) -> None:
        group = its.groups[note.group]
        call = Call(
            op=note.op,
            rank=rank,
            inputs=as_buckets(note.inputs),
            outputs=as_buckets(note.outputs),
            reduction=note.reduction,
            root=note.root,
            root_rank=None if note.root is None else group.ranks[note.root],
            in_splits=note.splits[0],
            out_splits=note.splits[1],
            blocking=note.blocking,
            site=ToldSite(note.frames),
            sequence=note.sequence,
        )
        if note.blocking:
            its.waits_in = len(its.operations)
        its.operations.append((call, group))
        slot = group.slots.setdefault(note.sequence, Slot())
        slot.calls[note.index] = call
        if len(slot.calls) == len(group.ranks):
            del group.slots[note.sequence]
            self._met(group, [slot.calls[i] for i in range(len(group.ranks))])

    def _met(self, group: Group, calls: list[Call]) -> None:
        collective = COLLECTIVES[calls[0].op]
        wrong = disagreement(calls) or collective.check(calls)
        if wrong:
            self.mismatch = self.mismatch or f"mismatch on {group}: {wrong}"
            return
        self._complete.update(map(id, calls))
        self.entries.append(entry_of(group, calls, collective.moved(calls)))

    def _post(self, rank: int, its: _Rank, note: PostNote) -> None:
        group = its.groups[note.group]
        post = Post(
            note.op,
            rank,
            note.source,
            note.destination,
            note.tag,
            as_tensor(note.shape, note.dtype),
            note.peer,
            site=ToldSite(note.frames),
        )
        its.operations.append((post, group))
        pair = group.mailbox.post(post)
        if pair is None:
            return
        if wrong := unlike(*pair):
            self.mismatch = self.mismatch or f"mismatch on {group}: {wrong}"
            return
        self._complete.update(map(id, pair))
        self.entries.append(message_entry(group, *pair))


def _report(rank: int, state: str, operation: Operation, group: Group, detail: str) -> RankReport:
    return RankReport(
        rank=rank,
        state=state,
        operation=str(operation),
        group=str(group),
        sequence=operation.sequence,
        site=str(operation.site),
        detail=detail,
    )
