"""Point-to-point messages: which receive takes which send.

Messages of one channel (group, source, destination, tag) are taken in the order they were posted.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch

from .calls import describe
from .callsite import NOWHERE, Site
from .work import FoldedWork


@dataclass(slots=True, eq=False)
class Post:
    """A posted send or receive."""

    op: str
    """"send" or "recv"."""
    rank: int
    """Global rank that posted it."""
    source: int | None
    """Rank in the group; None receives from any."""
    destination: int
    """Rank in the group."""
    tag: int
    tensor: torch.Tensor
    """A send's payload (its own copy), or the buffer to receive into."""
    peer: str
    """The other side by its global rank, for reports."""
    site: Site = NOWHERE
    sequence: int = 0
    work: FoldedWork | None = None
    """The poster's handle."""
    original: torch.Tensor | None = None
    """A send's tensor itself, until it is delivered, for observers; its sender may write to it."""

    def __str__(self) -> str:
        way = "to" if self.op == "send" else "from"
        tag = f", tag {self.tag}" if self.tag else ""
        return f"{self.op}({way} {self.peer}{tag}) {describe(self.tensor)}"

    def takes(self, other: Post) -> bool:
        """Whether this receive takes that send."""
        return (
            self.destination == other.destination
            and self.tag == other.tag
            and self.source in (None, other.source)
        )


class Mailbox:
    """Posts of one group that have not met their other half yet, in order of posting."""

    def __init__(self) -> None:
        self.sends: list[Post] = []
        self.recvs: list[Post] = []
        self._counts: defaultdict[tuple[str, int | None, int], int] = defaultdict(int)

    def renumber(self) -> None:
        """Count the posts of each channel from 0 again."""
        self._counts.clear()

    def post(self, new: Post) -> tuple[Post, Post] | None:
        """Add a post; return the (send, receive) pair that it completes, if any."""
        channel = (new.op, new.source, new.destination)
        new.sequence = self._counts[channel]
        self._counts[channel] += 1
        others = self.recvs if new.op == "send" else self.sends
        for i, other in enumerate(others):
            send, recv = (new, other) if new.op == "send" else (other, new)
            if recv.takes(send):
                del others[i]
                return send, recv
        (self.sends if new.op == "send" else self.recvs).append(new)
        return None
