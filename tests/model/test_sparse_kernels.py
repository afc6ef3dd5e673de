"""The stand-ins of the sparse layers against their definitions, token by token.

Where Triton is there, tests/model/triton compares them with vLLM's own kernels as well.
"""

from __future__ import annotations

import math

import pytest
import torch

from model.kernels.index_topk import (
    minimax_m3_index_decode,
    minimax_m3_index_score,
    minimax_m3_index_topk,
)
from model.kernels.norm import gemma_rmsnorm
from model.kernels.paged_attention import insert_kv, paged_attention
from model.kernels.qknorm_rope import fused_minimax_m3_qknorm_rope_kv_insert
from model.kernels.sparse_attention import minimax_m3_sparse_attn, minimax_m3_sparse_attn_decode

BLOCK, GROUPS, HEADS, FEATURES = 4, 2, 4, 8
PREFIX, NEW = (6, 0, 17), (3, 1, 1)
LENGTHS = tuple(p + n for p, n in zip(PREFIX, NEW, strict=True))
TOKENS = sum(NEW)
STARTS = torch.tensor([0, 3, 4, 5], dtype=torch.int32)


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Caches:
    """Three sequences in scattered pages; what no token was written to is NaN."""

    def __init__(self) -> None:
        self.table = torch.tensor([[7, 2, 9, 0, 0], [4, 0, 0, 0, 0], [1, 8, 3, 6, 5]])
        self.k = [rand(n, GROUPS, FEATURES, seed=i) for i, n in enumerate(LENGTHS)]
        self.v = [rand(n, GROUPS, FEATURES, seed=9 + i) for i, n in enumerate(LENGTHS)]
        self.index = [rand(n, FEATURES, seed=20 + i) for i, n in enumerate(LENGTHS)]
        self.kv = torch.full((10, GROUPS, BLOCK, 2 * FEATURES), math.nan)
        self.keys = torch.full((10, BLOCK, FEATURES), math.nan)
        for i, length in enumerate(LENGTHS):
            slots = torch.tensor([self.slot(i, at) for at in range(length)])
            insert_kv(self.k[i], self.v[i], self.kv, slots)
            self.keys[slots // BLOCK, slots % BLOCK] = self.index[i]

    def slot(self, sequence: int, position: int) -> int:
        return int(self.table[sequence, position // BLOCK]) * BLOCK + position % BLOCK


def queries() -> list[tuple[int, int, int]]:
    """(row, sequence, position) of each new token."""
    found = []
    for sequence, (prefix, new) in enumerate(zip(PREFIX, NEW, strict=True)):
        found += [(len(found) + j, sequence, prefix + j) for j in range(new)]
    return found


def attended(q: torch.Tensor, caches: Caches, sequence: int, seen: list[int]) -> torch.Tensor:
    """[N, D]: the definition, for one query and the positions that it sees."""
    out = torch.empty(HEADS, FEATURES)
    for head in range(HEADS):
        group = head // (HEADS // GROUPS)
        scores = torch.tensor([float(q[head] @ caches.k[sequence][s, group]) for s in seen])
        p = (scores * FEATURES**-0.5).softmax(0)
        out[head] = sum(w * caches.v[sequence][s, group] for w, s in zip(p, seen, strict=True))
    return out


def test_paged_attention() -> None:
    caches, q = Caches(), rand(TOKENS + 1, HEADS, FEATURES, seed=5)
    out = torch.full_like(q, 7.0)
    paged_attention(q, caches.kv, caches.table, LENGTHS, NEW, FEATURES**-0.5, out)
    for row, sequence, position in queries():
        expected = attended(q[row], caches, sequence, [*range(position + 1)])
        assert torch.allclose(out[row], expected, atol=1e-6)
    assert (out[TOKENS:] == 7.0).all()  # padding


def test_insert_leaves_out_slots_below_0() -> None:
    cache = torch.zeros(2, GROUPS, BLOCK, 2 * FEATURES)
    key, value = rand(3, GROUPS, FEATURES), rand(3, GROUPS, FEATURES, seed=1)
    insert_kv(key, value, cache, torch.tensor([5, -1]))  # the third token is padding
    assert torch.equal(cache[1, :, 1], torch.cat((key[0], value[0]), dim=-1))
    assert cache.count_nonzero() == 2 * GROUPS * FEATURES


def block_scores(q: torch.Tensor, caches: Caches, sequence: int, position: int) -> list[float]:
    """The definition, for one index head's query."""
    scores: dict[int, float] = {}
    for s in range(position + 1):
        score = float(q @ caches.index[sequence][s])
        scores[s // BLOCK] = max(score, scores.get(s // BLOCK, -math.inf))
    return list(scores.values())


def best(scores: list[float], topk: int, init: int, local: int) -> list[int]:
    """The definition of the choice: the last blocks, then the first, then by score."""
    blocks = range(len(scores))
    forced = [b for b in blocks if b >= len(scores) - local or b < init]
    free = sorted((b for b in blocks if b not in forced), key=lambda b: -scores[b])
    return sorted((forced + free)[:topk])


@pytest.mark.parametrize(("topk", "init", "local"), [(3, 1, 1), (2, 0, 0), (4, 0, 2), (9, 1, 1)])
def test_the_choice_of_prefilled_queries(topk: int, init: int, local: int) -> None:
    caches, q = Caches(), rand(TOKENS, GROUPS, FEATURES, seed=6)
    prefix, lengths = torch.tensor(PREFIX), torch.tensor(LENGTHS)
    score = minimax_m3_index_score(
        q, caches.keys, caches.table, STARTS, lengths, prefix, 3, max(LENGTHS), GROUPS
    )
    out = torch.full((TOKENS + 2, GROUPS, topk), -7, dtype=torch.int32)
    chosen = minimax_m3_index_topk(
        score, STARTS, prefix, 3, topk, init, local, out=out.transpose(0, 1)
    )
    assert chosen.data_ptr() == out.data_ptr()
    assert (out[TOKENS:] == -7).all()
    for row, sequence, position in queries():
        for group in range(GROUPS):
            scores = block_scores(q[row, group], caches, sequence, position)
            assert torch.allclose(score[group, row, : len(scores)], torch.tensor(scores), atol=1e-6)
            assert (score[group, row, len(scores) :] == -math.inf).all()
            expected = best(scores, topk, init, local)
            row_chosen = chosen[group, row].tolist()
            assert sorted(row_chosen[: len(expected)]) == expected
            assert row_chosen[len(expected) :] == [-1] * (topk - len(expected))


def test_the_choice_of_decoded_tokens() -> None:
    """Two tokens a sequence; one of length 0 is padding."""
    caches = Caches()
    lengths = torch.tensor([9, 0, 18])
    q = rand(6, GROUPS, FEATURES, seed=7)
    chosen = minimax_m3_index_decode(
        q, caches.keys, caches.table, lengths, 18, 3, 1, 1, GROUPS, 2, 2
    )
    assert (chosen[:, 2:4] == -1).all()
    for row, sequence, position in [(0, 0, 7), (1, 0, 8), (4, 2, 16), (5, 2, 17)]:
        for group in range(GROUPS):
            expected = best(block_scores(q[row, group], caches, sequence, position), 3, 1, 1)
            assert sorted(b for b in chosen[group, row].tolist() if b >= 0) == expected


def choices() -> torch.Tensor:
    """int32 [G, T, 3]: of each query and KV head the first, a middle and the last block."""
    chosen = torch.full((GROUPS, TOKENS, 3), -1, dtype=torch.int32)
    for row, _, position in queries():
        begun = position // BLOCK + 1
        for group in range(GROUPS):
            blocks = sorted({0, min(1 + group, begun - 1), begun - 1})
            chosen[group, row, : len(blocks)] = torch.tensor(blocks)
            # As many as there are to choose: those that are there twice count twice.
            chosen[group, row, len(blocks) : min(3, begun)] = blocks[-1]
    return chosen


def seen_by(chosen: torch.Tensor, position: int) -> list[int]:
    """The positions that a choice lets a query see."""
    slots = (b * BLOCK + j for b in chosen.tolist() if b >= 0 for j in range(BLOCK))
    return [s for s in slots if s <= position]


def test_sparse_attention_of_prefilled_queries() -> None:
    caches, q, chosen = Caches(), rand(TOKENS, HEADS, FEATURES, seed=8), choices()
    out = torch.full_like(q, math.nan)
    minimax_m3_sparse_attn(
        q,
        caches.kv,
        chosen,
        caches.table,
        STARTS,
        torch.tensor(LENGTHS),
        torch.tensor(PREFIX),
        3,
        GROUPS,
        FEATURES**-0.5,
        out,
    )
    for row, sequence, position in queries():
        for group in range(GROUPS):
            expected = attended(q[row], caches, sequence, seen_by(chosen[group, row], position))
            heads = slice(group * HEADS // GROUPS, (group + 1) * HEADS // GROUPS)
            assert torch.allclose(out[row, heads], expected[heads], atol=1e-6)


def test_sparse_attention_of_decoded_tokens() -> None:
    caches, q = Caches(), rand(3, HEADS, FEATURES, seed=8)
    chosen = torch.tensor([[2, -1, 0], [-1, -1, -1], [1, 4, 2]], dtype=torch.int32)
    chosen = chosen.expand(GROUPS, 3, 3)
    out = torch.full_like(q, math.nan)
    lengths = torch.tensor([9, 0, 18])
    minimax_m3_sparse_attn_decode(
        q, caches.kv, chosen, caches.table, lengths, GROUPS, FEATURES**-0.5, out, 1
    )
    for row, sequence in ((0, 0), (2, 2)):
        seen = seen_by(chosen[0, row], int(lengths[row]) - 1)
        expected = attended(q[row], caches, sequence, seen)
        assert torch.allclose(out[row], expected, atol=1e-6)
    assert (out[1] == 0).all()


def test_a_choice_of_nothing_is_refused_where_the_kernel_would_read_it() -> None:
    caches, q = Caches(), rand(TOKENS, HEADS, FEATURES)
    chosen = choices()
    chosen[1, 2, 0] = -1
    with pytest.raises(ValueError, match="sequence 0: block -1 is chosen"):
        minimax_m3_sparse_attn(
            q,
            caches.kv,
            chosen,
            caches.table,
            STARTS,
            torch.tensor(LENGTHS),
            torch.tensor(PREFIX),
            3,
            GROUPS,
            1.0,
            torch.empty_like(q),
        )


def test_qknorm_rope_in_the_sparse_layout() -> None:
    """Every part as the dense layout computes it alone, and each where it belongs."""
    tokens, eps, rotary = 3, 1e-6, 4
    parts = {"q": HEADS, "k": GROUPS, "v": GROUPS, "index_q": GROUPS, "index_k": 1}
    given = {name: rand(tokens, n * FEATURES, seed=i) for i, (name, n) in enumerate(parts.items())}
    weights = {n: rand(FEATURES, seed=30 + i) * 0.2 for i, n in enumerate(parts) if n != "v"}
    angles = rand(16, rotary // 2, seed=40)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.tensor([0, 5, 11])

    def turned(name: str) -> torch.Tensor:
        normed = gemma_rmsnorm(given[name].view(tokens, -1, FEATURES), weights[name], eps)
        cos, sin = table[positions].unsqueeze(1).chunk(2, dim=-1)
        a, b = normed[..., :2], normed[..., 2:4]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, normed[..., 4:]), dim=-1)

    qkv = torch.cat(list(given.values()), dim=-1)
    before = qkv.clone()
    q_out = torch.empty(tokens, HEADS * FEATURES)
    index_q_out = torch.empty(tokens, GROUPS * FEATURES, dtype=torch.bfloat16)
    kv = torch.zeros(2, GROUPS, BLOCK, 2 * FEATURES)
    index = torch.zeros(2, BLOCK, FEATURES, dtype=torch.bfloat16)
    fused_minimax_m3_qknorm_rope_kv_insert(
        qkv,
        weights["q"],
        weights["k"],
        table,
        positions,
        HEADS,
        GROUPS,
        rotary,
        eps,
        weights["index_q"],
        weights["index_k"],
        GROUPS,
        torch.tensor([5, -1, 2]),
        torch.tensor([6, 0, -1]),
        kv,
        index,
        BLOCK,
        q_out,
        index_q_out,
    )
    assert torch.allclose(q_out.view(tokens, HEADS, -1), turned("q"), atol=1e-6)
    want = turned("index_q").to(torch.bfloat16)
    assert torch.equal(index_q_out.view(tokens, GROUPS, -1), want)
    after = dict(zip(parts, qkv.split([n * FEATURES for n in parts.values()], dim=1), strict=True))
    old = dict(zip(parts, before.split([n * FEATURES for n in parts.values()], dim=1), strict=True))
    for name in ("q", "v", "index_q"):
        assert torch.equal(after[name], old[name])
    for name in ("k", "index_k"):
        assert torch.allclose(after[name].view(tokens, -1, FEATURES), turned(name), atol=1e-6)
    key, value = turned("k"), given["v"].view(tokens, GROUPS, FEATURES)
    for token, (page, place) in {0: (1, 1), 2: (0, 2)}.items():
        both = torch.cat((key[token], value[token]), dim=-1)
        assert torch.allclose(kv[page, :, place], both, atol=1e-6)
    assert kv.count_nonzero() == 2 * GROUPS * 2 * FEATURES
    for token, (page, place) in {0: (1, 2), 1: (0, 0)}.items():
        assert torch.equal(index[page, place], turned("index_k")[token, 0].to(torch.bfloat16))
    assert index.count_nonzero() == 2 * FEATURES
