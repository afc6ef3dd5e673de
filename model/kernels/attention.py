"""Causal attention over several whole sequences: stands in for a paged-attention kernel."""

from collections.abc import Sequence

import torch

from model.kernels import accumulator


def causal_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seq_lens: Sequence[int],
    scale: float,
    out: torch.Tensor,
) -> None:
    """Attend within each sequence to the tokens up to one's own, into `out`.

    query, out: [T, heads, D]; key, value: [T, kv_heads, D]; heads is a multiple of kv_heads, and
    query head h reads kv head h // (heads // kv_heads) (grouped-query attention).
    seq_lens: lengths of the sequences, in order, summing to T; zero is allowed.
    out = softmax(scale * q k^T + mask) v, computed in float32 and rounded once to out's dtype.
    Raises ValueError if the lengths do not sum to T.
    """
    tokens, heads, head_dim = query.shape
    kv_heads = key.shape[1]
    if sum(seq_lens) != tokens:
        raise ValueError(f"seq_lens sum to {sum(seq_lens)}, but the batch has {tokens} tokens")
    compute = accumulator(query.dtype)
    start = 0
    for length in seq_lens:
        rows = slice(start, start + length)
        start += length
        if length == 0:
            continue
        # [kv_heads, queries of a kv head, length, D]
        q = query[rows].to(compute).view(length, kv_heads, heads // kv_heads, head_dim)
        q = q.permute(1, 2, 0, 3)
        k = key[rows].to(compute).permute(1, 2, 0).unsqueeze(1)
        v = value[rows].to(compute).transpose(0, 1).unsqueeze(1)
        future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(diagonal=1)
        scores = (q @ k * scale).masked_fill(future, float("-inf"))
        attended = scores.softmax(dim=-1) @ v
        out[rows] = attended.permute(2, 0, 1, 3).reshape(length, heads, head_dim).to(out.dtype)
