"""properties: what must hold of a run, and the verdicts when it does not.

| file | what it is |
|---|---|
| verdict.py | `Verdict`: what was checked, whether it holds, where and why not |
| placement.py | the full value behind the ranks' local ones |
| explain.py | what wrong values look like: the likely cause |
| oracle.py | each tap against the float64 reference, within its derived bound |
| replication.py | what is declared replicated is the same bits on every rank, also across stages |
"""

from properties.oracle import TapVerdict, compare_taps
from properties.placement import Placement, PlacementError
from properties.replication import same_across_ranks, same_across_stages
from properties.verdict import Verdict

__all__ = [
    "Placement",
    "PlacementError",
    "TapVerdict",
    "Verdict",
    "compare_taps",
    "same_across_ranks",
    "same_across_stages",
]
