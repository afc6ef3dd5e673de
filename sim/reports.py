"""What each rank was doing, put into words, when a run broke."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .agreement import disagreement
from .calls import Call
from .callsite import CallSites, short_path
from .errors import BufferReuse, Deadlock, Mismatch, RankReport, SimError
from .flight import Flight
from .mailbox import Post
from .work import FoldedWork

if TYPE_CHECKING:
    from .fabric import Fabric, Group


def stuck(fabric: Fabric) -> SimError:
    """Why no rank can run: a mismatch if the ranks of a group disagree, else a deadlock."""
    for group in fabric.groups.values():
        for slot in group.slots.values():
            wrong = disagreement([slot.calls[i] for i in sorted(slot.calls)])
            if wrong:
                return Mismatch(f"mismatch on {group}: {wrong}", of_ranks(fabric))
    waiting = [rank for rank, work in enumerate(fabric.baton.waiting) if work is not None]
    who = f"ranks {_list(waiting)} wait" if len(waiting) > 1 else f"rank {waiting[0]} waits"
    ended = [rank for rank in range(fabric.baton.size) if rank not in waiting]
    finished = f"; {'ranks' if len(ended) > 1 else 'rank'} {_list(ended)} finished" if ended else ""
    return Deadlock(
        f"deadlock: {who} for calls that nobody can make any more{finished}", of_ranks(fabric)
    )


def of_ranks(
    fabric: Fabric,
    details: Mapping[int, str] | None = None,
    now: Mapping[int, tuple[Post, Group]] | None = None,
) -> tuple[RankReport, ...]:
    """What each rank does: the operation it waits in, or the last one it started.

    Args:
        fabric: the transport.
        details: what is wrong with a rank, by rank.
        now: posts that ranks are in the middle of.
    """
    latest: dict[int, tuple[Call | Post, Group]] = {}
    for group in fabric.groups.values():
        for slot in group.slots.values():
            for call in slot.calls.values():
                latest[call.rank] = (call, group)
    lines = []
    for rank in range(fabric.baton.size):
        detail = (details or {}).get(rank, "")
        work = fabric.baton.waiting[rank]
        if isinstance(work, FoldedWork):
            lines.append(_report(rank, "waits in", work.operation, work.group, detail))
        elif now and rank in now:
            lines.append(_report(rank, "is in", *now[rank], detail))
        elif work is not None:
            lines.append(RankReport(rank=rank, state=f"waits for {work}", detail=detail))
        elif not fabric.baton.running[rank]:
            state = "raised" if detail else "has finished"
            lines.append(RankReport(rank=rank, state=state, detail=detail))
        elif rank in latest:
            lines.append(_report(rank, "is in", *latest[rank], detail))
        else:
            lines.append(RankReport(rank=rank, state="runs", detail=detail))
    return tuple(lines)


def changed(fabric: Fabric, flight: Flight, change: str) -> BufferReuse:
    """A rank changed a buffer that an operation had in flight; `change` says how."""
    operation, rank = flight.operation, flight.operation.rank
    headline = (
        f"rank {rank} changed a buffer of {operation} on {flight.group}, called at "
        f"{operation.site}, while it was in flight: {change}; wait for its handle first, or give "
        "it a copy"
    )
    report = _report(rank, "changed a buffer of", operation, flight.group, change)
    return BufferReuse(headline, _with(fabric, report))


def passed_on(fabric: Fabric, flight: Flight, operation: Call | Post, group: object) -> BufferReuse:
    """A rank passed to `operation`, on `group`, a buffer that another one had in flight."""
    holder, rank = flight.operation, operation.rank
    headline = (
        f"rank {rank} passed to {operation} on {group}, called at {operation.site}, a buffer that "
        f"its {holder} on {flight.group}, called at {holder.site}, had in flight; wait for that "
        "handle first, or pass a copy"
    )
    detail = f"its {holder} at {holder.site} has it"
    report = _report(rank, "passed a buffer in flight to", operation, group, detail)
    return BufferReuse(headline, _with(fabric, report))


def in_a_line(error: BaseException, sites: CallSites) -> str:
    """An error with the innermost line of the caller's code that it passed."""
    frames = traceback.extract_tb(error.__traceback__)
    callers = [frame for frame in frames if sites.is_caller(frame.filename)] or frames
    where = f" at {short_path(callers[-1].filename)}:{callers[-1].lineno}" if callers else ""
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}{where}"


def _with(fabric: Fabric, report: RankReport) -> tuple[RankReport, ...]:
    """What each rank does, with this report for its rank."""
    return tuple(report if r.rank == report.rank else r for r in of_ranks(fabric))


def pending(fabric: Fabric) -> tuple[RankReport, ...]:
    """What is left in the transport when all ranks are done."""
    left = []
    for group in fabric.groups.values():
        for slot in group.slots.values():
            left += [_report(c.rank, "left", c, group, "") for c in slot.calls.values()]
        for post in group.mailbox.sends:
            left.append(_report(post.rank, "left", post, group, "nobody received it"))
        for post in group.mailbox.recvs:
            left.append(_report(post.rank, "left", post, group, "nothing was sent to it"))
    return tuple(sorted(left, key=lambda report: report.rank))


def _report(rank: int, state: str, operation: object, group: object, detail: str) -> RankReport:
    assert isinstance(operation, Call | Post)
    return RankReport(
        rank=rank,
        state=state,
        operation=str(operation),
        group="" if group is None else str(group),
        sequence=operation.sequence,
        site=str(operation.site),
        detail=detail,
    )


def _list(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
