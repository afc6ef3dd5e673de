"""The sanitizer: what is wrong with an operation, seen from the operands of all ranks alone.

It needs no reference and no annotation, so it works on any program that uses torch.distributed.

| file | what it is |
|---|---|
| finding.py | `Finding`: one wrong operation; `Allow`: a site known to be good, with the reason |
| bits.py | exact comparisons of tensors |
| origins.py | where a whole tensor was made: what earlier operations of a group gave all ranks |
| rules.py | the rules: pure functions of an operation |
| dropped.py | results that nobody can have read: when a reduced tensor dies, and where |
| watch.py | `Sanitizer`: the observer that applies the rules and collects the findings |
"""

from properties.sanitizer.finding import Allow, AllowError, Finding
from properties.sanitizer.rules import RULES, Rule
from properties.sanitizer.watch import Sanitizer

__all__ = ["RULES", "Allow", "AllowError", "Finding", "Rule", "Sanitizer"]
