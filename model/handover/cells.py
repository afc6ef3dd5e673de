"""What has to go from which rank to which, for one request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from model.handover.layout import Held


class HandOverError(RuntimeError):
    """A hand-over that cannot be; the message is one line."""


@dataclass(frozen=True, kw_only=True, order=True)
class Cell:
    """Some tokens of one head of one layer, for one of the ranks that need them.

    Ranks are those of the sending and of the receiving world.
    """

    target: int
    layer: str
    head: int
    start: int
    stop: int
    """Tokens `start` to `stop - 1` of the request."""
    source: int

    def __str__(self) -> str:
        """In words, for reports."""
        return (
            f"tokens {self.start} to {self.stop - 1} of head {self.head} of {self.layer} from rank "
            f"{self.source} to rank {self.target}"
        )


def cells_of(
    tokens: int,
    sources: Mapping[int, Sequence[Held]],
    targets: Mapping[int, Sequence[Held]],
    piece: int,
) -> list[Cell]:
    """All cells of a request.

    Args:
        tokens: that the sending caches hold of it.
        sources: what each rank that has prefilled it holds.
        targets: what each rank that will decode it has to hold.
        piece: most tokens of a cell.

    Raises:
        HandOverError: a target needs what no source has.
    """
    cells = []
    for turn, (target, needed) in enumerate(targets.items()):
        for held in needed:
            for head in held.heads:
                have = [r for r, of in sources.items() if _holds(of, held.layer, head)]
                if not have:
                    raise HandOverError(
                        f"rank {target} needs head {head} of {held.layer}; none of the ranks "
                        f"{sorted(sources)} that prefilled has it"
                    )
                # Where several have it, the targets take turns, so that no copy goes unread.
                source = have[turn % len(have)]
                cells += [
                    Cell(
                        target=target,
                        layer=held.layer,
                        head=head,
                        start=start,
                        stop=min(start + piece, tokens),
                        source=source,
                    )
                    for start in range(0, tokens, piece)
                ]
    return cells


def _holds(held: Sequence[Held], layer: str, head: int) -> bool:
    return any(each.layer == layer and head in each.heads for each in held)
