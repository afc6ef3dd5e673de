"""Leaf kernels in plain torch, each with the contract of the kernel it stands in for.

None of them communicates. Sums run in float32 (float64 for float64 tensors), as on the GPU, and
results are rounded to the storage dtype where the GPU kernel stores.
"""

import functools

import torch


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a kernel computes: float64 for float64, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def as_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in this dtype: itself if it has it. `Tensor.to` finds out at the cost of a copy of
    a small one."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


@functools.lru_cache(maxsize=256)
def constant(value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A number as a tensor without dims, to be read only: a Python number among the operands
    costs as much again as the operation on a small tensor."""
    return torch.full((), value, dtype=dtype, device=device)
