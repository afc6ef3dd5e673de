"""What a deployment has done, as data. The JSON keys are kept stable."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from properties import TapVerdict, Verdict
from rankfold import report


@dataclass(frozen=True, kw_only=True)
class FleetReport:
    """The workers of one kind."""

    topology: str
    workers: int
    steps: list[int]
    """Of each worker."""
    requests_by_lane: dict[str, int]
    """How many requests each DP rank of each worker had."""
    ledger: report.Traffic
    """Of all steps of all of them."""


@dataclass(frozen=True, kw_only=True)
class HandOvers:
    """The hand-overs of KV caches, and their pieces."""

    whole: int
    given_up: int
    """Attempts that were given up half way; their requests were prefilled again."""
    pieces: int
    """That were sent, those sent again among them."""
    bytes: int
    lost: int
    late: int
    repeated: int
    """Pieces that arrived although the receiver had them."""
    stale: int
    """Pieces that arrived of an attempt that was given up, or after the end."""


@dataclass(frozen=True, kw_only=True)
class DeploymentReport:
    """A deployment and its requests."""

    topology: str
    """The deployment's word."""
    ranks: int
    tokens: int
    """That were run, those of attempts that were given up among them."""
    fleets: dict[str, FleetReport]
    seed: int
    transport: str
    dtype: str
    layers: str
    attention: str
    subject: report.Subject
    requests: list[report.RequestReport]
    checks: list[Verdict]
    taps: list[TapVerdict]
    ledger: report.Traffic
    """Of all steps of all workers."""
    steps: int
    """Steps of lanes that were judged."""
    seconds: float
    hand_overs: HandOvers | None = None
    against: report.Against | None = None
    broke: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    """What of a recipe is not folded."""
    recipe: str | None = None

    @property
    def ok(self) -> bool:
        """Whether every check holds."""
        return all(check.ok for check in self.checks)

    @property
    def headline(self) -> str:
        """The verdict in one line."""
        first = next((check for check in self.checks if not check.ok), None)
        if first is None:
            return f"{self.topology} holds"
        return f"{self.topology} fails: {first.what} ({first.where}): {first.why}"

    def to_json(self) -> dict[str, Any]:
        """Plain data; numbers that JSON lacks (inf, nan) become strings."""
        return {"ok": self.ok, **report.finite(asdict(self))}
