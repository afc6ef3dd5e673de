"""Run vLLM's Triton kernels on the CPU, in Triton's interpreter, against the stand-ins.

A program of its own, because Triton reads its settings when it is imported and the rest of the
tests have to see none. Prints one JSON object:

    {kernel: {"cases": n, "worst": largest deviation in bounds, "ties": rows, "wrong": [...]}}

Arguments: the seed, the cases of each kernel and dtype, and a mutation of the stand-ins ("" for
none): wrong-scale, late-causal or no-local.
"""
# ruff: noqa: E402  (Triton's and vLLM's settings must come before what reads them)

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any

assert os.environ["TRITON_INTERPRET"] == "1", "Triton's interpreter is chosen by the environment"

import torch

torch.set_num_threads(1)

from model import plugin

plugin.activate()

from vllm.models.minimax_m3.common.ops import index_topk as real_index
from vllm.models.minimax_m3.common.ops import sparse_attn as real_attention

from model.kernels import index_topk, sparse_attention

BLOCK = real_attention.SPARSE_BLOCK_SIZE
LENGTHS = (0, 1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3, 5 * BLOCK - 2)
"""Tokens before the queries: below, at and above a block, and enough to drop blocks."""
U32 = 2.0**-24


def without_autotuning() -> None:
    """Leave each autotuned kernel its last configuration: there is no GPU to time them on."""
    for kernel in vars(real_index).values():
        tuner = getattr(kernel, "fn", None)
        if hasattr(tuner, "configs"):
            tuner.configs = tuner.configs[-1:]


class Case:
    """Random caches, tables and queries for a few sequences."""

    def __init__(self, chance: torch.Generator, dtype: torch.dtype, new: tuple[int, ...]) -> None:
        def pick(choices: tuple[int, ...]) -> int:
            return choices[int(torch.randint(len(choices), (1,), generator=chance))]

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=chance).to(dtype)

        self.groups, self.features = pick((1, 2)), 16
        self.heads = self.groups * pick((1, 2, 3))
        sequences = pick((1, 2, 3))
        self.new = (
            [pick(new)] * sequences if len(new) == 1 else [pick(new) for _ in range(sequences)]
        )
        self.prefix = [pick(LENGTHS) for _ in range(sequences)]
        self.lengths = [p + n for p, n in zip(self.prefix, self.new, strict=True)]
        self.topk = pick((1, 2, 3, 4))
        self.init, self.local = pick((0, 1)), pick((0, 1, 2))
        most = -(-max(self.lengths) // BLOCK)
        pages = sequences * most + 1
        # What is beyond a sequence's pages names a page that exists and is not its own.
        self.table = torch.randperm(sequences * most, generator=chance).view(sequences, most) + 1
        self.table = self.table.to(torch.int32)
        self.keys = normal(pages, BLOCK, self.features)
        self.kv = normal(pages, self.groups, BLOCK, 2 * self.features)
        for row, length in zip(self.table.tolist(), self.lengths, strict=True):
            last, used = row[(length - 1) // BLOCK], (length - 1) % BLOCK + 1
            self.keys[last, used:] = torch.nan
            self.kv[last, :, used:] = torch.nan
        tokens = sum(self.new)
        self.index_q = normal(tokens, self.groups, self.features)
        self.q = normal(tokens, self.heads, self.features)
        self.starts = torch.tensor([0, *self.new]).cumsum(0).to(torch.int32)
        self.seq_lens = torch.tensor(self.lengths, dtype=torch.int32)
        self.prefix_lens = torch.tensor(self.prefix, dtype=torch.int32)
        self.scale = self.features**-0.5

    def positions(self) -> torch.Tensor:
        """[T]"""
        runs = [torch.arange(p, p + n) for p, n in zip(self.prefix, self.new, strict=True)]
        return torch.cat(runs)

    @property
    def score_bound(self) -> float:
        """Of a dot product: twice its terms' roundings in float32, sums of D terms on each side."""
        finite = self.keys.nan_to_num().float()
        largest = self.index_q.float().abs().amax((0, 1)) @ finite.abs().amax((0, 1))
        return 2 * self.features * U32 * float(largest)

    @property
    def output_bound(self) -> float:
        """Of attention's output: what the scores' roundings make of the probabilities, on both
        sides; the rounding of the probabilities, and of the output, to the dtype."""
        kv = self.kv.nan_to_num().float()
        k, v = kv[..., : self.features].abs(), kv[..., self.features :].abs()
        largest = float(self.q.float().abs().amax((0, 1)) @ k.amax((0, 1, 2))) * self.scale
        terms = self.topk * BLOCK
        of_scores = 2 * U32 * (2 * self.features * largest + terms + 16)
        u = torch.finfo(self.q.dtype).eps / 2
        return (of_scores + 4 * u) * float(v.amax())


def sets(chosen: torch.Tensor) -> torch.Tensor:
    """Choices [..., K] with the order taken out."""
    return chosen.to(torch.int64).sort(dim=-1).values


def mutated(mutation: str) -> dict[str, Callable[..., Any]]:
    """The stand-ins, one of them made wrong."""
    made: dict[str, Callable[..., Any]] = {
        "score": index_topk.minimax_m3_index_score,
        "topk": index_topk.minimax_m3_index_topk,
        "decode": index_topk.minimax_m3_index_decode,
        "prefill attention": sparse_attention.minimax_m3_sparse_attn,
        "decode attention": sparse_attention.minimax_m3_sparse_attn_decode,
    }
    if mutation == "wrong-scale":
        right = made["prefill attention"]
        made["prefill attention"] = lambda *a: right(*a[:9], a[9] * 1.01, *a[10:])
    elif mutation == "late-causal":
        score = made["score"]
        made["score"] = lambda *a: score(*a[:5], a[5] - 1, *a[6:])
    elif mutation == "no-local":
        decode = made["decode"]
        made["decode"] = lambda *a: decode(*a[:7], 0, *a[8:])
    else:
        assert not mutation, mutation
    return made


def compare(seed: int, count: int, mutation: str) -> dict[str, dict[str, Any]]:
    """Compare so many random cases of each kernel and dtype."""
    ours = mutated(mutation)
    told: dict[str, dict[str, Any]] = defaultdict(
        lambda: {"cases": 0, "worst": 0.0, "ties": 0, "wrong": []}
    )

    def tell(kernel: str, deviation: float, said: str, ties: int = 0) -> None:
        of = told[kernel]
        of["cases"] += 1
        of["ties"] += ties
        of["worst"] = max(of["worst"], deviation)
        if not deviation <= 1:
            of["wrong"].append(said)

    for number in range(count):
        for dtype in (torch.float32, torch.float16):
            chance = torch.Generator().manual_seed(1000 * seed + number)
            name = f"{number} {dtype}"
            if mutation != "no-local":
                prefill(Case(chance, dtype, (1, 2, 3, 7)), ours, tell, name)
            if mutation in ("", "no-local"):
                decode(Case(chance, dtype, (1 + number % 2,)), ours, tell, name)
    return dict(told)


def prefill(case: Case, ours: dict[str, Any], tell: Callable[..., None], name: str) -> None:
    """Scores, choices and attention of prefilled queries."""
    most = max(case.lengths)
    scored = (
        case.index_q,
        case.keys,
        case.table,
        case.starts,
        case.seq_lens,
        case.prefix_lens,
        max(case.new),
        most,
        case.groups,
    )
    want, have = real_index.minimax_m3_index_score(*scored), ours["score"](*scored)
    begun = torch.arange(have.shape[-1]) <= case.positions()[:, None] // BLOCK
    off = (want[..., : have.shape[-1]] - have).abs().where(begun, 0.0)
    tell("score", float(off.nan_to_num(nan=torch.inf).max()) / case.score_bound, name)
    chosen = (case.starts, case.prefix_lens, max(case.new), case.topk, case.init, case.local)
    score = index_topk.minimax_m3_index_score(*scored)
    real, mine = real_index.minimax_m3_index_topk(score, *chosen), ours["topk"](score, *chosen)
    tell("topk", 0.0 if torch.equal(sets(real), sets(mine)) else torch.inf, name)
    attend = (
        case.q,
        case.kv,
        real,
        case.table,
        case.starts,
        case.seq_lens,
        case.prefix_lens,
        max(case.new),
        case.groups,
        case.scale,
    )
    attention(
        case,
        real_attention.minimax_m3_sparse_attn,
        ours,
        "prefill attention",
        attend,
        (),
        tell,
        name,
    )


def decode(case: Case, ours: dict[str, Any], tell: Callable[..., None], name: str) -> None:
    """Choices and attention of decoded tokens."""
    length = case.new[0]
    arguments = (
        case.index_q,
        case.keys,
        case.table,
        case.seq_lens,
        max(case.lengths),
        case.topk,
        case.init,
        case.local,
        case.groups,
        length,
        2,
    )
    real, mine = real_index.minimax_m3_index_decode(*arguments), ours["decode"](*arguments)
    differ = (sets(real) != sets(mine)).any(-1)
    ties = near_ties(case) & differ
    wrong = bool((differ & ~ties).any())
    tell("decode", torch.inf if wrong else 0.0, name, int(ties.sum()))
    attend = (case.q, case.kv, real, case.table, case.seq_lens, case.groups, case.scale)
    attention(
        case,
        real_attention.minimax_m3_sparse_attn_decode,
        ours,
        "decode attention",
        attend,
        (length,),
        tell,
        name,
    )


def near_ties(case: Case) -> torch.Tensor:
    """bool [G, T]: whether two blocks' scores are so near that either may be chosen."""
    score = index_topk.minimax_m3_index_score(
        case.index_q,
        case.keys,
        case.table,
        case.starts,
        case.seq_lens,
        case.prefix_lens,
        max(case.new),
        max(case.lengths),
        case.groups,
    )
    gaps = score.sort(dim=-1).values.diff(dim=-1)
    return (gaps.nan_to_num(nan=torch.inf) <= 2 * case.score_bound).any(-1)


def attention(
    case: Case,
    real: Callable[..., None],
    ours: dict[str, Any],
    kernel: str,
    before: tuple[Any, ...],
    after: tuple[Any, ...],
    tell: Callable[..., None],
    name: str,
) -> None:
    """Compare the outputs of one attention kernel."""
    want, have = torch.full_like(case.q, torch.nan), torch.full_like(case.q, torch.nan)
    real(*before, want, *after)
    ours[kernel](*before, have, *after)
    off = (want.float() - have.float()).abs().nan_to_num(nan=torch.inf)
    tell(kernel, float(off.max()) / case.output_bound, name)


if __name__ == "__main__":
    without_autotuning()
    print(json.dumps(compare(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])))
