"""The model's building blocks in float64, each telling `Rounding` which roundings it makes.

All activations have a leading dim P of probes (see rounding.py). No operation here knows about
layers, names or configuration objects.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reference.rounding import Kind, Rounding

# An elementary function (exp, sigmoid, rsqrt, cos) is good to a few units in the last place.
ELEMENTARY = 4


def linear(x: Tensor, weight: Tensor, rounding: Rounding, kind: Kind) -> Tensor:
    """x [..., T, in] @ weight [..., out, in]^T -> [..., T, out]; leading dims broadcast."""
    return rounding(x @ weight.mT, x.abs() @ weight.abs().mT, x.shape[-1], kind)


def row_parallel(x: Tensor, weight: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """`linear` as a subject's ranks share it out along the `in` dim, before the all-reduce.

    Returns y [..., T, out] and the sum of the squared terms of each element, like y: what
    `all_reduced` needs once all sums that travel together are added.
    """
    return linear(x, weight, rounding, Kind.ACCUMULATOR), x.square() @ weight.square().mT


def all_reduced(y: Tensor, squares: Tensor, rounding: Rounding) -> Tensor:
    """y after an all-reduce of the ranks' partial sums; squares as `row_parallel` gives them."""
    return rounding(y, squares.sqrt(), 1, Kind.REDUCED)


def gemma_norm(x: Tensor, weight: Tensor, eps: float, rounding: Rounding) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * (1 + weight) over the last dim; float32, stored once.

    x [..., n], weight [n]. Formula: RMSNorm (Zhang and Sennrich 2019) with Gemma's offset of 1.
    """
    mean_square = x.square().mean(-1, keepdim=True)
    mean_square = rounding(mean_square, mean_square, x.shape[-1] + 2, Kind.ACCUMULATOR)
    scale = torch.rsqrt(mean_square + eps)
    scale = rounding(scale, scale, ELEMENTARY, Kind.ACCUMULATOR)
    y = x * scale * (1 + weight)
    return rounding(y, y.abs(), 3, Kind.STORED)


def rope(x: Tensor, positions: Tensor, rotary_dim: int, theta: float, rounding: Rounding) -> Tensor:
    """Partial NeoX rotary embedding: rotate the first `rotary_dim` dims of each head.

    x [P, T, heads, D], positions [T] int64 -> like x. With halves [a, b] of the rotated dims:
    [a c - b s, b c + a s], angle = position * theta^(-2 j / rotary_dim), j < rotary_dim / 2.
    Formula: RoFormer (Su et al. 2021), halves paired as in GPT-NeoX.
    """
    half = rotary_dim // 2
    exponent = torch.arange(half, dtype=torch.float64) * (-2.0 / max(rotary_dim, 1))
    angle = positions.to(torch.float64)[:, None] * theta**exponent
    angle = angle[None, :, None, :].expand(x.shape[0], -1, 1, -1)
    cos, sin = (_table(f(angle), angle, rounding) for f in (torch.cos, torch.sin))
    a, b, rest = x[..., :half], x[..., half:rotary_dim], x[..., rotary_dim:]
    y = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    magnitude = torch.cat(
        [
            a.abs() * cos.abs() + b.abs() * sin.abs(),
            b.abs() * cos.abs() + a.abs() * sin.abs(),
        ],
        dim=-1,
    )
    return torch.cat([rounding(y, magnitude, 2, Kind.STORED), rest], dim=-1)


def _table(value: Tensor, angle: Tensor, rounding: Rounding) -> Tensor:
    # The angle itself is a rounded product: its error is relative to |angle|, and cos and sin
    # pass it on with slope at most 1. So far-away positions are less exact, in any subject.
    value = rounding(value, 1 + angle.abs(), ELEMENTARY, Kind.ACCUMULATOR)
    return rounding(value, value.abs(), 1, Kind.STORED)


def swiglu_oai(
    gate: Tensor, up: Tensor, limit: float, alpha: float, beta: float, rounding: Rounding
) -> Tensor:
    """g * sigmoid(alpha g) * (u + beta), g = min(gate, limit), u = clamp(up, -limit, limit).

    Shapes: all alike. Formula: the SwiGLU variant of OpenAI's gpt-oss.
    """
    gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    sigmoid = torch.sigmoid(alpha * gate)
    # The argument's rounding is relative to |alpha g|, and d(sigmoid)/dz <= sigmoid.
    reach = sigmoid * (1 + (alpha * gate).abs())
    sigmoid = rounding(sigmoid, reach, ELEMENTARY, Kind.ACCUMULATOR)
    y = gate * sigmoid * (up + beta)
    return rounding(y, y.abs(), 3, Kind.STORED)


def softmax_exponentials(
    scores: Tensor, allowed: Tensor, rounding: Rounding
) -> tuple[Tensor, Tensor]:
    """exp(score - max) over the last dim and its sum (kept as a dim of size 1).

    scores [..., n], allowed [..., n] bool (broadcasts): exponentials elsewhere are exactly 0.
    """
    top = scores.masked_fill(~allowed, -torch.inf).amax(-1, keepdim=True)
    shifted = rounding(scores - top, (scores - top).abs(), 1, Kind.ACCUMULATOR)
    exponentials = torch.exp(shifted.masked_fill(~allowed, -torch.inf))
    exponentials = rounding(exponentials, exponentials, ELEMENTARY, Kind.ACCUMULATOR)
    total = exponentials.sum(-1, keepdim=True)
    return exponentials, rounding(total, total, scores.shape[-1], Kind.ACCUMULATOR)


def log_softmax(logits: Tensor, rounding: Rounding) -> Tensor:
    """logits - log sum exp(logits) over the last dim; computed and kept in the accumulator."""
    allowed = torch.ones(logits.shape[-1], dtype=torch.bool)
    top = logits.amax(-1, keepdim=True)
    _, total = softmax_exponentials(logits, allowed, rounding)
    log_total = total.log()
    log_total = rounding(log_total, log_total.abs(), ELEMENTARY, Kind.ACCUMULATOR)
    y = logits - top - log_total
    magnitude = (logits - top).abs() + log_total.abs() + top.abs()
    return rounding(y, magnitude, 2, Kind.ACCUMULATOR)
