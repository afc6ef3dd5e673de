"""What the ledger alone says of a step, beyond the agreement that every operation is held to.

`same_messages` is a check. `dispatched` is information: to send a token to its experts from
several ranks costs time, and changes no value.

Rules that were tried and left out, because right programs break them: that layers of one kind have
the same operations (a first launch of MegaMoE has barriers that later ones lack, and the first
layer of a stage finishes no reduction of the layer before), and that messages have the same sizes
on all TP ranks (slices may be uneven). Which key a message carries is not in the ledger; that each
stage got what was sent under the same key is `same_across_stages`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from properties.verdict import Verdict
from sim import Entry, Topology

_NAME = "messages"
_COUNTS = ("int64", "int32")
"""Dtypes in which row counts travel, and not rows."""


def same_messages(topology: Topology, entries: Sequence[Entry]) -> Verdict:
    """All TP ranks of a stage that send tensors to the next stage send the same ones, in order.

    Compared are dtype and tag. A TP rank that sends nothing is left out: its peers may send for
    it. Objects (bytes, and their lengths) are left out too.

    Args:
        topology: the ranks' layout.
        entries: of one step.
    """
    sent: dict[tuple[int, int], list[Entry]] = {}
    for entry in entries:
        if entry.op == "send" and entry.dtype != "uint8":
            source, destination = entry.ranks
            if not _is_length(entry):
                sent.setdefault((source, destination), []).append(entry)
    count = 0
    for channels in _parallel(topology, sent):
        lists = {channel: [(e.dtype, e.detail) for e in sent[channel]] for channel in channels}
        count += sum(map(len, lists.values()))
        first = channels[0]
        odd = next((c for c in channels if lists[c] != lists[first]), None)
        if odd is not None:
            return _differ(first, odd, sent[first], sent[odd])
    return Verdict(
        name=_NAME, ok=True, what=f"{count} messages are the same for all TP ranks of a stage"
    )


def _is_length(entry: Entry) -> bool:
    """Whether this is the length of an object that follows."""
    return entry.dtype == "int64" and entry.shapes[0] == ((1,),)


def _parallel(
    topology: Topology, sent: dict[tuple[int, int], list[Entry]]
) -> Iterator[list[tuple[int, int]]]:
    """The channels in use between the same two stages, of the ranks of one TP group."""
    for group in topology.groups["tp"]:
        stages: dict[int, list[tuple[int, int]]] = {}
        for source, destination in sent:
            if source in group:
                stage = topology.coordinates(destination)["pp"]
                stages.setdefault(stage, []).append((source, destination))
        for stage in sorted(stages):
            yield sorted(stages[stage])


def _differ(
    first: tuple[int, int], odd: tuple[int, int], ours: Sequence[Entry], theirs: Sequence[Entry]
) -> Verdict:
    same = 0
    for a, b in zip(ours, theirs, strict=False):
        if (a.dtype, a.detail) != (b.dtype, b.detail):
            break
        same += 1
    if same < len(ours) and same < len(theirs):
        why = f"message {same} is {_words(ours[same])} there and {_words(theirs[same])} here"
    else:
        why = f"rank {first[0]} sends {len(ours)} and rank {odd[0]} sends {len(theirs)}"
    longer = max(ours, theirs, key=len)
    site = str(longer[min(same, len(longer) - 1)].sites[0])
    return Verdict(
        name=_NAME,
        ok=False,
        what="the TP ranks of a stage send different messages to the next stage",
        where=f"rank {odd[0]} to {odd[1]}, against rank {first[0]} to {first[1]}, at {site}",
        why=f"{why}; each receiver takes its part of every tensor",
        kind="messages differ",
        at=f"send on {longer[0].group}",
    )


def _words(entry: Entry) -> str:
    return f"{entry.dtype}{f' with {entry.detail}' if entry.detail else ''}"


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """One exchange of tokens' rows over an expert-parallel group."""

    group: str
    ranks: tuple[int, ...]
    site: str
    """Source line of the first rank."""
    rows: int
    """Rows that all ranks sent, their own to themselves included."""
    needed: int
    """Tokens times the experts of each."""

    @property
    def factor(self) -> float:
        """How often each row is sent; 1 is right, TP means that every TP rank sends each token."""
        return self.rows / self.needed


def dispatched(entries: Sequence[Entry], tokens: int, top_k: int) -> list[Dispatch]:
    """The exchanges that send tokens more often than their experts need: waste, but no fault.

    Args:
        entries: of one step.
        tokens: of the batch, over the ranks of one EP group.
        top_k: experts of a token.

    Fewer rows than needed are no waste and not given: padded or dropped tokens are not sent.
    """
    needed = tokens * top_k
    found = []
    for entry in entries:
        if entry.op != "all_to_all_single" or entry.dtype in _COUNTS or not needed:
            continue
        rows = sum(shapes[0][0] for shapes in entry.shapes if shapes and shapes[0])
        if rows > needed:
            found.append(
                Dispatch(
                    group=entry.group,
                    ranks=entry.ranks,
                    site=str(entry.sites[0]),
                    rows=rows,
                    needed=needed,
                )
            )
    return found
