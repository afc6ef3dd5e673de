"""Gemma RMSNorm: stands in for `flashinfer.norm.gemma_rmsnorm` and `gemma_fused_add_rmsnorm`.

Formula (Zhang and Sennrich 2019, with Gemma's 1 + w):
    y = x / sqrt(mean(x^2, last dim) + eps) * (1 + w)
"""

import torch

from model.kernels import accumulator, as_dtype, constant


def gemma_rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """Normalise the last dim of `input` [..., H] by `weight` [H], or by one that broadcasts to
    `input`; `input` is left as it is.

    Returns `out`, written in place, or a new tensor of the shape and dtype of `input`.
    `enable_pdl` is a launch option of the GPU kernel without meaning here.
    """
    normed = _normalise(as_dtype(input, accumulator(input.dtype)), weight, eps)
    if out is None:
        return as_dtype(normed, input.dtype)
    return out.copy_(normed)


def gemma_fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """In place: residual <- input + residual, then input <- norm(input + residual).

    `input` and `residual` are [..., H] of one dtype, and `weight` is [H]. As in the GPU kernel the
    norm sees the sum before it is rounded to the storage dtype.

    Raises ValueError if the shapes differ: a residual of one row must not be broadcast.
    """
    if input.shape != residual.shape:
        raise ValueError(
            f"gemma_fused_add_rmsnorm: input {list(input.shape)} and residual "
            f"{list(residual.shape)} must have equal shapes"
        )
    compute = accumulator(input.dtype)
    if residual.dtype == compute:
        total = residual.add_(input)
    else:
        total = input.to(compute) + residual.to(compute)
        residual.copy_(total)
    input.copy_(_normalise(total, weight, eps))


def _normalise(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    # The fewest operations: on a few tokens each costs as much as its arithmetic many times over.
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    mean = torch.addcmul(constant(eps, x.dtype, x.device), length, length, value=1 / x.shape[-1])
    normed = x * mean.rsqrt_()
    return torch.addcmul(normed, normed, as_dtype(weight, x.dtype))
