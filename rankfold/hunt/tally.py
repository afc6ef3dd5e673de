"""What a hunt has drawn, counted for each dimension."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from rankfold.example import Example
from sim import Topology


def dimensions(example: Example) -> dict[str, str]:
    """The example's value in each dimension."""
    order = "" if example.schedule is None else "permuted"
    return {
        "topology": example.topology,
        "tokens": str(example.tokens),
        "dp_tokens": dp_word([*map(sum, example.lens_by_dp_rank())]),
        "sequences": str(len(example.seq_lens)),
        "layers": example.layers,
        "attention": example.attention,
        "steps": steps_word(example.chunk, example.decode),
        "dtype": example.dtype,
        "moe_backend": example.moe_backend,
        "expert_dtype": example.expert_dtype,
        "sp": example.sp,
        "aux": str(len(example.aux)),
        "weights": str(example.weights),
        "schedule": ", ".join(filter(None, (order, "late" if example.late else ""))) or "plain",
        "relation": example.relation,
    }


DP_WORDS = ("even", "uneven", "some idle", "all idle")
"""How tokens may lie over several DP ranks."""


def dp_word(tokens: Sequence[int]) -> str:
    """How tokens lie over DP ranks, in words."""
    if len(tokens) == 1:
        return "one rank"
    if not any(tokens):
        return "all idle"
    if not all(tokens):
        return "some idle"
    return "even" if len(set(tokens)) == 1 else "uneven"


def steps_word(chunk: int, decode: int) -> str:
    """How the tokens come, in words."""
    words = ("chunks" if chunk else "", "decode" if decode else "")
    return ", ".join(filter(None, words)) or "one"


def token_class(tokens: int, tp: int) -> str:
    """How a number of tokens lies to the TP degree, which is what sharding depends on."""
    if tokens == 0:
        return "none"
    if tokens < tp:
        return "fewer than ranks"
    return "even" if tokens % tp == 0 else "uneven"


@dataclass(kw_only=True)
class Tally:
    """Counts of examples."""

    examples: int = 0
    drawn: dict[str, Counter[str]] = field(default_factory=dict)
    classes: Counter[tuple[str, ...]] = field(default_factory=Counter)
    """By topology, token class, MoE backend, SP and dtype."""
    known: Counter[str] = field(default_factory=Counter)
    """Examples that showed a known finding, by its name."""

    def add(self, example: Example, known: Set[str] = frozenset()) -> None:
        """Count an example, and the known findings that it showed."""
        self.examples += 1
        for name, value in dimensions(example).items():
            self.drawn.setdefault(name, Counter())[value] += 1
        tp = Topology.parse(example.topology).tp
        shape = token_class(example.tokens, tp)
        self.classes[example.topology, shape, example.moe_backend, example.sp, example.dtype] += 1
        self.known.update(known)

    def merge(self, other: Tally) -> None:
        """Count what another has counted as well."""
        self.examples += other.examples
        for name, counts in other.drawn.items():
            self.drawn.setdefault(name, Counter()).update(counts)
        self.classes.update(other.classes)
        self.known.update(other.known)

    def never(self, expected: Mapping[str, Set[str]]) -> dict[str, list[str]]:
        """The values of each dimension that should have been drawn and were not."""
        missing = {
            name: sorted(values - set(self.drawn.get(name, ())))
            for name, values in expected.items()
        }
        return {name: values for name, values in missing.items() if values}
