"""`rankfold bench`: how a folded step of data-parallel ranks grows with their number."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from sim import RankContext, World

ROUNDS = 5
TOKENS = 4
"""Of each DP rank."""
EXPERTS = 144
"""In all, at every size: a rank's part of them shrinks, as in a deployment. 72 divides it."""

WORDS = ("dep2", "dep8", "dep16", "dep72")


def deployment_rounds(words: Sequence[str] = WORDS) -> dict[str, dict[str, float]]:
    """Measure each topology: a step of the real model, two layers, no taps.

    Returns:
        For each topology the ranks, the median milliseconds of a step and the megabytes of all
        ranks' weights, tables and KV caches.
    """
    from model.batch import Batch
    from model.checkpoint import checkpoint
    from model.rank_state import RANK_LOCAL
    from model.subject import Subject, prepare
    from model.tiny import TinyM3

    prepare()
    tiny = TinyM3(layers="dm", num_local_experts=EXPERTS)
    weights = checkpoint(tiny, 0, torch.float32)
    figures = {}
    for word in words:
        with World(word, rank_local=RANK_LOCAL) as world:

            def build(ctx: RankContext) -> int:
                subject = ctx.kept["subject"] = Subject(ctx, tiny, weights)
                own = ctx.topology.coordinates(ctx.rank)["dp"]
                ctx.kept["batch"] = Batch.random(TOKENS, tiny.vocab_size, seed=own)
                return sum(tensor.nbytes for tensor in _tensors(subject))

            def step(ctx: RankContext) -> None:
                ctx.kept["subject"].step(ctx.kept["batch"], capture=False)

            held = sum(world.run(build))
            world.run(step)
            seconds = []
            for _ in range(ROUNDS):
                start = time.perf_counter()
                world.run(step)
                seconds.append(time.perf_counter() - start)
            figures[word] = {
                "ranks": world.size,
                "step_ms": statistics.median(seconds) * 1e3,
                "megabytes": held / 1e6,
            }
    return figures


def said(figures: dict[str, dict[str, float]]) -> Iterator[str]:
    """The figures in lines, and how they grow from the smallest to the largest."""
    for word, of in figures.items():
        yield (
            f"data parallel, {word}, {TOKENS} tokens a rank: step {of['step_ms']:.1f} ms, "
            f"{of['step_ms'] / of['ranks']:.2f} ms a rank; weights, tables and caches "
            f"{of['megabytes']:.1f} MB"
        )
    first, *_, last = figures.values()
    grown = {name: last[name] / first[name] for name in ("ranks", "step_ms", "megabytes")}
    yield (
        f"data parallel, {grown['ranks']:.0f} x the ranks: {grown['step_ms']:.1f} x the time of a "
        f"step, {grown['megabytes']:.1f} x the memory"
    )


def _tensors(subject: Any) -> Iterator[torch.Tensor]:
    """What a rank holds between steps, each memory once."""
    seen = set()
    caches = [layer.kv_cache for layer in subject.model.modules() if hasattr(layer, "kv_cache")]
    held = [*subject.model.parameters(), *subject.model.buffers()]
    held += [cache for cache in caches if isinstance(cache, torch.Tensor)]
    for tensor in held:
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            yield tensor
