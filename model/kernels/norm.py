"""Gemma RMSNorm: stands in for `flashinfer.norm.gemma_rmsnorm` and `gemma_fused_add_rmsnorm`.

Formula (Zhang and Sennrich 2019, with Gemma's 1 + w):
    y = x / sqrt(mean(x^2, last dim) + eps) * (1 + w)
"""

import torch

from model.kernels import accumulator


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
    normed = _normalise(input.to(accumulator(input.dtype)), weight, eps)
    if out is None:
        return normed.to(input.dtype)
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
    total = input.to(compute) + residual.to(compute)
    residual.copy_(total)
    input.copy_(_normalise(total, weight, eps))


def _normalise(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    inverse_rms = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    return x * inverse_rms * (1 + weight.to(x.dtype))
