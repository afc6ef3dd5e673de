"""Which workers a deployment has, and the word for it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rankfold.errors import UsageError
from sim import Topology, TopologyError

MOST_WORKERS = 16
MOST_RANKS = 160

_DISAGGREGATED = re.compile(r"([1-9]\d*)p([1-9]\d*)d-([a-z0-9]+)-([a-z0-9]+)")
_AGGREGATED = re.compile(r"([1-9]\d*)a-([a-z0-9]+)")


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Workers of one kind: each a world of its own."""

    topology: Topology
    workers: int = 1

    @property
    def ranks(self) -> int:
        """Of all workers."""
        return self.workers * self.topology.world_size


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """Workers that serve requests together."""

    decode: Fleet
    """Where requests are decoded; and prefilled, if nobody else does it."""
    prefill: Fleet | None = None
    """Where they are prefilled; their KV caches are then handed over."""

    def __post_init__(self) -> None:
        workers = sum(fleet.workers for fleet in self.fleets.values())
        if workers > MOST_WORKERS or self.ranks > MOST_RANKS:
            raise UsageError(
                f"{self}: {workers} workers with {self.ranks} ranks; use at most {MOST_WORKERS} "
                f"workers and {MOST_RANKS} ranks"
            )

    @classmethod
    def parse(cls, word: str) -> Deployment:
        """A deployment from its word: 3p1d-dep2-dep16 has three dep2 workers that prefill and one
        dep16 worker that decodes; 2a-tep8 has two workers that do both, and tep8 has one.

        Raises:
            UsageError, TopologyError: the word makes no sense.
        """
        if found := _DISAGGREGATED.fullmatch(word):
            prefill, decode, first, second = found.groups()
            return cls(
                prefill=Fleet(topology=Topology.parse(first), workers=int(prefill)),
                decode=Fleet(topology=Topology.parse(second), workers=int(decode)),
            )
        if found := _AGGREGATED.fullmatch(word):
            return cls(decode=Fleet(topology=Topology.parse(found[2]), workers=int(found[1])))
        try:
            return cls(decode=Fleet(topology=Topology.parse(word)))
        except TopologyError:
            if "-" in word:
                raise UsageError(
                    f"deployment {word!r}: use a word such as 3p1d-dep2-dep16 (three dep2 workers "
                    "prefill, one dep16 worker decodes), 2a-tep8 or dep8"
                ) from None
            raise

    @property
    def fleets(self) -> dict[str, Fleet]:
        """By what its workers are called."""
        if self.prefill is None:
            return {"worker": self.decode}
        return {"prefill": self.prefill, "decode": self.decode}

    @property
    def topologies(self) -> tuple[Topology, ...]:
        """One of each kind of worker."""
        return tuple(fleet.topology for fleet in self.fleets.values())

    @property
    def ranks(self) -> int:
        """Of all workers."""
        return sum(fleet.ranks for fleet in self.fleets.values())

    @property
    def word(self) -> str:
        """The word that `parse` takes."""
        decode = self.decode
        if self.prefill is not None:
            first = self.prefill
            return f"{first.workers}p{decode.workers}d-{first.topology}-{decode.topology}"
        return (
            decode.topology.word if decode.workers == 1 else f"{decode.workers}a-{decode.topology}"
        )

    def __str__(self) -> str:
        return self.word


def is_deployment(word: str) -> bool:
    """Whether a word means several workers, rather than a topology."""
    return bool(_DISAGGREGATED.fullmatch(word) or _AGGREGATED.fullmatch(word))
