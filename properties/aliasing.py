"""What must survive is not overwritten before its last use, on any rank.

`model.survival` watches a step: the inputs that the parts of an MoE block share, aux hidden states
from their capture until they are handed on, the batch and the weights. A verdict rests on bits
that changed under a reader, never on memory that is merely shared.
"""

from __future__ import annotations

from collections.abc import Sequence

from model.survival import Overwritten
from properties.verdict import Verdict

_NAME = "aliasing"


def inputs_survive(overwritten: Sequence[Sequence[Overwritten]]) -> Verdict:
    """Judge a step.

    Args:
        overwritten: what each rank's watch has found, by rank, each in program order.
    """
    first = next((found[0] for found in overwritten if found), None)
    if first is None:
        return Verdict(
            name=_NAME,
            ok=True,
            what=f"no input, aux hidden state or weight was overwritten on {len(overwritten)} "
            "ranks before its last use",
        )
    same = (first.value, first.at)
    ranks = [r for r, found in enumerate(overwritten) if same in {(f.value, f.at) for f in found}]
    others = len({(f.value, f.at) for found in overwritten for f in found}) - 1
    rows = f", rows {', '.join(map(str, first.rows[:8]))}" if first.rows else ""
    more = f"; later values that were overwritten: {others}" if others else ""
    return Verdict(
        name=_NAME,
        ok=False,
        what=f"{first.value} is overwritten before {first.at} reads it",
        where=f"{first.at}, ranks {ranks}{rows}",
        why=f"its memory was written by {first.by}{more}",
        kind="overwritten",
        at=first.at if first.at.startswith("layers.") else _as_tap(first.value),
    )


def _as_tap(value: str) -> str:
    """The tap that shows a value: "aux.2" for "aux hidden state 2"."""
    return value.replace("aux hidden state ", "aux.")
