"""Block-sparse attention for the second MiniMax-M3, token by token and head by head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from reference import M3Config


def chosen(config: M3Config, index_q: Tensor, index_k: Tensor) -> list[list[list[int]]]:
    """The blocks of each token and index head of one sequence, straight from the definition.

    index_q [n, G, D], index_k [n, D]; the result is sorted, then filled up with -1.
    """
    size, most = config.sparse_block_size, config.sparse_topk_blocks
    dots = torch.einsum("tgd,sd->tgs", index_q, index_k).tolist()
    return [
        [_of_row(head, t // size, t, size, most, config) for head in row]
        for t, row in enumerate(dots)
    ]


def _of_row(
    dots: list[float], own: int, t: int, size: int, most: int, config: M3Config
) -> list[int]:
    score = {b: max(dots[b * size : min((b + 1) * size, t + 1)]) for b in range(own + 1)}
    kept = [
        b for b in score if b < config.sparse_init_blocks or b > own - config.sparse_local_blocks
    ]
    others = sorted((b for b in score if b not in kept), key=lambda b: (-score[b], b))
    kept = sorted((kept + others)[:most])
    return kept + [-1] * (most - len(kept))


def attend(q: Tensor, k: Tensor, v: Tensor, blocks: list[list[list[int]]], size: int) -> Tensor:
    """One sequence: q [n, N, D], k and v [n, G, D] -> [n, N, D]."""
    out, group = torch.empty_like(q), q.shape[1] // k.shape[1]
    for t in range(len(q)):
        for g in range(k.shape[1]):
            tokens = [s for s in range(t + 1) if s // size in blocks[t][g]]
            heads = slice(g * group, (g + 1) * group)
            keys, values = (y[tokens, g].expand(group, -1, -1) for y in (k, v))
            out[t, heads] = F.scaled_dot_product_attention(q[t, heads, None], keys, values).squeeze(
                1
            )
    return out
