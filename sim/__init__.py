"""sim: N ranks folded into one process, with deterministic scheduling and a ledger.

| file | what it is |
|---|---|
| topology.py | topologies as words, their ranks and groups |
| world.py | `World`: starts the ranks, runs an SPMD function on all of them |
| baton.py | the scheduler: one rank runs at a time |
| rank_local.py | process-global state that is swapped between ranks |
| c10d.py | installs folded groups into torch.distributed |
| process_group.py | the c10d front door: torch's calls become `Call`s and `Post`s |
| store.py | the key-value store whose waits let other ranks run |
| schedule.py | `Schedule`: the order of the ranks, and how late the transport delivers |
| fabric.py | the rendezvous: calls of all ranks meet, are checked and carried out |
| calls.py, collectives.py | a call of a collective, and the table of collectives |
| agreement.py, movement.py, reduction.py | their checks, data movement and sums: pure functions |
| mailbox.py | which receive takes which send |
| work.py | handles of operations in flight |
| late.py, flight.py, buffers.py | late delivery, and how reuse of a buffer in flight is found |
| ledger.py | the record of what completed |
| observer.py | what may watch the traffic |
| clock.py | the transport's own time, for the benchmark |
| errors.py, reports.py, callsite.py | what is said when a run breaks |
| gloo/ | the same programs on real processes and real gloo groups |
| launched/ | the same on ranks that torchrun has started, over gloo or NCCL |
"""

from .clock import TransportClock, transport_clock
from .errors import (
    BufferReuse,
    Deadlock,
    Mismatch,
    Misuse,
    NotAMember,
    RankDied,
    RankFailed,
    RankHung,
    RankReport,
    SimError,
    Undelivered,
)
from .ledger import Entry, Ledger
from .observer import Observer
from .process_group import label_group
from .rank_local import RankCache, RankLocal, RankSlot
from .schedule import Schedule
from .topology import Topology, TopologyError
from .world import RankContext, World

__all__ = [
    "BufferReuse",
    "Deadlock",
    "Entry",
    "Ledger",
    "Mismatch",
    "Misuse",
    "NotAMember",
    "Observer",
    "RankCache",
    "RankContext",
    "RankDied",
    "RankFailed",
    "RankHung",
    "RankLocal",
    "RankReport",
    "RankSlot",
    "Schedule",
    "SimError",
    "Topology",
    "TopologyError",
    "TransportClock",
    "Undelivered",
    "World",
    "label_group",
    "transport_clock",
]
