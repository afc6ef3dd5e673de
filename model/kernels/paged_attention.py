"""Causal grouped-query attention over a paged KV cache: stands in for a paged-attention kernel,
and for the one that writes keys and values into the cache.

The cache is [pages, G, B, 2 D], keys in the first D features and values in the others. The token
at position p of a sequence is in slot p % B of its page `block_table[sequence, p // B]`. What
lies in a page beyond the sequence is not looked at.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from model.kernels import accumulator


def insert_kv(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write each token's key and value to its slot.

    key, value: [T, G, D]; kv_cache: [pages, G, B, 2 D]; slot_mapping: int [T], page * B + place in
    the page, or below 0 for a token that is not to be written. The tokens may be more than the
    slots: the rest is padding.
    """
    slots = slot_mapping.to(torch.int64)
    tokens = (slots >= 0).nonzero().squeeze(1)
    if not len(tokens):
        return
    slots, block = slots[tokens], kv_cache.shape[2]
    both = torch.cat((key[tokens], value[tokens]), dim=-1)
    kv_cache[slots // block, :, slots % block] = both.to(kv_cache.dtype)


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    scale: float,
    out: torch.Tensor,
) -> None:
    """Attend from each sequence's newest tokens to those up to their own, into `out`.

    query, out: [T, N, D], query head h reads KV head h // (N // G); block_table: int [S, blocks];
    seq_lens: tokens of each sequence in the cache, the newest among them; query_lens: how many of
    them are the queries, in order, summing to T or less: rows beyond are padding, left as they are.
    out = softmax(scale * q k^T + mask) v, computed in float32 and rounded once to out's dtype.
    """
    heads, features = query.shape[1:]
    groups, block = kv_cache.shape[1:3]
    compute = accumulator(query.dtype)
    start = 0
    for i, (length, new) in enumerate(zip(seq_lens, query_lens, strict=True)):
        rows = slice(start, start + new)
        start += new
        if not new:
            continue
        pages = block_table[i, : -(-length // block)].to(torch.int64)
        # [G, length, 2 D]
        kv = kv_cache[pages].transpose(0, 1).flatten(1, 2)[:, :length].to(compute)
        k, v = kv.unsqueeze(1).split(features, dim=-1)
        q = query[rows].to(compute).view(new, groups, heads // groups, features)
        q = q.permute(1, 2, 0, 3)
        positions = torch.arange(length - new, length, device=query.device)
        future = torch.arange(length, device=query.device) > positions[:, None]
        scores = (q @ k.mT * scale).masked_fill(future, -torch.inf)
        attended = scores.softmax(dim=-1) @ v
        out[rows] = attended.permute(2, 0, 1, 3).reshape(new, heads, features).to(out.dtype)
