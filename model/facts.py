"""Which code a subject runs, as its own attributes say."""

import importlib
from typing import Any

from model import overlay


def facts(model: Any) -> dict[str, Any]:
    """vLLM's version, whether the stream is sequence-parallel, and which experts run.

    Args:
        model: a MiniMaxM3SparseForCausalLM that has been built and loaded.
    """
    return {
        "vllm": str(importlib.import_module("vllm").__version__),
        "model": overlay.describe(model),
        # vLLM 0.33 has no sequence parallelism for M3; newer versions say so on the model.
        "sequence_parallel": bool(getattr(model.model, "use_sequence_parallel", False)),
        "moe_backend": _moe_backend(model),
    }


def _moe_backend(model: Any) -> str:
    for module in model.modules():
        if hasattr(module, "weight_format") and hasattr(module, "get_symm_buffer"):
            return f"deep_gemm_mega_moe ({module.weight_format.name} weights)"
        if hasattr(module, "quant_method") and hasattr(module, "w13_weight"):
            method = module.quant_method
            kernel = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
            return f"unquantized ({type(kernel or method).__name__})"
    return "none (no MoE layer on this stage)"
