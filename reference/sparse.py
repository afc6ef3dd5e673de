"""Which blocks of keys a query of a sparse layer attends to: MiniMax-M3's lightning indexer.

The definition, as vLLM 0.33 documents it (models/minimax_m3/common: indexer.py and the
docstrings of ops/index_topk.py). Tokens of a sequence, counted from its first, form blocks of
`sparse_block_size`. Of the normed stream x, each query token t and index head g

    index_q[t, g] = rope(norm(index_q_proj x))     one head per key/value head
    index_k[s]    = rope(norm(index_k_proj x))     one for all index heads
    score[t, g, b] = max over the tokens s <= t of block b of index_q[t, g] . index_k[s]

and no scale, which would not change the order. Chosen are the first `sparse_init_blocks` blocks
and the last `sparse_local_blocks`, the one of t included; then the best by score, until there are
`sparse_topk_blocks` in all, or as many as begin at or before t. All query heads that share
key/value head g then attend to the tokens s <= t of these blocks only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from reference.config import M3Config
from reference.moe import Tolerance
from reference.ops import gemma_norm, linear, rope
from reference.rounding import Kind, Rounding
from reference.weights import Weights

NO_BLOCK = -1
"""What fills a choice where fewer than K blocks have begun."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The blocks that a layer attends to."""

    chosen: Tensor
    """[T, G, K] int64 block numbers within the sequence, ascending, then -1; one for all probes."""
    rejected: tuple[int, ...]
    """Rows where what was proposed for some head was not a legal choice; for that head the
    reference's own was used."""


def select(
    config: M3Config,
    weights: Weights,
    layer: int,
    x: Tensor,
    positions: Tensor,
    seq_lens: Sequence[int],
    proposed: Tensor | None,
    tolerance: Tolerance,
    rounding: Rounding,
) -> Selection:
    """Choose the blocks of each row and index head; follow `proposed` where it is legal.

    x [P, T, H], the normed stream; positions [T] int64, for the rotary embedding only; proposed
    [T, G, K] block numbers that a subject chose, in any order, or None. tolerance is given the
    scores [P, T, G, B], with 0 for blocks that have not begun. A row of a head is legal if its
    blocks differ and have begun, are as many as they must be and -1 elsewhere, have the forced
    ones among them, and each other one scores >= (k-th best) - tolerance.
    """
    scores = _scores(config, weights, layer, x, positions, seq_lens, rounding)
    place = torch.cat([torch.arange(n) for n in (0, *seq_lens)])
    begun = (place // config.sparse_block_size + 1)[:, None]  # [T, 1]
    number = torch.arange(scores.shape[-1])
    exists = number < begun  # [T, B]
    last = number >= begun - config.sparse_local_blocks
    forced = exists & ((number < config.sparse_init_blocks) | last)

    rank = scores[0].masked_fill(forced[:, None], torch.inf)
    rank = rank.masked_fill(~exists[:, None], -torch.inf)  # [T, G, B]
    # Room for K also where no sequence has so many blocks.
    rank = torch.nn.functional.pad(
        rank, (0, max(0, config.sparse_topk_blocks - rank.shape[-1])), value=-torch.inf
    )
    # Stable: among equal scores the first block comes first.
    ranked, order = rank.sort(dim=-1, descending=True, stable=True)
    k = config.sparse_topk_blocks
    count = begun.clamp(max=k)
    chosen = order[..., :k].masked_fill((torch.arange(k) >= count)[:, None], NO_BLOCK)
    rejected: tuple[int, ...] = ()
    margin = tolerance(scores.masked_fill(~exists[:, None], 0.0))
    if proposed is not None:
        worst = ranked.gather(-1, (count - 1)[:, None].expand(-1, ranked.shape[1], -1))
        # Where only forced blocks fit, nothing else will do, whatever the tolerance.
        threshold = torch.where(worst == torch.inf, worst, worst - margin)
        legal = _legal(rank, threshold, count, forced.sum(-1), proposed)
        chosen = torch.where(legal[..., None], proposed.to(torch.int64), chosen)
        rejected = tuple((~legal).any(-1).nonzero().flatten().tolist())
    # Ascending, with -1 last: as if it were the greatest.
    ascending = chosen.masked_fill(chosen == NO_BLOCK, rank.shape[-1]).sort(dim=-1).values
    chosen = ascending.masked_fill(ascending == rank.shape[-1], NO_BLOCK)
    return Selection(chosen=chosen, rejected=rejected)


def seen(chosen: Tensor, block_size: int) -> Tensor:
    """[G, n, n] bool: which tokens of their sequence its n rows attend to.

    chosen [n, G, K]: the blocks of these rows. Row i sees column j <= i if block
    j // block_size is among those of row i.
    """
    length = chosen.shape[0]
    block = torch.arange(length) // block_size
    of_chosen = (chosen[..., None] == block).any(dim=2)  # [n, G, n]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    return of_chosen.transpose(0, 1) & causal


def _scores(
    config: M3Config,
    weights: Weights,
    layer: int,
    x: Tensor,
    positions: Tensor,
    seq_lens: Sequence[int],
    rounding: Rounding,
) -> Tensor:
    """[P, T, G, B] score of each block for each row and head; -inf where it has not begun."""
    prefix = f"layers.{layer}.self_attn.index_"

    def heads(name: str, count: int) -> Tensor:
        y = linear(x, weights[f"{prefix}{name}_proj.weight"], rounding, Kind.STORED)
        y = y.reshape(*x.shape[:2], count, config.head_dim)
        y = gemma_norm(y, weights[f"{prefix}{name}_norm.weight"], config.rms_norm_eps, rounding)
        y = rope(y, positions, config.rotary_dim, config.rope_theta, rounding)
        return rounding(y, y.abs(), 1, Kind.INDEXED)

    q_PGTD = heads("q", config.num_key_value_heads).transpose(1, 2)
    k_P1TD = heads("k", 1).transpose(1, 2)
    size = config.sparse_block_size
    blocks = -(-max(seq_lens, default=0) // size)
    scores = x.new_full((*x.shape[:2], q_PGTD.shape[1], blocks), -torch.inf)
    ends = accumulate(seq_lens)
    for rows in (slice(end - n, end) for n, end in zip(seq_lens, ends, strict=True) if n):
        q, k = q_PGTD[:, :, rows], k_P1TD[:, :, rows]
        magnitude = q.abs() @ k.abs().mT
        dots = rounding(q @ k.mT, magnitude, config.head_dim, Kind.ACCUMULATOR)  # [P, G, n, n]
        length = dots.shape[-1]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        dots = dots.masked_fill(future, -torch.inf)
        dots = torch.nn.functional.pad(dots, (0, -length % size), value=-torch.inf)
        best = dots.reshape(*dots.shape[:-1], -1, size).amax(-1)  # [P, G, n, its blocks]
        scores[:, rows, :, : best.shape[-1]] = best.transpose(1, 2)
    return scores


def _legal(
    rank: Tensor, threshold: Tensor, count: Tensor, forced: Tensor, proposed: Tensor
) -> Tensor:
    """[T, G] bool: which choices of proposed [T, G, K] are legal, see `select`.

    rank [T, G, B]: scores, inf for forced blocks and -inf for those that have not begun;
    threshold [T, G, 1]: the least score; count [T, 1]: how many to choose; forced [T]: how many
    of them are forced.
    """
    named = proposed != NO_BLOCK
    known = (proposed >= 0) & (proposed < rank.shape[-1])
    score = rank.gather(-1, proposed.to(torch.int64).where(known, 0)).where(known, -torch.inf)
    # Not begun is never good, also under an infinite tolerance.
    good = (score >= threshold) & (score > -torch.inf)
    ascending = proposed.sort(dim=-1).values
    twice = (ascending[..., 1:] == ascending[..., :-1]) & (ascending[..., 1:] != NO_BLOCK)
    return (
        (good | ~named).all(-1)
        & ~twice.any(-1)
        & (named.sum(-1) == count)
        & ((score == torch.inf).sum(-1) == forced[:, None])
    )
