"""sim.gloo: the same programs on real processes and real gloo groups.

| file | what it is |
|---|---|
| world.py | `GlooWorld`: as `sim.World`, with a process for each rank |
| pool.py | `GlooPool`: rank processes that serve one world after the other |
| zygote.py | the process that prepares once and forks the ranks |
| rank.py | a rank process's life |
| front.py | the c10d front door there: notes each call, then carries it out |
| carry.py, sums.py, carried.py | calls as operations of a real gloo group |
| journal.py | what a rank notes, readable also after it was killed |
| replay.py | the journals put together: ledger, mismatches, who waits for whom |
| run.py | waits for the ranks, and says what is wrong if they do not come back |
| wire.py | pickles with tensors as plain bytes |
"""

from .pool import GlooPool
from .world import GlooWorld

__all__ = ["GlooPool", "GlooWorld"]
