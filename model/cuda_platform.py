"""The platform of ranks with a GPU: out of tree as on the CPU, with CUDA tensors and NCCL.

Not vLLM's own CudaPlatform, which wants vLLM's compiled kernels: here the leaf kernels are the
same torch functions as on the CPU, which run wherever their inputs are.
"""

import torch

from model.platform import FoldedPlatform


class LaunchedPlatform(FoldedPlatform):
    """A GPU that one rank has, or that ranks share."""

    device_name = "cuda"
    device_type = "cuda"
    dispatch_key = "CUDA"
    dist_backend = "nccl"

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return torch.cuda.get_device_name(device_id)

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        torch.cuda.set_device(device)
