"""What to check, validated: bad input ends in one line that says what would be right."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from itertools import pairwise

import torch

from model.megamoe.tiny import MegaTinyM3
from model.tiny import ATTENTIONS, TinyM3
from rankfold.errors import UsageError
from sim import Topology

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}

MEGA_MOE = "deep_gemm_mega_moe"
MOE_BACKENDS = ("auto", MEGA_MOE)
EXPERT_DTYPES = ("bf16", "mxfp8")

TRANSPORTS = ("folded", "gloo")
LAUNCHED = ("nccl", "gloo-gpu")
"""What ranks that a launcher has started on GPUs may talk over as well."""

MOST_REQUESTS = 8
"""Requests that a subject's KV caches have room for at a time."""

MOST_DECODE = 1024
"""Decode steps: each is a step of all ranks."""

MOST_TOKENS = 2048
"""Tokens of one step; vLLM's scheduler hands out no more by default."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to check."""

    topology: Topology
    tokens: int = 8
    """Of all DP ranks together."""
    dp_tokens: tuple[int, ...] = ()
    """Tokens of each DP rank; none given spreads `tokens` over them, unevenly."""
    sequences: int = 1
    """Of each DP rank, as far as it has the tokens."""
    seed: int = 0
    dtype: str = ""
    """"" is float32, or bfloat16 for MegaMoE, which knows nothing else."""
    layers: str = "dmmm"
    attention: str = "dense"
    """"dense", "sparse" (block-sparse in every layer) or "model": the real one's, dense first."""
    requests: int = 0
    """Requests of different lengths, drawn from the seed, in place of `tokens` and `sequences`; 0
    makes requests of these if there is a plan for several steps."""
    decode: int = 0
    """Steps after the prompts, each with one token of every request."""
    chunk: int = 0
    """Most prompt tokens of a request in a step; 0 is all of them."""
    moe_backend: str = "auto"
    expert_dtype: str = "bf16"
    """Format of MegaMoE's expert weights."""
    sp: str = "auto"
    """"auto" shards the stream by token where the code does so, "off" keeps it replicated."""
    aux: tuple[int, ...] = ()
    """Ids of the aux hidden states to capture: id k is the stream before layer k."""
    against: Topology | None = None
    also: tuple[Topology, ...] = ()
    """Other topologies that run the same model, which has experts for all of them."""
    page: int = 0
    """Tokens of a page of the KV caches; 0 is a block of sparse attention."""
    transport: str = "folded"
    """What the ranks are: threads of this process in turns, or processes over gloo; or as they were
    launched, see LAUNCHED."""

    def __post_init__(self) -> None:
        if not self.dtype:
            object.__setattr__(self, "dtype", "bfloat16" if self.mega else "float32")
        _one_of("--dtype", self.dtype, tuple(DTYPES))
        _one_of("--moe-backend", self.moe_backend, MOE_BACKENDS)
        _one_of("--expert-dtype", self.expert_dtype, EXPERT_DTYPES)
        _one_of("--sp", self.sp, ("auto", "off"))
        _one_of("--attention", self.attention, ATTENTIONS)
        if self.transport not in LAUNCHED:
            _one_of("--transport", self.transport, TRANSPORTS)
        if self.mega and self.dtype != "bfloat16":
            raise UsageError(f"{MEGA_MOE} returns bfloat16; use --dtype bfloat16")
        if self.mega and not self.topology.ep and "m" in self.layers:
            raise UsageError(
                f"{MEGA_MOE} needs expert parallelism; use a word such as tep{self.topology.tp}"
            )
        if not 0 <= self.tokens <= MOST_TOKENS:
            raise UsageError(f"{self.tokens} tokens: use 0 to {MOST_TOKENS}")
        if not 1 <= self.sequences <= max(self.tokens, 1):
            raise UsageError(
                f"{self.sequences} sequences of {self.tokens} tokens: use 1 to as many"
            )
        if not 0 <= self.requests <= MOST_REQUESTS:
            raise UsageError(f"--requests {self.requests}: use 1 to {MOST_REQUESTS}")
        if not 0 <= self.decode <= MOST_DECODE:
            raise UsageError(f"--decode {self.decode}: use 0 to {MOST_DECODE}")
        if self.chunk < 0:
            raise UsageError(f"--chunk {self.chunk}: use 1 or more tokens, or 0 for whole prompts")
        if self.sequences > MOST_REQUESTS:
            raise UsageError(f"--sequences {self.sequences}: use 1 to {MOST_REQUESTS}")
        if self.dp_tokens and len(self.dp_tokens) != self.topology.dp:
            raise UsageError(
                f"--tokens with {len(self.dp_tokens)} numbers: {self.topology} has "
                f"{self.topology.dp} DP ranks; give one number, or one for each"
            )
        if self.dp_tokens and (min(self.dp_tokens) < 0 or sum(self.dp_tokens) != self.tokens):
            raise UsageError(f"tokens {list(self.dp_tokens)}: use 0 or more for each DP rank")
        if self.in_steps and any(t.dp > 1 for t in (self.topology, self.against) if t):
            raise UsageError(
                "--requests, --decode and --chunk serve requests on one DP rank; DP ranks are "
                "checked in one step: leave them out"
            )
        if self.in_steps and not self.requests and not self.tokens:
            raise UsageError("--tokens 0: --decode and --chunk need a prompt of one token or more")
        if self.page and self.tiny.sparse_layers:
            raise UsageError(
                f"pages of {self.page} tokens: sparse layers need pages of a block; use dense "
                "attention"
            )
        most = len(self.layers)
        if any(not 0 <= aux_id <= most for aux_id in self.aux):
            raise UsageError(f"aux ids {list(self.aux)}: use 0 to {most}, the number of layers")

    @property
    def mega(self) -> bool:
        """Whether the experts are MegaMoE's."""
        return self.moe_backend == MEGA_MOE

    @functools.cached_property
    def tiny(self) -> TinyM3:
        """The model's sizes."""
        if self.mega:
            return MegaTinyM3(
                layers=self.layers,
                expert_dtype=self.expert_dtype,
                attention=self.attention,
                num_local_experts=self._experts(MegaTinyM3.num_local_experts),
            )
        return TinyM3(
            layers=self.layers,
            attention=self.attention,
            num_local_experts=self._experts(TinyM3.num_local_experts),
        )

    def _experts(self, usual: int) -> int:
        """One expert for each expert-parallel rank at least, and as many on each where several
        topologies share the model."""
        topologies = (self.topology, self.against, *self.also)
        spreads = [t.dp * t.tp for t in topologies if t is not None and t.ep]
        count = max([usual, *spreads])
        if self.also and any(count % spread for spread in spreads):
            each = math.lcm(*spreads)
            return -(-usual // each) * each
        return count

    @property
    def tokens_by_dp_rank(self) -> tuple[int, ...]:
        """Tokens of each DP rank. Spread, the later ranks have more, and the first ones few or
        none: rank d of R has those from (d / R)^2 to ((d + 1) / R)^2 of all."""
        if self.dp_tokens:
            return self.dp_tokens
        ranks = self.topology.dp
        ends = [round(self.tokens * (d / ranks) ** 2) for d in range(ranks + 1)]
        return tuple(end - start for start, end in pairwise(ends))

    @property
    def in_steps(self) -> bool:
        """Whether requests are served in a plan of steps, rather than one step run."""
        return bool(self.requests or self.decode or self.chunk)

    @property
    def weights_key(self) -> tuple[object, ...]:
        """What the full checkpoint depends on."""
        return (self.tiny, self.seed, self.dtype, self.expert_dtype if self.mega else "")

    @property
    def model_key(self) -> tuple[object, ...]:
        """What a built model depends on, beside the topology."""
        return (*self.weights_key, self.moe_backend, self.sp, self.page)

    @property
    def layout_key(self) -> tuple[object, ...]:
        """What of the model decides which rank has which parameter, beside the topology."""
        return (self.tiny, self.expert_dtype if self.mega else "", self.moe_backend, self.sp)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of weights and activations."""
        return DTYPES[self.dtype]

    @property
    def shards_stream(self) -> bool:
        """Whether the stream has to be sharded by token (S1-1): EP, TP > 1 and MegaMoE."""
        return self.mega and self.sp == "auto" and self.topology.ep and self.topology.tp > 1


def one_dp_rank(topology: Topology, what: str) -> None:
    """Raise UsageError if there are several DP ranks, where `what` gives all ranks one batch."""
    if topology.dp > 1:
        raise UsageError(
            f"{topology}: {what} has no data parallelism; use tp, pp and ep, or rankfold check"
        )


def _one_of(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{option} {value!r}: use {', '.join(choices)}")
