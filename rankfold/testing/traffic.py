"""`assert_ledger`: each rank took part in exactly the operations that the test names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

from sim import Entry, Ledger, Topology

_SHOWN = 12
"""Operations that a failure lists."""


class _HasLedger(Protocol):
    @property
    def ledger(self) -> Ledger: ...

    @property
    def size(self) -> int: ...

    @property
    def topology(self) -> Topology: ...


def assert_ledger(
    world: _HasLedger,
    *,
    group: str | None = None,
    ranks: Iterable[int] | None = None,
    order: Sequence[str] | None = None,
    bytes: int | None = None,
    **counts: int,
) -> None:
    """Fail unless each rank took part in exactly these operations, and in no others.

    Args:
        world: a world; clear its ledger (`world.ledger.clear()`) to judge only what follows.
        group: only operations on groups of this name, such as "tp"; by default all.
        ranks: only these global ranks; by default all of the world.
        order: the ops of each rank, in order; or give `counts`.
        bytes: bytes that the operations moved between ranks, in all, by the ring algorithm.
        counts: how many of each op each rank took part in, such as `all_reduce=1`. A message
            counts as a "send" at its source and a "recv" at its destination.

    Raises:
        AssertionError: they did not; the message has a table by rank, and what happened where.
        ValueError: a rank or a group that the world does not have, or both an order and counts.
    """
    __tracebackhide__ = True
    if order is not None and counts:
        raise ValueError("give an order or counts: an order counts already")
    chosen = [*range(world.size)] if ranks is None else [*ranks]
    if unknown := [rank for rank in chosen if not 0 <= rank < world.size]:
        raise ValueError(f"ranks {unknown}: the world has ranks 0 to {world.size - 1}")
    labels = {entry.group for entry in world.ledger.entries}
    axes = {f"{axis}{suffix}" for axis in world.topology.groups for suffix in ("", ".cpu")}
    if group is not None and group not in labels | axes:
        raise ValueError(
            f"no group {group!r}; the ledger has {', '.join(sorted(labels)) or 'none'}"
        )
    entries = [
        entry
        for entry in world.ledger.entries
        if (group is None or entry.group == group) and set(entry.ranks) & set(chosen)
    ]
    happened = {rank: [op for e in entries if (op := _part(e, rank))] for rank in chosen}
    on = f"the ledger of {group}" if group else "the ledger"
    wanted = Counter({op: n for op, n in counts.items() if n} if order is None else order)
    wrong = [rank for rank, ops in happened.items() if Counter(ops) != wanted]
    if wrong:
        table = _table(wanted, happened)
        said = f"{on} is not as expected on {_named(wrong)}"
        raise AssertionError("\n".join([said, *table, *_listing(entries, group, world.ledger)]))
    if order is not None:
        for rank, ops in happened.items():
            if ops != [*order]:
                said = f"{on} has another order on rank {rank}"
                rows = [f"  expected: {', '.join(order)}", f"  happened: {', '.join(ops)}"]
                raise AssertionError(
                    "\n".join([said, *rows, *_listing(entries, group, world.ledger)])
                )
    moved = sum(entry.bytes for entry in entries)
    if bytes is not None and moved != bytes:
        said = f"{on} moved {moved:,} bytes, expected {bytes:,}"
        raise AssertionError("\n".join([said, *_listing(entries, group, world.ledger)]))


def _part(entry: Entry, rank: int) -> str:
    """What a rank did in an operation; "" if it took no part."""
    if rank not in entry.ranks:
        return ""
    return "recv" if entry.op == "send" and rank != entry.ranks[0] else entry.op


def _table(wanted: Counter[str], happened: dict[int, list[str]]) -> list[str]:
    """Expected and actual counts, with one column for the ranks that did the same."""
    alike: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for rank, ops in happened.items():
        alike.setdefault(tuple(sorted(Counter(ops).items())), []).append(rank)
    columns = [("expected", wanted)] + [(_named(r), Counter(dict(c))) for c, r in alike.items()]
    ops = sorted({op for _, count in columns for op in count})
    wide = max(map(len, ["op", *ops]))
    lines = ["  " + "  ".join(["op".ljust(wide), *(title for title, _ in columns)])]
    for op in ops:
        cells = [str(count[op]).rjust(len(title)) for title, count in columns]
        lines.append("  " + "  ".join([op.ljust(wide), *cells]))
    return lines


def _named(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks == [*range(ranks[0], ranks[-1] + 1)]:
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return "ranks " + ", ".join(map(str, ranks))


def _listing(entries: list[Entry], group: str | None, ledger: Ledger) -> list[str]:
    """What happened, in order, with source lines."""
    if not entries:
        groups = sorted({entry.group for entry in ledger.entries})
        have = f"; the ledger has groups {', '.join(groups)}" if groups and group else ""
        return [f"  nothing happened there{have}"]
    lines = ["  what happened, in order:"]
    for entry in entries[:_SHOWN]:
        site = next((str(site) for site in entry.sites if str(site)), "")
        detail = f"({entry.detail})" if entry.detail else ""
        shapes = ", ".join(str([*shape]) for shape in entry.shapes[0])
        arrow = " to ".join(map(str, entry.ranks)) if entry.op == "send" else [*entry.ranks]
        what = f"{entry.op}{detail} {entry.dtype}{shapes} on {entry.group} {arrow}"
        lines.append(f"    {what}" + (f" at {site}" if site else ""))
    more = len(entries) - _SHOWN
    return [*lines, f"    ... and {more} more"] if more > 0 else lines
