"""Random examples on both transports, with and without faults: what `scripts/agreement.py` runs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import Phase, given
from hypothesis import seed as seeded

from model.subject import prepare
from properties.faults import FAULTS, Fault, find
from rankfold.agreement import Seen, disagreement, see
from rankfold.examiner import References
from rankfold.example import Example
from rankfold.faults.trial import example_of
from rankfold.hunt.space import Space, quietly
from rankfold.hunt.topologies import all_topologies
from rankfold.processes import RankProcesses, new_pool
from rankfold.rig import Rig
from sim import Topology
from sim.gloo import GlooPool

WORLDS = 3
"""Worlds that are kept: over gloo each has processes of its own, so few."""
FEW = 3
"""Examples without a fault for each one with a fault."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One example on both transports."""

    example: Example
    fault: str | None
    wrong: str | None
    """What they differ in; None if they agree."""
    headline: tuple[str, str, str] | None
    """What the folded run says."""

    def __str__(self) -> str:
        under = f", fault {self.fault}" if self.fault else ""
        return f"{self.example}{under}: {self.wrong or 'agree'}"


def compare_many(examples: int, seed: int, most_ranks: int = 4) -> Iterator[Compared]:
    """Compare random examples of the hunt's space, one in four of them under a fault.

    Needs vLLM, in this process and in the ranks' processes, which are started here.

    Args:
        examples: how many.
        seed: the same seed draws the same examples.
        most_ranks: of a topology.
    """
    torch.set_num_threads(1)
    with new_pool() as pool:
        prepare()
        references = References()
        drawn = _drawn(examples, seed, most_ranks)
        # As many worlds on both: vLLM's first launch on a world has barriers that later ones lack.
        folded = Rig(worlds=WORLDS, weights=references.weights)
        rigs = folded, _gloo_rig(references, pool)
        try:
            for fault, example in drawn:
                if fault is None:
                    seen = [see(rig, example, references) for rig in rigs]
                else:
                    seen = _under(fault, example, references, pool)
                yield Compared(
                    example=example,
                    fault=fault,
                    wrong=disagreement(*seen),
                    headline=seen[0].headline,
                )
        finally:
            for rig in rigs:
                rig.close()


def comparable_faults(most_ranks: int = 4) -> list[Fault]:
    """The faults of the model that both transports can show.

    Left out: reuse of a buffer in flight, which the folded transport looks for under late delivery
    only, while gloo delivers when it likes; faults of stand-in programs, which run folded; and
    faults that need several steps, since one step is compared.
    """
    return [
        fault
        for fault in FAULTS.values()
        if type(fault) is Fault
        and not {"late", "chunk", "decode"} & dict(fault.needs).keys()
        and min(Topology.parse(word).world_size for word in fault.shows) <= most_ranks
    ]


def _under(fault: str, example: Example, references: References, pool: GlooPool) -> list[Seen]:
    """Both transports' runs under a fault, with models of their own."""
    with find(fault).apply(), Rig(weights=references.weights) as rig:
        folded = see(rig, example, references)
    with _gloo_rig(references, pool, fault) as rig:
        return [folded, see(rig, example, references)]


def _gloo_rig(references: References, pool: GlooPool, fault: str | None = None) -> Rig:
    processes = RankProcesses(pool, fault=fault)
    return Rig(worlds=WORLDS, weights=references.weights, processes=processes)


def _drawn(count: int, seed: int, most_ranks: int) -> list[tuple[str | None, Example]]:
    """Faults and examples: in rounds of few topologies and layers, so that models serve often."""
    chance = random.Random(seed)
    space = Space.of([t for t in all_topologies() if t.world_size <= most_ranks])
    faults = comparable_faults(most_ranks)
    drawn: list[tuple[str | None, Example]] = []
    while len(drawn) < count:
        fault = chance.choice(faults)
        word = min(fault.shows, key=lambda word: Topology.parse(word).world_size)
        fields = dict(fault.needs)
        lens: Any = fields.pop("seq_lens", None)
        tokens = sum(lens) if lens else chance.choice((1, 3, 5, 8))
        drawn.append((fault.name, example_of(word, tokens, fields, lens)))
        plain = _examples(space.some(chance), chance.getrandbits(32), 4 * FEW)
        drawn += [(None, each) for each in plain]
    return drawn[:count]


def _examples(space: Space, number: int, most: int) -> list[Example]:
    """At most so many examples of a space."""
    found: list[Example] = []

    @seeded(number)
    @quietly(most, Phase.generate)
    @given(space.examples())
    def collect(example: Example) -> None:
        if not example.in_steps:
            found.append(example)

    collect()
    return found[-FEW:]
