"""Topologies as words: which ranks there are, and which groups they form.

`tp2pp2`, `tep4pp2`, `dep16`, `dp2tp4` are the words that deployment recipes use. The rank order
and the groups are those of vLLM's `initialize_model_parallel`: the layout is DP x PP x TP, with
TP fastest, and the expert-parallel group of a stage spans DP x TP.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

AXES = ("tp", "pp", "dp", "ep")
MAX_RANKS = 1024

_TOKEN = re.compile(r"(dep|tep|tp|pp|dp|ep)(\d+)")
_EXAMPLES = "tp4, tp2pp2, tep4pp2, dep16, dp2tp4"


class TopologyError(ValueError):
    """A topology word that means nothing; the message is one line that says what would be right."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A rank layout.

    Invariant: rank = (dp_index * pp + pp_index) * tp + tp_index, and `world_size = dp * pp * tp`.
    """

    tp: int = 1
    """Tensor-parallel degree (number of ranks that share each layer)."""
    pp: int = 1
    """Pipeline-parallel degree (number of stages)."""
    dp: int = 1
    """Data-parallel degree (number of ranks, per stage and TP index, with tokens of their own)."""
    ep: bool = False
    """Whether experts are spread over the DP x TP ranks of a stage, instead of each being sliced
    over its TP ranks."""

    def __post_init__(self) -> None:
        for axis in ("tp", "pp", "dp"):
            degree = getattr(self, axis)
            if degree < 1:
                raise TopologyError(f"{axis}{degree}: a degree is 1 or more (try {_EXAMPLES})")
        if self.world_size > MAX_RANKS:
            raise TopologyError(f"{self.word}: {self.world_size} ranks; {MAX_RANKS} at most")

    @classmethod
    def parse(cls, word: str) -> Topology:
        """Parse a word such as `tp2pp2`, `tep4pp2`, `dep16` or `dp2tp4`.

        `tepN` is TP N with experts spread over its ranks; `depN` is DP N, TP 1, likewise.

        Raises:
            TopologyError: the word is not one, repeats an axis, or has a degree below 1.
        """
        text = word.strip().lower()
        tokens = _TOKEN.findall(text)
        if not tokens or "".join(a + n for a, n in tokens) != text:
            raise TopologyError(f"{word!r} is no topology; use a word such as {_EXAMPLES}")
        degrees: dict[str, int] = {}
        ep = False
        for name, digits in tokens:
            axis = {"tep": "tp", "dep": "dp"}.get(name, name)
            if axis == "ep":
                raise TopologyError(
                    f"{word!r}: write tep{digits} or dep{digits}; the expert-parallel group spans "
                    "the DP x TP ranks of a stage"
                )
            if axis in degrees:
                raise TopologyError(f"{word!r} gives {axis} twice; each axis once ({_EXAMPLES})")
            if len(digits) > 9:
                raise TopologyError(f"{name} of {len(digits)} digits; {MAX_RANKS} ranks at most")
            if int(digits) < 1:
                raise TopologyError(f"{word!r}: {name}{digits} has no ranks; a degree is 1 or more")
            degrees[axis] = int(digits)
            ep = ep or name != axis
        return cls(tp=degrees.get("tp", 1), pp=degrees.get("pp", 1), dp=degrees.get("dp", 1), ep=ep)

    @cached_property
    def word(self) -> str:
        """The canonical word; `Topology.parse(t.word) == t`."""
        parts = []
        if self.dp > 1 or (self.ep and self.tp == 1):
            parts.append(f"{'dep' if self.ep and self.tp == 1 else 'dp'}{self.dp}")
        if self.tp > 1:
            parts.append(f"{'tep' if self.ep else 'tp'}{self.tp}")
        if self.pp > 1:
            parts.append(f"pp{self.pp}")
        return "".join(parts) or "tp1"

    def __str__(self) -> str:
        return self.word

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp * self.pp * self.tp

    @cached_property
    def groups(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """For each axis the groups of global ranks, each group ascending along its axis.

        Examples:
            >>> Topology.parse("tp2pp2").groups["pp"]
            ((0, 2), (1, 3))
        """
        dp, pp, tp = range(self.dp), range(self.pp), range(self.tp)
        return {
            "tp": tuple(tuple(self.rank(d, p, t) for t in tp) for d in dp for p in pp),
            "pp": tuple(tuple(self.rank(d, p, t) for p in pp) for d in dp for t in tp),
            "dp": tuple(tuple(self.rank(d, p, t) for d in dp) for p in pp for t in tp),
            "ep": tuple(tuple(self.rank(d, p, t) for d in dp for t in tp) for p in pp),
        }

    def group_of(self, rank: int, axis: str) -> tuple[int, ...]:
        """The group of global ranks along `axis` that `rank` is in."""
        return next(group for group in self.groups[axis] if rank in group)

    def rank(self, dp_index: int, pp_index: int, tp_index: int) -> int:
        """The global rank at these coordinates."""
        return (dp_index * self.pp + pp_index) * self.tp + tp_index

    def coordinates(self, rank: int) -> dict[str, int]:
        """The index of `rank` along tp, pp and dp.

        Examples:
            >>> Topology.parse("tp2pp2").coordinates(3)
            {'tp': 1, 'pp': 1, 'dp': 0}
        """
        if not 0 <= rank < self.world_size:
            raise TopologyError(f"{self.word} has ranks 0 to {self.world_size - 1}, not {rank}")
        return {
            "tp": rank % self.tp,
            "pp": rank // self.tp % self.pp,
            "dp": rank // (self.tp * self.pp),
        }
