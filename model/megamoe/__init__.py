"""vLLM's own MegaMoE experts on CPU, in MiniMax-M3's MoE block.

| file | what it is |
|---|---|
| block.py | the MoE block of MiniMax-M3 on vLLM's `DeepGemmMegaMoEExperts` |
| deep_gemm.py | stands in for the `deep_gemm` Python module under that class |
| preconditions.py | what a launch asks of its arguments |
| exchange.py | rows to the ranks that own their experts, and results back |
| experts.py, layout.py | the experts' arithmetic, and the layout of their weights |
| prepare.py | stands in for the Triton kernel that stages the inputs |
| mxfp8.py | the MXFP8 format |
| tiny.py | configurations and checkpoints that MegaMoE can run |

This module imports neither vLLM nor anything that does: it holds the rows that MegaMoE adds to
the tables of replaced names and of rank-local state.
"""

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from sim import RankLocal

Row = TypeVar("Row")

_EXPERTS = "vllm.model_executor.layers.fused_moe.deep_gemm_mega_moe"
_STAGING = "vllm.model_executor.layers.fused_moe.prepare_megamoe"

RANK_LOCAL: tuple[RankLocal, ...] = (
    RankLocal(
        f"{_EXPERTS}:DeepGemmMegaMoEExperts",
        ("_symm_buffers", "_synchronized_ep_groups"),
        "this rank's symmetric buffers and which of its groups have launched, by id(group)",
    ),
)
"""Rows for the table of rank-local state."""


def real_deep_gemm() -> bool:
    """Whether MegaMoE's own kernels can run here: an SM100 GPU, and a deep_gemm that has them.

    Imports vLLM where there is such a GPU.
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 10:
        return False
    module = importlib.import_module("vllm.utils.deep_gemm")._import_deep_gemm()
    return hasattr(module, "bf16_mega_moe")


def overrides(row: Callable[..., Row]) -> tuple[Row, ...]:
    """Rows for the table of replaced names, made by `row` (`model.overrides.Override`)."""

    def attribute(module: str, name: str) -> Any:
        return getattr(importlib.import_module(module), name)

    return (
        row(
            target="vllm.utils.deep_gemm:_import_deep_gemm",
            kind="leaf kernel",
            reason="MegaMoE's dispatch, expert GEMMs and combine are one CUDA kernel of deep_gemm",
            replacement=lambda: lambda: importlib.import_module("model.megamoe.deep_gemm"),
        ),
        row(
            target=f"{_STAGING}:_prepare_megamoe_inputs_kernel",
            kind="leaf kernel",
            reason="quantises the hidden states and repacks the routing; a Triton kernel",
            replacement=lambda: attribute("model.megamoe.prepare", "StagingKernel")(),
        ),
        row(
            target=f"{_STAGING}:triton",
            kind="leaf kernel",
            reason="that kernel's launcher computes its grid with functions of triton, and vLLM's "
            "placeholder for an absent Triton lacks one of them",
            replacement=lambda: attribute("model.megamoe.prepare", "GRID_FUNCTIONS"),
        ),
        row(
            target="torch.accelerator:current_device_index",
            kind="platform hook",
            reason="part of the key of MegaMoE's buffers; there is one device, and no accelerator",
            replacement=lambda: lambda: 0,
        ),
    )
