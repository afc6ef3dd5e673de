"""vLLM's process groups on one rank: made over the world's own process group, and named."""

import importlib
from typing import Any

import torch.distributed as dist

from model import device
from sim import RankContext

_COORDINATORS = ("world", "tp", "pp", "dp", "ep", "dcp", "pcp", "eplb")


def join_groups(ctx: RankContext) -> None:
    """Make vLLM's groups over the process group that the world has already made.

    All ranks of the world call it, each under its own current VllmConfig. A rank makes them once:
    all models on one world have the same groups.
    """
    state = _parallel_state()
    if state.model_parallel_is_initialized():
        return
    backend = dist.get_backend()
    # vLLM takes the local rank for the number of the rank's GPU.
    index = device.current().index
    state.init_distributed_environment(
        world_size=ctx.world_size,
        rank=ctx.rank,
        local_rank=ctx.rank if index is None else index,
        backend=backend,
    )
    state.initialize_model_parallel(ctx.topology.tp, ctx.topology.pp, backend=backend)


def group_labels() -> dict[str, dist.ProcessGroup]:
    """This rank's groups by name: "tp" moves tensors, "tp.cpu" objects, and so on."""
    state = _parallel_state()
    groups = {}
    for name in _COORDINATORS:
        coordinator = getattr(state, f"_{name.upper()}")
        if coordinator is not None:
            groups[name] = coordinator.device_group
            groups[f"{name}.cpu"] = coordinator.cpu_group
    return groups


def _parallel_state() -> Any:
    return importlib.import_module("vllm.distributed.parallel_state")
