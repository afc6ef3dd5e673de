"""Causal grouped-query attention over a paged KV cache: stands in for a paged-attention kernel,
and for the one that writes keys and values into the cache.

The cache is [pages, G, B, 2 D], keys in the first D features and values in the others. The token
at position p of a sequence is in slot p % B of its page `block_table[sequence, p // B]`. What
lies in a page beyond the sequence is not looked at.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from model.kernels import accumulator, as_dtype, constant


def insert_kv(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write each token's key and value to its slot.

    key, value: [T, G, D]; kv_cache: [pages, G, B, 2 D]; slot_mapping: int [T], page * B + place in
    the page, or below 0 for a token that is not to be written. The tokens may be more than the
    slots: the rest is padding.
    """
    slots, key, value = with_slots(slot_mapping, key, value)
    if not len(slots):
        return
    both = as_dtype(torch.cat((key, value), dim=-1), kv_cache.dtype)
    by_token = kv_cache.transpose(1, 2)
    block = kv_cache.shape[2]
    if by_token.is_contiguous():
        by_token.flatten(0, 1).index_copy_(0, slots, both)
    else:
        by_token[slots // block, slots % block] = both


def with_slots(slot_mapping: torch.Tensor, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The slots, int64, and of each of `values` [T, ...] the rows of the tokens that have one: all
    but those below 0, and the padding beyond the slots."""
    slots = as_dtype(slot_mapping, torch.int64)
    rows = tuple(value[: len(slots)] if len(slots) < len(value) else value for value in values)
    if not len(slots) or int(slots.min()) >= 0:
        return slots, *rows
    tokens = (slots >= 0).nonzero().squeeze(1)
    return slots[tokens], *(value[tokens] for value in rows)


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
    tokens, heads, features = query.shape
    groups, block = kv_cache.shape[1:3]
    compute = accumulator(query.dtype)
    by_token = kv_cache.transpose(1, 2)
    start = 0
    for i, (length, new) in enumerate(zip(seq_lens, query_lens, strict=True)):
        if not new:
            continue
        rows = slice(start, start + new)
        start += new
        # [G, length, 2 D]
        pages = by_token.index_select(0, block_table[i, : -(-length // block)])
        kv = as_dtype(pages.flatten(0, 1)[:length], compute).transpose(0, 1)
        k, v = kv.split_with_sizes((features, features), dim=-1)
        # The heads that read the same keys, one under another: [G, N // G * new, D].
        q = query if new == tokens else query[rows]
        q = as_dtype(q, compute).view(new, groups, heads // groups, features)
        q = q.permute(1, 2, 0, 3).reshape(groups, heads // groups * new, features)
        scores = torch.bmm(q * constant(scale, compute, query.device), k.mT)
        if new > 1:
            # Filled and not added: what comes after a token may be no number.
            scores.masked_fill_(_future(length, new, heads // groups, query.device), -torch.inf)
        attended = torch.bmm(scores.softmax(dim=-1), v).view(groups, heads // groups, new, features)
        into = out if new == tokens else out[rows]
        into.view(new, groups, heads // groups, features).copy_(attended.permute(2, 0, 1, 3))


@functools.lru_cache(maxsize=256)
def _future(length: int, new: int, heads: int, device: torch.device) -> torch.Tensor:
    """Which tokens come after the query's own, for the newest tokens of a sequence as many times
    as there are heads: bool [heads * new, length]."""
    positions = torch.arange(length - new, length, device=device)
    future = torch.arange(length, device=device) > positions[:, None]
    return future.repeat(heads, 1)
