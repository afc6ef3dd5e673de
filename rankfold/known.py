"""Known findings: faults of released versions of vLLM that a search meets again and again.

A search that stops at the same fault every time finds nothing else. A known finding is counted and
shown, never hidden: `rankfold check` fails on it as on any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rankfold.options import Options


@dataclass(frozen=True, kw_only=True)
class Known:
    """A fault of the code under test that is known, and how to tell it from others."""

    name: str
    what: str
    """The mechanism, in one line."""
    show: str
    """The command that shows it."""
    possible: Callable[[Options], bool]
    """Whether these options can show it."""
    is_it: Callable[[str, str], bool]
    """Whether a tap that is wrong in this class (tap, class) is this fault and nothing else."""


KNOWN: Sequence[Known] = (
    Known(
        name="partial aux at one stage",
        what="vLLM takes EAGLE-3's aux hidden states before the layer's output is reduced, at one "
        "pipeline stage and TP > 1",
        show="rankfold check tp2 --aux 1",
        possible=lambda o: (
            bool(o.aux) and o.topology.pp == 1 and o.topology.tp > 1 and not o.shards_stream
        ),
        # In low precision the bound may be as large as what is missing; the ranks differ even so.
        is_it=lambda tap, kind: (
            tap.startswith("aux.") and kind in ("reduction missing", "ranks differ")
        ),
    ),
)


def known_of(options: Options, wrong: Iterable[tuple[str, str]]) -> dict[str, Known]:
    """The known findings among wrong taps, each given with its class of fault; by tap."""
    candidates = [known for known in KNOWN if known.possible(options)]
    return {tap: known for tap, kind in wrong for known in candidates if known.is_it(tap, kind)}
