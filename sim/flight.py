"""An operation in flight under late delivery: whose buffers it has, and what it has yet to write.

From the call until the rank has seen the operation complete, its buffers belong to the transport:
it may read the inputs and write the outputs at any moment in between. So the caller may not write
to either, and may not read the outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

import torch

from .buffers import bits, write
from .calls import Call
from .mailbox import Post


@dataclass(slots=True)
class Guard:
    """A buffer that nobody may write to for a while."""

    tensor: torch.Tensor
    before: torch.Tensor
    """Its bits then."""
    written: bool
    """Whether the operation writes to it, so that nobody may read it either."""
    storage: int
    """Bytes of the storage; less of them means that the memory was given away."""

    @classmethod
    def of(cls, tensor: torch.Tensor, *, written: bool) -> Guard:
        """Guard a tensor from now on."""
        return cls(tensor, bits(tensor).clone(), written, tensor.untyped_storage().nbytes())

    def change(self) -> str | None:
        """What has changed, in words; None if nothing has."""
        if self.tensor.untyped_storage().nbytes() < self.storage:
            return "its memory was freed"
        now = bits(self.tensor)
        if torch.equal(now, self.before):
            return None
        changed = (now != self.before).nonzero()
        count = f"{len(changed)} of {now.numel()} elements changed"
        return f"{count}, the first at {changed[0].tolist()}" if now.dim() else "its value changed"


@dataclass(slots=True, eq=False)
class Flight:
    """One rank's part in an operation, until the rank has seen it complete."""

    operation: Call | Post
    group: object
    guards: list[Guard]
    reused: Callable[[Flight, str], NoReturn]
    """Breaks the run: a guarded buffer was changed, in these words."""
    landing: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """(output, its value): what is written when the rank sees the operation complete."""
    sender: Flight | None = None
    """The send that a receive has taken, as long as that is in flight too."""
    ended: bool = False
    """Whether the rank has ended, after which nothing waits any more to be seen."""
    asked: bool = False
    """Whether the rank has been told once that the operation, though complete, is not."""

    def verify(self) -> None:
        """Check that no guarded buffer has changed."""
        for guard in self.guards:
            change = guard.change()
            if change is not None:
                self.reused(self, change)

    def settle(self) -> None:
        """Check for the last time: the caller cannot, or may, write to the buffers from here on."""
        self.verify()
        self.guards = []

    def land(self) -> None:
        """Deliver: the rank sees the operation complete."""
        self.settle()
        if self.sender is not None:
            # Had the data left any later, the receiver could not have it now.
            self.sender.settle()
        for target, value in self.landing:
            write(target, value)
        self.landing = []
