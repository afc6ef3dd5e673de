"""What `rankfold check` found, as data. The JSON keys are kept stable."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from properties import TapVerdict, Verdict
from properties.headline import headline
from rankfold.options import Options


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
    same_tokens: bool | None = None
    """Of requests: whether both have sampled the same tokens."""
    near_ties: list[str] = field(default_factory=list)
    """Of requests: near ties that fell the other way, after which nothing is compared."""


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
class RequestReport:
    """One request."""

    prompt: list[int]
    tokens: list[int]
    """What was sampled."""
    prompt_logprobs: list[float]
    """Of each prompt token but the first, given those before it."""
    logprobs: list[float]
    """Of each sampled token."""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One step of a plan."""

    ok: bool
    tokens: int
    parts: list[dict[str, int]]
    """In the order of its rows: request, start (tokens that its cache holds), length, decode (1
    where the token was sampled before)."""


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
    attention: str = "dense"
    requests: list[RequestReport] = field(default_factory=list)
    """Where requests were served in several steps. Checks and taps are then those of the first
    step that fails, or else the worst of all steps."""
    tokens_by_dp_rank: list[int] = field(default_factory=list)
    """Where DP ranks have tokens of their own; taps are then named "dp0.", "dp1.", and so on."""
    steps: list[StepReport] = field(default_factory=list)
    violated_step: int | None = None
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
        return {"ok": self.ok, **finite(asdict(self))}


def about(options: Options) -> dict[str, Any]:
    """What a report says of its options."""
    return {
        "topology": options.topology.word,
        "ranks": options.topology.world_size,
        "seed": options.seed,
        "transport": options.transport,
        "dtype": options.dtype,
        "layers": options.layers,
        "attention": options.attention,
        "aux": list(options.aux),
    }


def finite(value: Any) -> Any:
    """Data in which numbers that JSON lacks (inf, nan) are strings."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    if isinstance(value, float) and value - value != 0:
        return str(value)
    return value
