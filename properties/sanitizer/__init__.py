"""The sanitizer: what is wrong with an operation, seen from the operands of all ranks alone.

It needs no reference and no annotation, so it works on any program that uses torch.distributed.

| file | what it is |
|---|---|
| finding.py | `Finding`: one wrong operation; `Allow`: a site known to be good, with the reason |
| bits.py | exact comparisons of tensors |
| origins.py | where a whole tensor was made: what earlier operations of a group gave all ranks |
| rules.py | the rules: pure functions of an operation |
| groups.py | the groups that a program has, by their names |
| replicas.py | gathers of what is the same on a group, where another group has the shards |
| shards.py | shards cut over one group and gathered over another |
| slices.py | slices of shards that a stage sends, to be gathered by the next one |
| declared.py, differ.py | values declared replicated, and how they differ if they do |
| dropped.py | results that nobody can have read: when a reduced tensor dies, and where |
| intent.py | what the caller's source says an operation is meant for |
| book.py | the findings of a run, and which of them are allowed |
| watch.py | `Sanitizer`: the observer that applies the rules and collects the findings |
"""

from properties.sanitizer.finding import Allow, AllowError, Finding
from properties.sanitizer.rules import RULES, Rule
from properties.sanitizer.watch import Sanitizer

__all__ = ["RULES", "Allow", "AllowError", "Finding", "Rule", "Sanitizer"]
