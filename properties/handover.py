"""A hand-over is right if the receiver's caches hold, bit for bit, what the sender's held.

Heads and layers have the same names on both sides, whatever the degrees, pages and stages: so each
rank of the receiver is compared with a rank of the sender that has the head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from properties.explain import Diagnosis
from properties.verdict import Verdict
from sim.buffers import same_bits

NAME = "hand-over"


@dataclass(frozen=True, kw_only=True, eq=False)
class Content:
    """What both sides hold of a request, of one head of one layer."""

    layer: str
    head: int
    rank: int
    """Of the receiver."""
    sent: torch.Tensor
    """[tokens, features], of the sender."""
    received: torch.Tensor
    """[tokens, features], of the receiver."""


def handed_over(by_request: Mapping[str, Sequence[Content]]) -> Verdict:
    """Every hand-over brought every token of every head, and nothing else.

    by_request: what both sides held when it was whole, by the request's name.
    """
    for request, contents in by_request.items():
        for content in contents:
            if same_bits(content.sent, content.received):
                continue
            found = _diagnosed(content, contents, by_request)
            rows = tuple(_wrong_rows(content))
            return Verdict(
                name=NAME,
                ok=False,
                what=f"{request}: {found.text}",
                where=f"{content.layer}, head {content.head}, rank {content.rank}, tokens "
                f"{_some(rows)}",
                why="the receiver decodes with other keys and values than were prefilled",
                kind=found.kind,
                at=content.layer,
                rows=rows,
            )
    heads = sum(map(len, by_request.values()))
    return Verdict(
        name=NAME,
        ok=True,
        what=f"{len(by_request)} hand-overs brought the sender's bits: {heads} heads of caches are "
        "the same on both sides",
    )


def _diagnosed(
    content: Content, contents: Sequence[Content], by_request: Mapping[str, Sequence[Content]]
) -> Diagnosis:
    rows = _wrong_rows(content)
    wrong = content.received[rows]
    lost = [row for row in rows if bool(content.received[row].isnan().any())]
    if lost:
        text = f"{len(lost)} of {len(content.sent)} tokens did not arrive"
        return Diagnosis(kind="missing", text=text)
    for other in contents:
        if other.sent.shape == content.sent.shape and same_bits(other.sent[rows], wrong):
            if other.layer == content.layer:
                return Diagnosis(kind="wrong heads", text=f"has what head {other.head} is")
            return Diagnosis(kind="wrong layer", text=f"has what {other.layer} holds")
    places = [_place(content.sent, row) for row in wrong]
    if all(place is not None for place in places):
        return Diagnosis(kind="duplicated", text=f"has there what tokens {_some(places)} are")
    for name, others in by_request.items():
        for other in others:
            same = (other.layer, other.head) == (content.layer, content.head)
            if others is not contents and same and _place(other.sent, wrong[0]) is not None:
                return Diagnosis(kind="stale", text=f"has there what {name} holds")
    return Diagnosis(kind="unknown", text="has there what was never sent")


def _wrong_rows(content: Content) -> list[int]:
    pairs = enumerate(zip(content.sent, content.received, strict=True))
    return [row for row, (mine, theirs) in pairs if not same_bits(mine, theirs)]


def _place(rows: torch.Tensor, row: torch.Tensor) -> int | None:
    """Which of the rows is this one."""
    return next((i for i, each in enumerate(rows) if same_bits(each, row)), None)


def _some(rows: Sequence[int | None]) -> str:
    shown = ", ".join(str(row) for row in rows[:8])
    return shown + (", ..." if len(rows) > 8 else "")
