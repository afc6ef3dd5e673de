"""Leaf kernels in plain torch, each with the contract of the kernel it stands in for.

None of them communicates. Sums run in float32 (float64 for float64 tensors), as on the GPU, and
results are rounded to the storage dtype where the GPU kernel stores.
"""

import torch


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a kernel computes: float64 for float64, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32
