"""What the job runs: topologies, variants of the model on each, and on which transport."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from model.subject import check
from rankfold.errors import UsageError
from rankfold.options import MEGA_MOE, Options, one_dp_rank
from sim import Topology

TOPOLOGIES = ("tp1", "tp2", "pp2", "tep2", "tp2pp2", "tep2pp2", "tp4", "tep4")
PLAIN, SP_ON, SP_OFF = "plain", "MegaMoE, SP on", "MegaMoE, SP off"
TOKENS, SEQUENCES = 9, 2
"""Of the compared step: more than any TP degree, and divided by none."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How step times are measured: each arm twice, in turns."""

    tokens: int = 512
    steps: int = 20
    runs: int = 2

    @classmethod
    def brief(cls) -> Timing:
        """For CPUs, where figures mean nothing and only the way to them is tried."""
        return cls(tokens=32, steps=3)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One launch: a topology, and the variants that run on it one after the other."""

    topology: Topology
    variants: tuple[tuple[str, Options], ...]
    timing: Timing | None
    """For topologies that have both arms."""

    @property
    def alone(self) -> Topology:
        """The same columns of ranks with one stage, whose values are to be the same bit for bit."""
        return replace(self.topology, pp=1)


def plans(words: Sequence[str], attention: str, timing: Timing | None) -> list[Plan]:
    """The launches for these topologies, in this order; the one-stage ones come first.

    Raises:
        UsageError, ShapeError, TopologyError: a word means nothing, or the model does not fit.
    """
    found = []
    for word in dict.fromkeys(words):
        topology = Topology.parse(word)
        one_dp_rank(topology, "the GPU job")
        variants = _variants(topology, attention)
        for _, options in variants:
            check(options.tiny, topology)
        both = len(variants) > 1
        found.append(
            Plan(topology=topology, variants=tuple(variants), timing=timing if both else None)
        )
    if not found:
        raise UsageError("no topology is given")
    return sorted(found, key=lambda plan: plan.topology.pp > 1)


def _variants(topology: Topology, attention: str) -> list[tuple[str, Options]]:
    plain = Options(
        topology=topology,
        tokens=TOKENS,
        sequences=SEQUENCES,
        attention=attention,
        transport="gloo",
    )
    found = [(PLAIN, plain)]
    if topology.ep and topology.tp > 1:
        mega = replace(plain, moe_backend=MEGA_MOE, dtype="bfloat16")
        found += [(SP_ON, mega), (SP_OFF, replace(mega, sp="off"))]
    return found


def transport_of(topology: Topology, gpus: int) -> str:
    """What a topology's ranks would talk over here: "nccl", "gloo-gpu" (ranks share GPUs) or
    "gloo" (no GPU)."""
    if not gpus:
        return "gloo"
    return "nccl" if topology.world_size <= gpus else "gloo-gpu"
