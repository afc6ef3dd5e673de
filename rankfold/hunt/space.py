"""The space that a hunt draws from, as Hypothesis strategies.

Every choice is ordered from the plain to the special: Hypothesis shrinks a failing example towards
the first of each, so to the fewest ranks, the fewest tokens and the plainest model that fail.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis import strategies as st

from rankfold.corpus import LENGTHS, LONGEST
from rankfold.errors import UsageError
from rankfold.example import Example
from rankfold.hunt.tally import DP_WORDS, steps_word
from rankfold.hunt.tokens import cut, laid, spread, vocabulary
from rankfold.hunt.topologies import DEGREES, all_topologies, size
from rankfold.options import DTYPES, EXPERT_DTYPES, MEGA_MOE, MOE_BACKENDS
from rankfold.relate import RELATIONS, possible
from rankfold.serving.plan import decode_first
from sim import Topology

T = TypeVar("T")

PATTERNS = tuple("".join(p) for count in (1, 2, 3) for p in product("dm", repeat=count))
"""Layers; a topology with more stages than a pattern has letters repeats it."""
SEEDS = (0, 1)
"""Sets of weights."""
MOST_AUX = 2
SCHEDULES = 2**16
ATTENTION = ("dense", "model")
STEPS = ((0, 0), (0, 2), (3, 0), (3, 2))
"""(chunk, decode): the tokens in one step; the last two one a step; in chunks, smaller than a block
of the sparse layers; and both."""
PLAIN_STEPS = 9
"""Times that the tokens in one step stand among the choices: others take several."""
PLAIN_RELATIONS = 9
"""Times that no relation stands among the choices: a relation costs a second step."""


ONLY = {
    "attention": "attentions",
    "dtype": "dtypes",
    "expert_dtype": "expert_dtypes",
    "layers": "patterns",
    "moe_backend": "backends",
    "sp": "sequence_parallel",
}
"""The dimensions that can be held to one value, and what of a space holds their values."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """What is drawn; each choice from the plain to the special."""

    topologies: tuple[Topology, ...]
    patterns: tuple[str, ...] = PATTERNS
    attentions: tuple[str, ...] = ATTENTION
    steps: tuple[tuple[int, int], ...] = STEPS
    dtypes: tuple[str, ...] = tuple(sorted(DTYPES, key="float32".__ne__))
    backends: tuple[str, ...] = MOE_BACKENDS
    seeds: tuple[int, ...] = SEEDS
    expert_dtypes: tuple[str, ...] = EXPERT_DTYPES
    sequence_parallel: tuple[str, ...] = ("auto", "off")
    schedules: bool = True
    """Whether ranks may run in another order than the plain one."""
    late: bool = True
    """Whether delivery may be late."""
    relations: tuple[str, ...] = RELATIONS
    most_tokens: int = LONGEST

    @classmethod
    def of(cls, topologies: Sequence[Topology] = ()) -> Space:
        """The space over some topologies; over all by default."""
        every = topologies or all_topologies(replicas=DEGREES)
        chosen = {topology.word: topology for topology in every}
        return cls(topologies=tuple(sorted(chosen.values(), key=size)))

    def only(self, held: Iterable[str]) -> Space:
        """The part of the space where dimensions have one value each, as in "dtype=bfloat16".

        Raises:
            UsageError: no such dimension, or none of its values.
        """
        space = self
        for text in held:
            name, _, value = text.partition("=")
            if name not in ONLY:
                raise UsageError(f"--only {text}: use {', '.join(f'{n}=...' for n in ONLY)}")
            values = {str(each): each for each in getattr(space, ONLY[name])}
            if value not in values:
                raise UsageError(f"--only {text}: use {name}= {', '.join(values)}")
            held_to: dict[str, Any] = {ONLY[name]: (values[value],)}
            space = replace(space, **held_to)
        if space.backends == (MEGA_MOE,):
            spread = tuple(topology for topology in space.topologies if topology.ep)
            if not spread:
                raise UsageError(f"{MEGA_MOE} needs expert parallelism: use a topology like tep2")
            space = replace(space, topologies=spread)
        return space

    def examples(self) -> st.SearchStrategy[Example]:
        """Examples, drawn whole before any rank starts."""
        return _examples(self)

    def rich(self) -> list[Example]:
        """One example of each topology and backend that has as much in it as an example can have:
        most faults show in one of these, so a search begins with them. Those with the most axes
        come first, and of these the smallest."""
        plain = [
            (topology, backend)
            for topology in self.topologies
            for backend in (self.backends if topology.ep else ("auto",))
        ]

        def axes(topology: Topology) -> int:
            return (topology.tp > 1) + (topology.pp > 1) + topology.ep

        plain.sort(key=lambda case: (-axes(case[0]), size(case[0]), case[1] != MEGA_MOE))
        return [
            self._rich(topology, backend, steps)
            for replicated in (False, True)
            for steps in (self.steps[0], self.steps[-1])
            for topology, backend in plain
            if (topology.dp > 1) == replicated and not (replicated and any(steps))
        ]

    def _rich(self, topology: Topology, backend: str, steps: tuple[int, int]) -> Example:
        layers = _layers("dmdm", topology.pp)
        # In steps as many as there are, so that sparse layers drop blocks.
        tokens = min(self.most_tokens if any(steps) else 2 * topology.tp + 1, self.most_tokens)
        seq_lens = (tokens - 2, 2) if tokens > 2 else (tokens,)
        mega = backend == MEGA_MOE
        by_rank: list[tuple[int, ...]] = [seq_lens]
        if topology.dp > 1:
            # Uneven: the last DP rank has most, and where there are more than two the first none.
            others: list[tuple[int, ...]] = [(max(1, tokens // 2),)] * (topology.dp - 1)
            by_rank = [*others, seq_lens] if topology.dp == 2 else [(), *others[1:], seq_lens]
        return Example(
            topology=topology.word,
            layers=layers,
            attention=self.attentions[-1],
            dtype="bfloat16" if mega else "float32",
            moe_backend=backend,
            chunk=steps[0],
            decode=steps[1],
            aux=(1, len(layers) - 1),
            **laid(by_rank, vocabulary(mega)),
            late=True,
            relation=RELATIONS[0],
        )

    def some(self, chance: random.Random) -> Space:
        """A few values of each dimension that costs building: a round of the search draws from
        these alone, so that most of its examples find their model built."""
        return replace(
            self,
            topologies=_some(chance, self.topologies, 3),
            patterns=_some(chance, self.patterns, 2),
            attentions=_some(chance, self.attentions, 1),
            dtypes=_some(chance, self.dtypes, 2),
            seeds=_some(chance, self.seeds, 1),
        )

    def below(self, example: Example) -> Space:
        """What is no larger than an example in any dimension, and takes few models to search."""
        top = Topology.parse(example.topology)
        smaller = (
            t
            for t in all_topologies(replicas=[d for d in DEGREES if d <= top.dp])
            if t.tp <= top.tp and t.pp <= top.pp
        )
        if top.ep:
            smaller = (t for t in smaller if t.ep or t.tp * t.dp == 1)
        kept = {t.word: t for t in (*smaller, top)}
        return Space(
            topologies=tuple(sorted(kept.values(), key=size)),
            patterns=tuple(dict.fromkeys(("d", "m", example.layers))),
            attentions=tuple(dict.fromkeys((ATTENTION[0], example.attention))),
            steps=tuple(dict.fromkeys((STEPS[0], (example.chunk, example.decode)))),
            dtypes=(example.dtype,),
            backends=(example.moe_backend,),
            seeds=(example.weights,),
            expert_dtypes=(example.expert_dtype,),
            sequence_parallel=(example.sp,),
            schedules=example.schedule is not None,
            late=example.late,
            relations=tuple(filter(None, (example.relation,))),
            most_tokens=example.tokens,
        )

    def expected(self) -> dict[str, set[str]]:
        """For each dimension the values that a healthy search meets; see `tally.py`."""
        mega = MEGA_MOE in self.backends and any(t.ep for t in self.topologies)
        alone, replicated = (
            {t.word for t in self.topologies if (t.dp > 1) == several} for several in (False, True)
        )
        return {
            "topology": {t.word for t in self.topologies},
            "tokens": {str(tokens) for tokens in range(self.most_tokens + 1)},
            "dp_tokens": {*(["one rank"] if alone else []), *(DP_WORDS if replicated else [])},
            "sequences": {str(count + 1) for count in range(len(LENGTHS))},
            "layers": {_layers(p, t.pp) for p in self.patterns for t in self.topologies},
            "attention": set(self.attentions),
            "steps": {steps_word(*steps) for steps in (self.steps if alone else self.steps[:1])},
            "dtype": set(self.dtypes),
            "moe_backend": {"auto", MEGA_MOE} if mega else {"auto"},
            "expert_dtype": set(EXPERT_DTYPES) if mega else {"bf16"},
            "sp": {"auto", "off"} if mega else {"auto"},
            "aux": {str(count) for count in range(MOST_AUX + 1)},
            "weights": {str(seed) for seed in self.seeds},
            "schedule": {"plain", "permuted", "late", "permuted, late"},
            "relation": {"", *(RELATIONS if alone else RELATIONS[:1])},
        }


def _some(chance: random.Random, values: tuple[T, ...], count: int) -> tuple[T, ...]:
    """So many of the values, in their order."""
    picked = sorted(chance.sample(range(len(values)), min(count, len(values))))
    return tuple(values[i] for i in picked)


def _layers(pattern: str, stages: int) -> str:
    """A pattern, repeated until every stage has a layer."""
    return pattern if len(pattern) >= stages else (pattern * stages)[:stages]


def quietly(most: int, *phases: Phase) -> settings:
    """Hypothesis at work inside a command: no files, no deadlines, nothing printed."""
    return settings(
        max_examples=most,
        database=None,
        deadline=None,
        phases=phases,
        report_multiple_bugs=False,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
    )


@st.composite
def _examples(draw: st.DrawFn, space: Space) -> Example:
    topology = draw(st.sampled_from(space.topologies))
    tokens = draw(st.integers(0, space.most_tokens))
    layers = _layers(draw(st.sampled_from(space.patterns)), topology.pp)
    backend = draw(st.sampled_from(space.backends)) if topology.ep else "auto"
    mega = backend == MEGA_MOE
    dtype = "bfloat16" if mega else draw(st.sampled_from(space.dtypes))
    expert_dtype = draw(st.sampled_from(space.expert_dtypes)) if mega else "bf16"
    sp = draw(st.sampled_from(space.sequence_parallel)) if mega and topology.tp > 1 else "auto"
    aux = draw(st.lists(st.integers(0, len(layers)), max_size=MOST_AUX, unique=True))
    counts = spread(draw, tokens, topology.dp)
    by_rank = [cut(draw, count) for count in counts]
    attention = draw(st.sampled_from(space.attentions))
    one_step = tokens < 2 or topology.dp > 1
    chunk, decode = (0, 0) if one_step else _steps(draw, space.steps)
    if attention != "dense" and not (chunk or decode):
        by_rank = [decode_first(of_rank) for of_rank in by_rank]
    if topology.dp > 1:
        # A DP rank without tokens has no sequence.
        by_rank = [of_rank if any(of_rank) else () for of_rank in by_rank]
    seq_lens = by_rank[0]
    relations = tuple(n for n in space.relations if possible(n, sum(counts), len(seq_lens)))
    if chunk or decode or topology.dp > 1:
        relations = tuple(name for name in relations if name == RELATIONS[0])
    return Example(
        topology=topology.word,
        layers=layers,
        attention=attention,
        chunk=chunk,
        decode=decode,
        dtype=dtype,
        moe_backend=backend,
        expert_dtype=expert_dtype,
        sp=sp,
        aux=tuple(sorted(aux)),
        weights=draw(st.sampled_from(space.seeds)),
        **laid(by_rank, vocabulary(mega)),
        schedule=draw(st.none() | st.integers(0, SCHEDULES - 1)) if space.schedules else None,
        late=draw(st.booleans()) if space.late else False,
        relation=draw(st.sampled_from(("",) * PLAIN_RELATIONS + relations)),
    )


def _steps(draw: st.DrawFn, steps: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    """(chunk, decode), most often those of one step."""
    plain = steps[:1] if any(steps[0]) else steps[:1] * PLAIN_STEPS
    return draw(st.sampled_from(plain + steps[1:]))
