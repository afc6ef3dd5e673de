"""Stand-in programs: small SPMD programs for code that MiniMax-M3 has not, such as attention DP.

A program runs on folded ranks, records taps as the model does, and says what they have to be. Its
faults patch its own functions, as those of the model patch vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from model.taps import REPLICATE, Recorder
from properties.faults.fault import Fault
from sim import RankContext, Schedule, Topology, label_group

AXES = ("tp", "dp", "ep")


class Seat:
    """One rank of a program: who it is, its groups, and where it records its taps.

    Build it inside the rank, on all ranks of the world at once: building makes the groups.
    """

    def __init__(self, ctx: RankContext, tokens: tuple[int, ...], recorder: Recorder) -> None:
        """
        Args:
            ctx: this rank.
            tokens: how many tokens each DP rank has.
            recorder: takes the taps.
        """
        self.rank = ctx.rank
        self.topology = ctx.topology
        self.tokens = tokens
        self._recorder = recorder
        self._groups = {axis: _join(ctx, axis) for axis in AXES}

    def group(self, axis: str) -> dist.ProcessGroup:
        """This rank's group along an axis."""
        return self._groups[axis]

    def size(self, axis: str) -> int:
        """Ranks of that group."""
        return len(self.topology.group_of(self.rank, axis))

    def index(self, axis: str) -> int:
        """This rank's place in that group."""
        return self.topology.group_of(self.rank, axis).index(self.rank)

    def tap(self, name: str, value: torch.Tensor, declared: str = REPLICATE) -> None:
        """Record a copy of a value, [T, ...]; see `model.taps.Captured` for `declared`."""
        self._recorder.record(name, value, declared)

    def own(self, name: str) -> str:
        """The name of a tap that only the ranks of this DP rank have."""
        return f"dp{self.index('dp')}.{name}"


def _join(ctx: RankContext, axis: str) -> dist.ProcessGroup:
    own: dist.ProcessGroup | None = None
    for ranks in ctx.topology.groups[axis]:
        group = dist.new_group([*ranks])
        if ctx.rank in ranks:
            own = group
    assert own is not None, "every rank is in one group of each axis"
    label_group(own, axis)
    return own


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What a right run's taps are, in program order."""

    taps: Mapping[str, torch.Tensor]
    """float64 [T, ...], or int64 where ids are tapped."""
    bounds: Mapping[str, float]
    """Largest deviation that rounding can explain."""
    parts: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    """For taps that are sums: the parts, by name."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A stand-in program."""

    name: str
    what: str
    """What it does and for which code it stands, in one line."""
    step: Callable[[Seat], None]
    """The program of one rank."""
    truth: Callable[[Topology, tuple[int, ...]], Truth]
    """What its taps have to be, for the tokens of each DP rank."""


@dataclass(frozen=True, kw_only=True)
class ProgramFault(Fault):
    """A fault of a stand-in program. `shows` and `hides` are topologies of that program."""

    program: Program
    tokens: tuple[int, ...] = (3, 1, 4, 2)
    """Tokens of the DP ranks with which it shows, over and over where there are more ranks."""
    hiding_tokens: tuple[int, ...] = ()
    """Tokens with which it does not show on the topologies of `shows`; () if it always does."""
    schedule: Schedule = field(default_factory=Schedule)
    """The schedule under which it shows."""


def spread(tokens: tuple[int, ...], topology: Topology) -> tuple[int, ...]:
    """Tokens of each DP rank: the given ones, over and over."""
    return tuple(tokens[i % len(tokens)] for i in range(topology.dp))
