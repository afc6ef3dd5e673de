"""Which code a subject runs, as its own attributes say."""

import importlib
from typing import Any


def facts(model: Any) -> dict[str, Any]:
    """vLLM's version, whether the stream is sequence-parallel, and which experts run.

    Args:
        model: a MiniMaxM3SparseForCausalLM that has been built and loaded.
    """
    experts = [
        m for m in model.modules() if hasattr(m, "quant_method") and hasattr(m, "w13_weight")
    ]
    backend = "none (no MoE layer on this stage)"
    if experts:
        method = experts[0].quant_method
        kernel = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
        backend = f"unquantized ({type(kernel or method).__name__})"
    return {
        "vllm": str(importlib.import_module("vllm").__version__),
        # vLLM 0.33 has no sequence parallelism for M3; newer versions say so on the model.
        "sequence_parallel": bool(getattr(model.model, "use_sequence_parallel", False)),
        "moe_backend": backend,
    }
