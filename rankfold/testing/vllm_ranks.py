"""Worlds whose ranks are inside vLLM's groups, so that vLLM's own layers can be built on them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from model import plugin
from model.groups import group_labels, join_groups
from model.rank_state import RANK_LOCAL
from model.subject import prepare
from rankfold.run import PLUMBING
from rankfold.testing.worlds import WatchedWorld
from sim import RankContext, Topology, label_group

Configure = Callable[[RankContext], Any]
"""Makes the VllmConfig of a rank."""


def activate() -> str:
    """Put vLLM on the folded platform, before its model code is imported.

    Returns "", or why that is no longer possible.
    """
    try:
        plugin.activate()
    except ImportError as error:
        if (error.name or "").split(".")[0] != "vllm":
            raise
        return "vLLM is not installed: install it, or put a checkout on PYTHONPATH"
    except RuntimeError as error:
        return (
            f"{str(error).split(';')[0]}: its model code was imported too early. Set "
            "rankfold_vllm = true in pytest's settings, or run pytest --rankfold-vllm"
        )
    return ""


def vllm_world(
    topology: Topology | str | int, *, configure: Configure | None = None, **options: Any
) -> WatchedWorld:
    """A world whose ranks have joined vLLM's groups, named tp, pp, ep and so on.

    Each program runs under the rank's VllmConfig, without gradients. The ledger and the
    sanitizer start after the groups are made.

    Args:
        topology: a topology, its word, or a number of ranks.
        configure: makes each rank's VllmConfig; by default one without a model, of the
            topology's sizes.
        options: of `WatchedWorld`.

    Raises:
        ValueError: the topology has data parallelism.
    """
    prepare()
    configs: dict[int, Any] = {}

    @contextmanager
    def around(context: RankContext) -> Iterator[None]:
        config = configs.get(context.rank)
        if config is None:
            config = configs[context.rank] = (configure or _bare_config)(context)
        current = importlib.import_module("vllm.config").set_current_vllm_config
        with current(config), torch.no_grad():
            yield

    world = WatchedWorld(
        topology, around=around, rank_local=RANK_LOCAL, plumbing=PLUMBING, **options
    )
    try:
        if world.topology.dp > 1:
            raise ValueError(f"{world.topology}: data parallelism is not driven yet; use tp and pp")
        world.run(_join)
    except BaseException:
        world.close()
        raise
    world.forget()
    return world


def load(
    module: nn.Module, **weights: torch.Tensor | Mapping[str | int, torch.Tensor]
) -> nn.Module:
    """Load full tensors into a vLLM layer on this rank: vLLM's own loaders take the rank's part.

    Args:
        module: the layer.
        weights: parameter name -> the full tensor; or, for merged layers, shard id -> its full
            tensor, such as `{"q": ..., "k": ..., "v": ...}` or `{0: gate, 1: up}`. Write
            `**{"down_proj.weight": w}` for names with dots.

    Returns the module. Raises AttributeError for a parameter that the module lacks.
    """
    default = importlib.import_module(
        "vllm.model_executor.model_loader.weight_utils"
    ).default_weight_loader
    for name, weight in weights.items():
        parameter = module.get_parameter(name)
        loader = getattr(parameter, "weight_loader", default)
        if isinstance(weight, Mapping):
            for shard, part in weight.items():
                loader(parameter, part, shard)
        else:
            loader(parameter, weight)
    for layer in module.modules():
        method = getattr(layer, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(layer)
    return module


def _bare_config(context: RankContext) -> Any:
    config = importlib.import_module("vllm.config")
    parallel = config.ParallelConfig(
        tensor_parallel_size=context.topology.tp,
        pipeline_parallel_size=context.topology.pp,
        enable_expert_parallel=context.topology.ep,
    )
    made = config.VllmConfig(parallel_config=parallel)
    made.parallel_config.rank = context.rank
    return made


def _join(context: RankContext) -> None:
    join_groups(context)
    for label, group in group_labels().items():
        label_group(group, label)
    workspace = importlib.import_module("vllm.v1.worker.workspace")
    workspace.init_workspace_manager(torch.device("cpu"))
