"""What faults on vLLM's MiniMax-M3 are written with: patches for as long as a fault is open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch

Method = Callable[..., Any]
MEGA = ("moe_backend", "deep_gemm_mega_moe")
"""The field of an example that has MegaMoE, and so a stream sharded by token."""
FUSED_NORM = "fused_allreduce_gemma_rms_norm"
"""vLLM's name for a norm that sums its input over the TP ranks first."""


def minimax_m3() -> Any:
    """vLLM's module; imported when a fault is switched on, not before."""
    import vllm.models.minimax_m3.nvidia.model as module

    # Its classes derive from the module's, and must find them there and not a fault.
    overlay_model()
    return module


def overlay_model() -> Any:
    """The backbone with sequence parallelism, whose methods are its stage entry and exit."""
    from model.overlay.model import MiniMaxM3Model

    return MiniMaxM3Model


def overlay_layers() -> Any:
    """The module of the layers with sequence parallelism."""
    from model.overlay import layers

    return layers


def moe_runner() -> Any:
    """vLLM's class that runs routed and shared experts and reduces their output."""
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    return MoERunner


def coordinator() -> Any:
    """vLLM's class of a group: its collectives and its transport between stages."""
    from vllm.distributed.parallel_state import GroupCoordinator

    return GroupCoordinator


def tp_rank() -> int:
    """This rank's place among the TP ranks."""
    from vllm.distributed import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def tp_size() -> int:
    """The number of TP ranks."""
    from vllm.distributed import get_tensor_model_parallel_world_size

    return int(get_tensor_model_parallel_world_size())


def all_reduce(x: torch.Tensor) -> torch.Tensor:
    """The sum over the TP ranks, by vLLM's own call, of a copy: `x` is left as it is."""
    from vllm.distributed import tensor_model_parallel_all_reduce

    return torch.as_tensor(tensor_model_parallel_all_reduce(x.clone()))


def is_shared_expert(kwargs: dict[str, Any]) -> bool:
    """Whether an FFN is built as a shared expert, by its constructor's arguments."""
    return str(kwargs.get("prefix", "")).endswith("shared_experts")


@contextmanager
def wrapped(owner: Any, name: str, make: Callable[[Method], Method]) -> Iterator[None]:
    """Within, `owner.name` is what `make` makes of it."""
    with patch.object(owner, name, make(getattr(owner, name))):
        yield


def when_built(change: Callable[[Any], None]) -> AbstractContextManager[None]:
    """Within, `change` is called with every backbone that is built.

    It is called as the weights are loaded: the overlay runs the constructors' own code with other
    names, so they must stay functions of vLLM's.
    """

    def changed(own: Method) -> Method:
        def load(self: Any, weights: Any) -> Any:
            change(self)
            return own(self, weights)

        return load

    return wrapped(minimax_m3().MiniMaxM3Model, "load_weights", changed)


def own_layers(backbone: Any) -> list[Any]:
    """The layers of a stage."""
    return [backbone.layers[i] for i in range(backbone.start_layer, backbone.end_layer)]


def runs_experts(layer: Any) -> bool:
    """Whether a layer has experts that vLLM's MoE runner runs, and not MegaMoE."""
    return bool(layer.is_moe_layer) and isinstance(layer.block_sparse_moe.experts, moe_runner())


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within, `owner.name` is `value`."""
    with patch.object(owner, name, value):
        yield
