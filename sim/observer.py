"""What may watch a world's traffic: it is shown every operation with all ranks' operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from .calls import Call
from .mailbox import Post

if TYPE_CHECKING:
    from .fabric import Group


class Observer(Protocol):
    """Sees operations as they are carried out; it must change no tensor.

    It is called on the thread of the rank that completes an operation. What it raises is that
    rank's error, so it had better collect than raise.
    """

    def collective(self, group: Group, calls: Sequence[Call]) -> None:
        """A collective on which all ranks agree, before its outputs are written.

        calls: one for each member, in group order.
        """
        ...

    def message(self, group: Group, send: Post, recv: Post) -> None:
        """A message that has found its receive, before it is written there."""
        ...
