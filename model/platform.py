"""The folded platform: tells vLLM that it runs out of tree, on CPU, with these classes.

vLLM's own CpuPlatform is the wrong base: its experts refuse the uninterleaved SwiGLU-OAI, its
router asserts softmax, and its communicator wants shared memory. An out-of-tree platform leaves
vLLM's common code as it is and only names what is ours.
"""

from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms.interface import Platform, PlatformEnum

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class FoldedPlatform(Platform):
    """A CPU on which every rank of a world lives; collectives go through torch.distributed."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"
    # For those who do compile: no C++ compiler is asked for.
    simple_compile_backend = "eager"
    device_control_env_var = "RANKFOLD_VISIBLE_DEVICES"

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        """float64 is here for subjects that are to agree with the reference to rounding."""
        return [torch.float32, torch.bfloat16, torch.float16, torch.float64]

    @classmethod
    def import_kernels(cls) -> None:
        """Load no compiled kernels: they may be absent, or built for another device."""

    @classmethod
    def get_attn_backend_cls(cls, *_args: Any, **_kwargs: Any) -> str:
        return "model.attention_backend.FoldedAttentionBackend"

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "model.communicator.FoldedCommunicator"

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "rankfold"

    @classmethod
    def is_device_capability_family(cls, capability: int, device_id: int = 0) -> bool:
        """MegaMoE asks for SM100 before it builds; no other family is claimed."""
        return capability == 100

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """There is one device, and it is always the current one."""

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Name a worker class: vLLM has no default for an out-of-tree platform."""
        parallel = vllm_config.parallel_config
        if parallel.worker_cls == "auto":
            parallel.worker_cls = "vllm.v1.worker.worker_base.WorkerBase"
