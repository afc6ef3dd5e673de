"""sim.launched: ranks that torchrun has started, on one machine or several, with or without GPUs.

Rank 0's process drives: it has a `LaunchedPool`, from which `GlooWorld` takes all ranks, its own
among them. The programs, the reports and the ledger are those of ranks over gloo.

| file | what it is |
|---|---|
| environment.py | what torchrun says of a process |
| ending.py | how a process ends, and how long it outlives another one's end |
| lines.py | the connections between the driver and the ranks |
| pool.py | `LaunchedPool`: the ranks as the driver sees them |
| rank.py | a rank's life |
| fabric.py | the transport: gloo, or NCCL for tensors of a GPU |
| staging.py | gloo for tensors of a GPU that ranks share |
"""

from .ending import end_now, linger
from .environment import Launch, LaunchError
from .pool import LaunchedPool
from .rank import serve

__all__ = ["Launch", "LaunchError", "LaunchedPool", "end_now", "linger", "serve"]
