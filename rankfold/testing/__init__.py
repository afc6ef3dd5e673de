"""For tests of your own layers: assertions about folded ranks, in words of placements and ledgers.

The fixtures `world` and `vllm_world` come with pytest; see `rankfold.pytest_plugin`.

| file | what it is |
|---|---|
| worlds.py | `WatchedWorld`: a world under the sanitizer; when it begins and ends |
| vllm_ranks.py | the same with vLLM's groups joined; `load` fills a vLLM layer |
| groups.py | process groups along an axis, for programs without vLLM |
| placed.py | `assert_placed`: the local values make up the true one |
| rows.py | `assert_same`, `assert_conserved` |
| traffic.py | `assert_ledger`: which operations each rank took part in |
| strategies.py | topologies and token counts for Hypothesis |
"""

from properties.sanitizer import Allow
from rankfold.testing.groups import axis_group
from rankfold.testing.placed import assert_placed, rounding_bound
from rankfold.testing.rows import assert_conserved, assert_same
from rankfold.testing.traffic import assert_ledger
from rankfold.testing.vllm_ranks import load
from rankfold.testing.worlds import WatchedWorld, Worlds

__all__ = [
    "Allow",
    "WatchedWorld",
    "Worlds",
    "assert_conserved",
    "assert_ledger",
    "assert_placed",
    "assert_same",
    "axis_group",
    "load",
    "rounding_bound",
]
