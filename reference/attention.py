"""Causal grouped-query attention with per-head norms and partial rotary embedding.

Over all tokens, or in a sparse layer over those of the blocks that sparse.py chose.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from reference.config import M3Config
from reference.ops import all_reduced, gemma_norm, linear, rope, row_parallel, softmax_exponentials
from reference.rounding import Kind, Rounding
from reference.sparse import seen
from reference.weights import Weights


def attention(
    config: M3Config,
    weights: Weights,
    layer: int,
    x: Tensor,
    positions: Tensor,
    seq_lens: Sequence[int],
    blocks: Tensor | None,
    rounding: Rounding,
) -> Tensor:
    """The attention block of one layer, o_proj included: x [P, T, H] -> [P, T, H].

    Row t attends to the rows of its own sequence up to and including t; in a sparse layer only
    to those in its blocks, [T, G, K] of `select` in sparse.py (None in a dense layer). positions
    [T] int64 only turn the rotary embedding; they do not order rows.
    """
    prefix = f"layers.{layer}.self_attn."

    def heads(name: str, count: int) -> Tensor:
        y = linear(x, weights[f"{prefix}{name}_proj.weight"], rounding, Kind.STORED)
        return y.reshape(*x.shape[:2], count, config.head_dim)

    def norm_and_rotate(y: Tensor, name: str) -> Tensor:
        y = gemma_norm(y, weights[f"{prefix}{name}_norm.weight"], config.rms_norm_eps, rounding)
        return rope(y, positions, config.rotary_dim, config.rope_theta, rounding)

    group = config.num_attention_heads // config.num_key_value_heads
    q_PTND = norm_and_rotate(heads("q", config.num_attention_heads), "q")
    k_PTGD = norm_and_rotate(heads("k", config.num_key_value_heads), "k")
    k_PTND = k_PTGD.repeat_interleave(group, dim=2)
    v_PTND = heads("v", config.num_key_value_heads).repeat_interleave(group, dim=2)

    mixed_PTND = torch.empty_like(q_PTND)
    ends = accumulate(seq_lens)
    for rows in (slice(end - n, end) for n, end in zip(seq_lens, ends, strict=True) if n):
        length = rows.stop - rows.start
        allowed = torch.ones(length, length, dtype=torch.bool).tril()
        if blocks is not None:
            allowed = seen(blocks[rows], config.sparse_block_size).repeat_interleave(group, dim=0)
        q, k, v = (y[:, rows] for y in (q_PTND, k_PTND, v_PTND))
        mixed_PTND[:, rows] = _mixed(q, k, v, allowed, rounding)
    o_proj = weights[prefix + "o_proj.weight"]
    return all_reduced(*row_parallel(mixed_PTND.flatten(-2), o_proj, rounding), rounding)


def _mixed(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, rounding: Rounding) -> Tensor:
    """softmax(q k^T / sqrt(D)) v; all [P, n, N, D], n >= 1.

    allowed: bool [n, n] or [N, n, n], which columns each row sees.
    """
    q, k, v = (y.transpose(1, 2) for y in (q, k, v))  # [P, N, n, D]
    head_dim, length = q.shape[-1], q.shape[-2]
    scale = head_dim**-0.5
    scores = rounding(
        q @ k.mT * scale, q.abs() @ k.abs().mT * scale, head_dim + 2, Kind.ACCUMULATOR
    )
    exponentials, total = softmax_exponentials(scores, allowed, rounding)
    # Kernels round the probabilities to the storage dtype before the second product.
    p = rounding(exponentials / total, exponentials / total, 1, Kind.STORED)
    return rounding(p @ v, p.abs() @ v.abs(), length, Kind.STORED).transpose(1, 2)
