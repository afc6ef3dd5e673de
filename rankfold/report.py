"""What `rankfold check` found, as data. The JSON keys are kept stable."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from properties import TapVerdict, Verdict
from properties.headline import headline


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Which code ran."""

    vllm: str
    """vLLM's version."""
    sequence_parallel: bool
    """Whether the residual stream is sharded by token over TP ranks."""
    moe_backend: str
    """Which experts ran."""
    model: str
    """Whose MiniMax-M3 ran: "vLLM's own", or "overlay" (see model/overlay)."""


@dataclass(frozen=True, kw_only=True)
class Against:
    """The comparison with another topology."""

    topology: str
    max_abs_delta: float
    """Largest difference of any logprob."""
    bound: float
    """Largest difference allowed: 0 where equal bits are promised, else from rounding."""


@dataclass(kw_only=True)
class OpTraffic:
    """One step's traffic of one op."""

    count: int = 0
    bytes: int = 0
    groups: dict[str, dict[str, int]] = field(default_factory=dict)
    """count and bytes for each group."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """One step's traffic."""

    collectives: int
    """Operations: collectives and messages."""
    bytes: int
    """Bytes that crossed between ranks, by the ring algorithm."""
    by_op: dict[str, OpTraffic]


@dataclass(frozen=True, kw_only=True)
class Report:
    """A whole check."""

    topology: str
    ranks: int
    tokens: int
    seed: int
    transport: str
    subject: Subject
    checks: list[Verdict]
    taps: list[TapVerdict]
    ledger: Traffic
    seconds: float
    against: Against | None = None
    dtype: str = "float32"
    layers: str = "dmmm"
    sequences: int = 1
    aux: list[int] = field(default_factory=list)
    broke: dict[str, Any] | None = None
    """Why the step did not come to its end, if it did not."""

    @property
    def ok(self) -> bool:
        """Whether every check holds."""
        return all(check.ok for check in self.checks)

    @property
    def first(self) -> Verdict | None:
        """The failed check to read first: what it is about comes first in the program."""
        return headline(self.checks, self.taps)

    @property
    def headline(self) -> str:
        """The verdict in one line: the first violated tap in program order, if there is one."""
        first = self.first
        if first is None:
            return f"{self.topology} holds"
        return f"{self.topology} fails: {first.what} ({first.where}): {first.why}"

    def to_json(self) -> dict[str, Any]:
        """Plain data; numbers that JSON lacks (inf, nan) become strings."""
        return {"ok": self.ok, **_finite(asdict(self))}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, float) and value - value != 0:
        return str(value)
    return value
