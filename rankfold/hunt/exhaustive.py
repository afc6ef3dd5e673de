"""Every case of a bounded scope, in a fixed order, from small to large.

Most bugs of parallelism show in small scopes; inside this one the answer is complete. Cases come
in blocks, one for each model, so that a model is built once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from rankfold.corpus import batch_of
from rankfold.examiner import Examiner
from rankfold.example import Example
from rankfold.hunt.search import Failure
from rankfold.hunt.tally import Tally
from rankfold.hunt.topologies import all_topologies, size
from rankfold.options import MEGA_MOE, Options
from sim import Topology

LAYERS = 3


@dataclass(frozen=True, kw_only=True)
class Block:
    """The cases of one model: all numbers of tokens, and no aux hidden state or one of each id."""

    topology: Topology
    layers: str
    moe_backend: str
    sp: str

    @property
    def tokens(self) -> range:
        """0 to 2 TP + 1."""
        return range(2 * self.topology.tp + 2)

    @property
    def aux(self) -> list[tuple[int, ...]]:
        """No id, then each id."""
        return [(), *((i,) for i in range(len(self.layers) + 1))]

    def __len__(self) -> int:
        return len(self.tokens) * len(self.aux)

    def examples(self) -> Iterator[Example]:
        """The cases, in order."""
        mega = self.moe_backend == MEGA_MOE
        options = Options(topology=self.topology, layers=self.layers, moe_backend=self.moe_backend)
        for tokens, aux in product(self.tokens, self.aux):
            yield Example(
                topology=self.topology.word,
                layers=self.layers,
                dtype="bfloat16" if mega else "float32",
                moe_backend=self.moe_backend,
                sp=self.sp,
                aux=aux,
                token_ids=batch_of((tokens,), options.tiny.vocab_size),
                seq_lens=(tokens,),
            )


@dataclass(frozen=True)
class Scope:
    """The blocks of some topologies; the order is the same on every machine."""

    topologies: tuple[Topology, ...]

    @classmethod
    def of(cls, topologies: Sequence[Topology] = ()) -> Scope:
        """The scope over some topologies; by default all up to 8 ranks that three layers fill."""
        chosen = topologies or all_topologies(range(1, LAYERS + 1))
        return cls(tuple(sorted(chosen, key=size)))

    @cached_property
    def blocks(self) -> list[Block]:
        """All blocks."""
        return [
            Block(topology=topology, layers="".join(layers), moe_backend=backend, sp=sp)
            for topology in self.topologies
            for backend, sp in _modes(topology)
            for layers in product("dm", repeat=max(LAYERS, topology.pp))
        ]

    @property
    def cases(self) -> int:
        """How many cases there are."""
        return sum(map(len, self.blocks))

    @property
    def fingerprint(self) -> str:
        """What the scope is, so that the progress of another one is not taken for its own."""
        return hashlib.sha256(repr(self.blocks).encode()).hexdigest()[:16]


def run_block(
    block: Block, examiner: Examiner, tally: Tally, stopped: Callable[[], bool]
) -> Failure | bool | None:
    """Examine the cases of a block in order.

    Returns:
        The first failure; None if all hold; False if the block was left unfinished.
    """
    for example in block.examples():
        if stopped():
            return False
        judgement = examiner.examine(example)
        tally.add(example, {known.name for known in judgement.known.values()})
        verdict = judgement.headline
        if verdict is not None:
            return Failure(example=example, verdict=verdict, found_after=0.0, tried=tally.examples)
    return None


def _modes(topology: Topology) -> list[tuple[str, str]]:
    """(MoE backend, SP): sequence parallelism is a matter of MegaMoE, which needs EP."""
    if not topology.ep:
        return [("auto", "auto")]
    return [("auto", "auto"), (MEGA_MOE, "auto"), (MEGA_MOE, "off")]
