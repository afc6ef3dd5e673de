"""properties: what must hold of a run, and the verdicts when it does not.

| file | what it is |
|---|---|
| verdict.py | `Verdict`: what was checked, whether it holds, where and why not |
| placement.py | the full value behind the ranks' local ones |
| recogniser.py | which placement the ranks' local values hold, or what is wrong with them |
| recogniser_case.py | the finding, and each reading of the values that their shapes allow |
| recogniser_rows.py | which rows are wrong, and what they hold instead |
| recogniser_parts.py | which part of a sum is there too often, not at all, or from other rows |
| explain.py | the finding in words, against the placement expected: the likely cause |
| oracle.py | each tap against the float64 reference, within its derived bound |
| replication.py | what is declared replicated is the same bits on every rank, also across stages |
| parameters.py, parameters_order.py | each parameter is loaded once, where it belongs |
| aliasing.py | nothing is overwritten before its last use |
| poison.py | uninitialised memory and padding rows reach no token's row |
| relations.py, metamorphic.py | batches made from one, and the rows that must stay |
| headline.py | which failed check to read first |
| sanitizer/ | what is wrong with an operation, by its operands alone |
| faults/ | known bugs that can be switched on |
"""

from properties.oracle import TapVerdict, compare_taps
from properties.placement import Placement, PlacementError
from properties.recogniser import recognise
from properties.recogniser_case import Recognised
from properties.replication import same_across_ranks, same_across_stages
from properties.verdict import Verdict

__all__ = [
    "Placement",
    "PlacementError",
    "Recognised",
    "TapVerdict",
    "Verdict",
    "compare_taps",
    "recognise",
    "same_across_ranks",
    "same_across_stages",
]
