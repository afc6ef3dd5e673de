"""The lightning indexer's block scores and selection: stands in for the kernels of
`vllm.models.minimax_m3.common.ops.index_topk`.

A query's score of a block of keys is the largest dot product of its index query with the index
keys of the block's tokens up to its own. Chosen are the K blocks of the largest scores, of those
that begin no later than the query; the first `init_blocks` and the last `local_blocks` of them
count as the largest of all. The softmax scale is left out: it does not change the order.

Index caches are [pages, B, D], one vector a token; a sequence's block b is the page
`block_table[sequence, b]`, so that a page is as long as a block. What lies in a page beyond the
sequence is not looked at.
"""

from __future__ import annotations

import torch

from model.kernels import accumulator

_INIT, _LOCAL, _NO_NUMBER = 1e30, 1e29, -1e30
"""What vLLM's kernels take for the score of a forced block, and of one that is no number."""


def minimax_m3_index_score(
    idx_q: torch.Tensor,
    index_kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    num_kv_heads: int,
) -> torch.Tensor:
    """The scores of prefilled queries, float32 [G, T, most blocks]; -inf for blocks to come.

    idx_q: [T, G, D], G index heads, as many as the rank's KV heads; index_kv_cache: [pages, B, D];
    block_table: int [S, blocks]; cu_seqlens_q: int [S + 1], where each sequence's queries begin;
    seq_lens: int [S], tokens in the cache, the queries' own among them; prefix_lens: int [S],
    tokens before the queries.

    Raises ValueError if there are not as many index heads as KV heads.
    """
    tokens, heads, _ = idx_q.shape
    if heads != num_kv_heads:
        raise ValueError(f"{heads} index heads on {num_kv_heads} KV heads: they must be as many")
    block = index_kv_cache.shape[1]
    blocks = -(-max_seq_len // block)
    score = idx_q.new_full((heads, tokens, blocks), -torch.inf, dtype=torch.float32)
    starts = cu_seqlens_q.tolist()
    for i, (length, prefix) in enumerate(zip(seq_lens.tolist(), prefix_lens.tolist(), strict=True)):
        rows = slice(starts[i], starts[i + 1])
        if rows.start < rows.stop:
            keys = _keys(index_kv_cache, block_table[i], length)
            of_blocks = _scores(idx_q[rows], keys, prefix, block)
            score[:, rows, : of_blocks.shape[-1]] = of_blocks
    return score


def minimax_m3_index_topk(
    score: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    prefix_lens: torch.Tensor,
    max_query_len: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The chosen blocks, int32 [G, T, K], the largest score first; -1 where there are fewer.

    score: as `minimax_m3_index_score` returns it. The blocks to come are those of score -inf there;
    vLLM's kernel finds them by the queries' positions and a block size that is a constant. Written
    into `out[:, :T]` where `out` is given, [G, T or more, K].
    """
    heads, tokens, _ = score.shape
    if out is None:
        chosen = score.new_empty((heads, tokens, topk), dtype=torch.int32)
    else:
        chosen = out[:, :tokens]
    # Rows beyond the last sequence are padding: the kernel leaves them alone.
    rows = slice(0, int(cu_seqlens_q[-1]))
    chosen[:, rows] = _choose(score[:, rows], topk, init_blocks, local_blocks)
    return chosen


def minimax_m3_index_decode(
    idx_q: torch.Tensor,
    index_kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    num_kv_heads: int,
    decode_query_len: int,
    max_decode_query_len: int,
    out: torch.Tensor | None = None,
    score_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Score and choose for decoded tokens: each sequence's last `decode_query_len`, in order.

    idx_q: [S * decode_query_len, G, D]; a sequence of length 0 is padding and chooses nothing.
    Other arguments and the result as for prefilled queries.

    Raises NotImplementedError if the scores are wanted too, and ValueError if the queries are not
    as many as the sequences want.
    """
    if score_out is not None:
        raise NotImplementedError("the indexer's stand-in keeps no scores of decoded tokens")
    sequences = seq_lens.shape[0]
    if idx_q.shape[0] != sequences * decode_query_len or decode_query_len > max_decode_query_len:
        raise ValueError(
            f"{idx_q.shape[0]} queries are not {decode_query_len} (of {max_decode_query_len} at "
            f"most) for each of {sequences} sequences"
        )
    ends = torch.arange(sequences + 1, device=idx_q.device) * decode_query_len
    # Padding has queries at positions below 0, where no block begins.
    prefixes = seq_lens.to(torch.int64) - decode_query_len
    score = minimax_m3_index_score(
        idx_q,
        index_kv_cache,
        block_table,
        ends,
        seq_lens,
        prefixes,
        decode_query_len,
        max_seq_len,
        num_kv_heads,
    )
    return minimax_m3_index_topk(
        score,
        ends,
        prefixes,
        decode_query_len,
        topk,
        init_blocks,
        local_blocks,
        out,
    )


def _keys(cache: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    """The index keys of one sequence, [length, D]."""
    used = pages[: -(-length // cache.shape[1])].to(torch.int64)
    return cache[used].flatten(0, 1)[:length]


def _scores(queries: torch.Tensor, keys: torch.Tensor, prefix: int, block: int) -> torch.Tensor:
    """[G, n, blocks] for n queries [n, G, D] from position `prefix` on, and keys [length, D]."""
    compute = accumulator(queries.dtype)
    length = keys.shape[0]
    qk = torch.einsum("qgd,kd->gqk", queries.to(compute), keys.to(compute))
    positions = torch.arange(prefix, prefix + queries.shape[0], device=queries.device)
    future = torch.arange(length, device=queries.device) > positions[:, None]
    qk = qk.masked_fill(future, -torch.inf)
    padded = torch.nn.functional.pad(qk, (0, -length % block), value=-torch.inf)
    return padded.unflatten(-1, (-1, block)).amax(-1)


def _choose(score: torch.Tensor, topk: int, init_blocks: int, local_blocks: int) -> torch.Tensor:
    """int32 [G, n, K] from the scores [G, n, blocks] of n queries."""
    begun = (score != -torch.inf).sum(-1, keepdim=True)
    number = torch.arange(score.shape[-1], device=score.device)
    score = torch.where(score.isnan(), _NO_NUMBER, score)
    score = torch.where(number < init_blocks, _INIT, score)
    score = torch.where(number >= (begun - local_blocks).clamp(min=0), _LOCAL, score)
    score = torch.where(number < begun, score, -torch.inf)
    chosen = score.sort(dim=-1, descending=True, stable=True).indices[..., :topk]
    chosen = torch.nn.functional.pad(chosen, (0, topk - chosen.shape[-1]), value=-1)
    return torch.where(torch.arange(topk, device=score.device) < begun, chosen, -1).to(torch.int32)
