"""MegaMoE by its definition, in float64, one token and one expert at a time; and how far a correct
kernel may be from it. Written without a look at `model.megamoe`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CLAMP, ALPHA, BETA = 7.0, 1.702, 1.0
U16 = 2.0**-8
"""Unit roundoff of bfloat16."""
U32 = 2.0**-24
"""Unit roundoff of float32."""
SLOPE = 1.1
"""Bounds |d/dt (t sigmoid(alpha t))|, which is 1.0998 at alpha t = 2.4."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Expert matrices with how far each entry of the kernel's may be from them."""

    w1: Tensor
    """[E, I, H]"""
    w3: Tensor
    """[E, I, H]"""
    w2: Tensor
    """[E, H, I]"""
    d1: Tensor
    d3: Tensor
    d2: Tensor

    @classmethod
    def exact(cls, w1: Tensor, w3: Tensor, w2: Tensor) -> Experts:
        """Matrices that the kernel has exactly."""
        zeros = (torch.zeros_like(w) for w in (w1, w3, w2))
        return cls(w1=w1, w3=w3, w2=w2, **dict(zip(("d1", "d3", "d2"), zeros, strict=True)))


def dense(x: Tensor, experts: Experts, ids: Tensor, weights: Tensor) -> Tensor:
    """y[t] = sum over k of weights[t, k] * FFN_ids[t, k](x[t]), of ids that are not negative.

    x: [n, H]; ids: [n, K]; weights: [n, K]; float64 [n, H].
    """
    y = torch.zeros_like(x)
    for t in range(x.shape[0]):
        for k in range(ids.shape[1]):
            e = int(ids[t, k])
            if e >= 0:
                gate = (experts.w1[e] @ x[t]).clamp(max=CLAMP)
                up = (experts.w3[e] @ x[t]).clamp(-CLAMP, CLAMP)
                act = gate / (1 + torch.exp(-ALPHA * gate)) * (up + BETA)
                y[t] += float(weights[t, k]) * (experts.w2[e] @ act)
    return y


def bound(
    x: Tensor,
    dx: Tensor,
    experts: Experts,
    ids: Tensor,
    weights: Tensor,
    *,
    mxfp8: bool,
    independent: bool = False,
) -> Tensor:
    """Bound on |kernel - dense|, elementwise, [n, H]: worst case, or for independent roundings.

    dx: how far the kernel's x may be from x. With u = 2^-8, v = 2^-24, gamma(n) = n v / (1 - n v)
    (Higham, Accuracy and Stability of Numerical Algorithms, Lemma 3.1), L = SLOPE, and the error
    of each operand beside it, for one token and expert:

      linear(W, D; x, dx) = |W| dx + D (|x| + dx) + gamma(n) (|W| + D) (|x| + dx)
      E_g = linear(w1; x), then + u (|g| + E_g), stored as bfloat16; E_u from w3 likewise
      E_h = |w| (L E_g (|c| + E_u) + s E_u + 40 v (s + L E_g) (|c| + E_u))
            with c = up + beta and s = |gate sigmoid(alpha gate)|, after the clamp, which moves no
            two values apart; 40 v covers the activation's arithmetic, 32 of it the exponential's
            argument, of size up to 32
      stored: + u (|h| + E_h) in bfloat16, or
              + max(2^-4 (|h| + E_h), 2^-10 max(1e-4, max over the block of |h| + E_h) / 224)
              in MXFP8: half a step of 4 significant bits, or of the scale's smallest step
      E_o = linear(w2; h), then + u (|o| + E_o)
      E_y = sum E_o + gamma(K) sum (|o| + E_o), then + u (|y| + E_y)

    The worst case is met only if all roundings conspire, and grows with the lengths of the sums
    where errors grow with their roots: behind two layers of quantised weights it says nothing.
    independent: the errors of a sum's terms are independent and of mean zero (Higham and Mary,
    SIAM J. Sci. Comput. 41 (2019)), so wherever they add up above, the root of the sum of their
    squares takes the sum's place, in `linear` and over the slots; and the result is multiplied by
    6: a bounded sum exceeds 6 such roots with probability 2 exp(-18) = 3e-8 (Hoeffding).
    """
    y = dense(x, experts, ids, weights)
    norm = 2.0 if independent else 1.0
    error = torch.zeros_like(x)
    size = torch.zeros_like(x)
    top_k = ids.shape[1]
    for t in range(x.shape[0]):
        for k in range(top_k):
            e = int(ids[t, k])
            if e < 0:
                continue
            gate, e_gate = _linear(experts.w1[e], experts.d1[e], x[t], dx[t], norm)
            up, e_up = _linear(experts.w3[e], experts.d3[e], x[t], dx[t], norm)
            assert (ALPHA * gate).min() > -32
            e_gate, e_up = e_gate + U16 * (gate.abs() + e_gate), e_up + U16 * (up.abs() + e_up)
            gate, c = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP) + BETA
            s = (gate / (1 + torch.exp(-ALPHA * gate))).abs()
            w = abs(float(weights[t, k]))
            largest = (s + SLOPE * e_gate) * (c.abs() + e_up)
            e_h = w * (SLOPE * e_gate * (c.abs() + e_up) + s * e_up + 40 * U32 * largest)
            h = w * s * c.abs()
            e_h = e_h + (_mxfp8_step(h + e_h) if mxfp8 else U16 * (h + e_h))
            signed = float(weights[t, k]) * gate / (1 + torch.exp(-ALPHA * gate)) * c
            o, e_o = _linear(experts.w2[e], experts.d2[e], signed, e_h, norm)
            e_o = e_o + U16 * (o.abs() + e_o)
            error[t] += e_o**norm
            size[t] += o.abs() + e_o
    error = error ** (1 / norm) + _gamma(top_k) * size
    return (6 if independent else 1) * (error + U16 * (y.abs() + error)) + 1e-30


def quantisation_error(x: Tensor) -> Tensor:
    """How far MXFP8 may move x [..., K] under vLLM's choice of scale, elementwise."""
    return _mxfp8_step(x.abs())


def _mxfp8_step(size: Tensor) -> Tensor:
    block = size.unflatten(-1, (-1, 32)).amax(dim=-1, keepdim=True).clamp(min=1e-4)
    smallest = (block * 2.0**-10 / 224).expand(*block.shape[:-1], 32).flatten(-2)
    return torch.maximum(size * 2.0**-4, smallest)


def _linear(w: Tensor, dw: Tensor, x: Tensor, dx: Tensor, norm: float) -> tuple[Tensor, Tensor]:
    full = x.abs() + dx
    moved = ((w.abs() ** norm) @ dx**norm + (dw**norm) @ full**norm) ** (1 / norm)
    return w @ x, moved + _gamma(x.shape[0]) * ((w.abs() + dw) @ full)


def _gamma(terms: int) -> float:
    return terms * U32 / (1 - terms * U32)
