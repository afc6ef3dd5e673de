"""Block-sparse grouped-query attention over a paged cache: stands in for the kernels of
`vllm.models.minimax_m3.common.ops.sparse_attn`.

A query attends to the tokens up to its own in the blocks that were chosen for its KV head. The
cache is [pages, G, B, 2 D], keys in the first D features and values in the others; a sequence's
block b is the page `block_table[sequence, b]`, so a page is as long as a block. What lies in a
page beyond the sequence is not looked at.

As in vLLM's kernels the choice is believed: a block that is chosen twice counts twice, and only
the first min(K, begun blocks) entries of a choice are read.
"""

from __future__ import annotations

import torch

from model.kernels import accumulator


def minimax_m3_sparse_attn(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    topk_idx: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    max_query_len: int,
    num_kv_heads: int,
    sm_scale: float,
    output: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Attend for prefilled queries, into `output`.

    q, output: [T, N, D], query head h reads KV head h // (N // G); kv_cache: [pages, G, B, 2 D];
    topk_idx: int [G, T, K]; block_table: int [S, blocks]; cu_seqlens_q: int [S + 1]; seq_lens:
    int [S], tokens in the cache; prefix_lens: int [S], tokens before the queries.

    Raises:
        NotImplementedError: a quantised cache.
        ValueError: a choice names no block where the kernel reads one: it would read a page of
            another sequence.
    """
    _refuse(k_scale, v_scale)
    starts, lengths, prefixes = (x.tolist() for x in (cu_seqlens_q, seq_lens, prefix_lens))
    for i, (length, prefix) in enumerate(zip(lengths, prefixes, strict=True)):
        rows = slice(starts[i], starts[i + 1])
        positions = torch.arange(prefix, prefix + rows.stop - rows.start, device=q.device)
        chosen = topk_idx[:, rows].to(torch.int64)
        read = _read(chosen, positions, kv_cache.shape[2])
        if bool((read & (chosen < 0)).any()):
            raise ValueError(
                f"sequence {i}: block {int(chosen[read].min())} is chosen for a query that has "
                "blocks to choose; the sparse attention kernel would read another sequence's page"
            )
        pages = block_table[i]
        _attend(q[rows], kv_cache, chosen, read, pages, length, positions, sm_scale, output[rows])


def minimax_m3_sparse_attn_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    topk_idx: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    num_kv_heads: int,
    sm_scale: float,
    output: torch.Tensor,
    decode_query_len: int,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Attend for decoded tokens, each sequence's last `decode_query_len`, into `output`.

    q, output: [S * decode_query_len, N, D]; a sequence of length 0 is padding, and its rows become
    0. An entry below 0 is skipped. Other arguments as for prefilled queries.

    Raises NotImplementedError for a quantised cache.
    """
    _refuse(k_scale, v_scale)
    for i, length in enumerate(seq_lens.tolist()):
        rows = slice(i * decode_query_len, (i + 1) * decode_query_len)
        positions = torch.arange(length - decode_query_len, length, device=q.device)
        chosen = topk_idx[:, rows].to(torch.int64)
        read = _read(chosen, positions, kv_cache.shape[2]) & (chosen >= 0)
        pages = block_table[i]
        _attend(q[rows], kv_cache, chosen, read, pages, length, positions, sm_scale, output[rows])
        output[rows][positions < 0] = 0


def _read(chosen: torch.Tensor, positions: torch.Tensor, block: int) -> torch.Tensor:
    """bool [G, n, K]: which entries of a choice the kernel reads."""
    begun = torch.where(positions < 0, 0, positions // block + 1)
    entry = torch.arange(chosen.shape[-1], device=chosen.device)
    return (entry < begun[:, None]).expand(chosen.shape)


def _attend(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    chosen: torch.Tensor,
    read: torch.Tensor,
    pages: torch.Tensor,
    length: int,
    positions: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> None:
    """One sequence's queries q [n, N, D] over the blocks chosen [G, n, K] for them, into out."""
    queries, heads, features = q.shape
    if not queries:
        return
    groups, block = kv_cache.shape[1:3]
    compute = accumulator(q.dtype)
    blocks = chosen.where(read, 0)
    # [G, n, K, B]: where in the sequence the key of each slot stands.
    place = blocks[..., None] * block + torch.arange(block, device=q.device)
    exists = read[..., None] & (place < length)
    seen = (exists & (place <= positions[:, None, None])).flatten(2)
    page = pages.to(torch.int64)[blocks]
    group = torch.arange(groups, device=q.device)[:, None, None]
    kv = kv_cache[page, group].to(compute)  # [G, n, K, B, 2 D]
    kv = torch.where(exists[..., None], kv, 0.0).flatten(2, 3)
    k, v = kv.split(features, dim=-1)
    # [G, n, heads of a group, D]
    of_group = q.to(compute).view(queries, groups, heads // groups, features).transpose(0, 1)
    scores = (of_group @ k.mT * scale).masked_fill(~seen[:, :, None], -torch.inf)
    exponentials = (scores - scores.amax(-1, keepdim=True)).exp()
    total = exponentials.sum(-1, keepdim=True)
    # Kernels round the probabilities to the cache's dtype before the second product.
    mixed = exponentials.to(kv_cache.dtype).to(compute) @ v / total
    out.copy_(mixed.transpose(0, 1).reshape(queries, heads, features))


def _refuse(k_scale: torch.Tensor | None, v_scale: torch.Tensor | None) -> None:
    if k_scale is not None or v_scale is not None:
        raise NotImplementedError("the sparse attention stand-in has no quantised cache")
