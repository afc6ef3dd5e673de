"""When the overlay's paths are on: decided once from vLLM's configuration, never from a shape."""

from typing import TYPE_CHECKING

from vllm.config.kernel import NATIVE_MEGA_MOE_BACKENDS

from model.overlay import SEQUENCE_PARALLEL_KEY

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def use_mega_moe(vllm_config: "VllmConfig") -> bool:
    """Whether the MoE layers run DeepGEMM's MegaMoE, which dispatches and combines by itself.

    Raises NotImplementedError for that backend without expert parallelism.
    """
    backend = vllm_config.kernel_config.moe_backend
    if backend not in NATIVE_MEGA_MOE_BACKENDS:
        return False
    if not vllm_config.parallel_config.enable_expert_parallel:
        raise NotImplementedError(
            f"MiniMax-M3 with moe_backend {backend} requires expert parallel; "
            "enable it with --enable-expert-parallel, or pick another MoE backend"
        )
    return True


def use_sequence_parallel(vllm_config: "VllmConfig") -> bool:
    """Whether the residual stream is sharded by token over the TP ranks.

    At every pipeline-parallel size: a stage takes and hands on full tensors.
    """
    return (
        use_mega_moe(vllm_config)
        and vllm_config.parallel_config.tensor_parallel_size > 1
        and _allowed(vllm_config)
    )


def _allowed(vllm_config: "VllmConfig") -> bool:
    extra = vllm_config.additional_config
    return not isinstance(extra, dict) or bool(extra.get(SEQUENCE_PARALLEL_KEY, True))
