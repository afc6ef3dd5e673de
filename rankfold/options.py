"""What to check, validated: bad input ends in one line that says what would be right."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from model.megamoe.tiny import MegaTinyM3
from model.tiny import TinyM3
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

MOST_TOKENS = 2048
"""Tokens of one step; vLLM's scheduler hands out no more by default."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to check."""

    topology: Topology
    tokens: int = 8
    sequences: int = 1
    seed: int = 0
    dtype: str = ""
    """"" is float32, or bfloat16 for MegaMoE, which knows nothing else."""
    layers: str = "dmmm"
    moe_backend: str = "auto"
    expert_dtype: str = "bf16"
    """Format of MegaMoE's expert weights."""
    sp: str = "auto"
    """"auto" shards the stream by token where the code does so, "off" keeps it replicated."""
    aux: tuple[int, ...] = ()
    """Ids of the aux hidden states to capture: id k is the stream before layer k."""
    against: Topology | None = None
    transport: str = "folded"
    """What the ranks are: threads of this process in turns, or processes over gloo."""

    def __post_init__(self) -> None:
        if not self.dtype:
            object.__setattr__(self, "dtype", "bfloat16" if self.mega else "float32")
        _one_of("--dtype", self.dtype, tuple(DTYPES))
        _one_of("--moe-backend", self.moe_backend, MOE_BACKENDS)
        _one_of("--expert-dtype", self.expert_dtype, EXPERT_DTYPES)
        _one_of("--sp", self.sp, ("auto", "off"))
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
        most = len(self.layers)
        if any(not 0 <= aux_id <= most for aux_id in self.aux):
            raise UsageError(f"aux ids {list(self.aux)}: use 0 to {most}, the number of layers")

    @property
    def mega(self) -> bool:
        """Whether the experts are MegaMoE's."""
        return self.moe_backend == MEGA_MOE

    @property
    def tiny(self) -> TinyM3:
        """The model's sizes."""
        if self.mega:
            return MegaTinyM3(layers=self.layers, expert_dtype=self.expert_dtype)
        return TinyM3(layers=self.layers)

    @property
    def weights_key(self) -> tuple[object, ...]:
        """What the full checkpoint depends on."""
        return (self.tiny, self.seed, self.dtype, self.expert_dtype if self.mega else "")

    @property
    def model_key(self) -> tuple[object, ...]:
        """What a built model depends on, beside the topology."""
        return (*self.weights_key, self.moe_backend, self.sp)

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


def _one_of(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{option} {value!r}: use {', '.join(choices)}")
