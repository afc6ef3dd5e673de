"""Sequence parallelism for MiniMax-M3 at every pipeline-parallel size, over vLLM's own classes.

Read it as the pull request that it stands in for:

| file | what it is |
|---|---|
| config.py | when it is on |
| stream.py | the exchanges of a token-sharded stream |
| layers.py | the decoder layer and its FFNs |
| model.py | stage entry, stage exit, final gather |
| rebind.py | how an overlay names other classes in vLLM's constructors |
| placements.py | what a model's values are at each tap |
| relay.py | aux hidden states through the stages between |

The overlay steps aside when the installed vLLM's MiniMax-M3 has sequence parallelism itself, and
for every MoE backend but MegaMoE: there vLLM's own classes run, and nothing of this package.
Importing this package does not import vLLM; calling it does.
"""

import importlib
from typing import Any

__all__ = ["SEQUENCE_PARALLEL_KEY", "describe", "model_class", "needed"]

SEQUENCE_PARALLEL_KEY = "minimax_m3_sequence_parallel"
"""Entry of `VllmConfig.additional_config`: False keeps the stream replicated, to compare with."""

_MODULE = "vllm.models.minimax_m3.nvidia.model"
_CLASS = "MiniMaxM3SparseForCausalLM"


def needed() -> bool:
    """Whether the installed vLLM's MiniMax-M3 lacks sequence parallelism."""
    return not hasattr(importlib.import_module(_MODULE), "_use_sequence_parallel")


def model_class(vllm_config: Any) -> type:
    """The MiniMaxM3SparseForCausalLM to build for a VllmConfig: vLLM's own, or the overlay's.

    Raises NotImplementedError for MegaMoE without expert parallelism.
    """
    own = getattr(importlib.import_module(_MODULE), _CLASS)
    if not needed():
        return own
    config = importlib.import_module("model.overlay.config")
    if not config.use_mega_moe(vllm_config):
        return own
    return getattr(importlib.import_module("model.overlay.model"), _CLASS)


def describe(model: object) -> str:
    """Whose MiniMax-M3 a built model is: "vLLM's own" or "overlay"."""
    return "overlay" if type(model).__module__.startswith(f"{__name__}.") else "vLLM's own"
