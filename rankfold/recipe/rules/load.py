"""`concurrency` and `limits`: the load against what the workers take, and vLLM's own limits.

A decode side runs at most workers x data-parallel ranks x `max-num-seqs` requests at a time: in
vLLM each data-parallel rank has a scheduler of its own. More than that wait, and a benchmark then
measures the queue. Where `max-num-seqs` is not written, vLLM chooses it by the GPU: not judged.
"""

from __future__ import annotations

from collections.abc import Iterator

from rankfold.recipe.finding import Finding
from rankfold.recipe.flags import flag, whole
from rankfold.recipe.source import Path
from rankfold.recipe.view import Recipe, Side, concurrencies_of

RULE = "concurrency"
LIMITS = "limits"


def check(recipe: Recipe) -> Iterator[Finding]:
    """Findings about load and limits."""
    yield from _points(recipe)
    serving = recipe.serving
    if serving is not None and recipe.concurrencies:
        yield from _capacity(recipe, serving)
    for side in recipe.sides:
        yield from _limits(recipe, side)


def _points(recipe: Recipe) -> Iterator[Finding]:
    written = recipe.model.benchmark.concurrencies if recipe.model.benchmark else None
    if concurrencies_of(written) is None:
        yield recipe.source.finding(
            RULE,
            ("benchmark", "concurrencies"),
            f"benchmark.concurrencies is {str(written)[:60]!r}",
            'write numbers joined by x, such as "256x512"',
        )


def _capacity(recipe: Recipe, side: Side) -> Iterator[Finding]:
    each = whole(side.flags, "max-num-seqs")
    if each is None or side.degrees is None:
        return
    ranks = side.degrees.dp
    capacity = side.workers * ranks * each
    most = max(recipe.concurrencies)
    if most > capacity:
        product = f"{_n(side.workers, 'worker')} x {_n(ranks, 'data-parallel rank')}"
        yield recipe.source.finding(
            RULE,
            ("benchmark", "concurrencies"),
            f"{most} requests at a time, and {side.name} runs {capacity}: {product} x max-num-seqs "
            f"{each}; the others wait",
            f"write concurrencies up to {capacity}, or max-num-seqs: "
            f"{-(-most // (side.workers * ranks))}",
        )


def _n(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def _limits(recipe: Recipe, side: Side) -> Iterator[Finding]:
    seqs, tokens = (whole(side.flags, f"max-num-{what}") for what in ("seqs", "batched-tokens"))
    if seqs is not None and tokens is not None and tokens < seqs:
        yield recipe.source.finding(
            LIMITS,
            _at(side, "max-num-batched-tokens"),
            f"{side.name}: max-num-batched-tokens {tokens} is less than max-num-seqs {seqs}, which "
            "vLLM refuses",
            f"write max-num-batched-tokens: {seqs} or more",
        )
    used = flag(side.flags, "gpu-memory-utilization")
    if isinstance(used, int | float) and not isinstance(used, bool) and not 0 < used <= 1:
        yield recipe.source.finding(
            LIMITS,
            _at(side, "gpu-memory-utilization"),
            f"{side.name}: gpu-memory-utilization is {used}",
            "write a fraction above 0 and up to 1",
        )
    longest, needed = whole(side.flags, "max-model-len"), _tokens(recipe, side)
    if longest is not None and needed and longest < needed:
        yield recipe.source.finding(
            LIMITS,
            _at(side, "max-model-len"),
            f"{side.name}: max-model-len {longest} is less than the {needed} tokens of a request",
            f"write max-model-len: {needed} or more",
        )


def _tokens(recipe: Recipe, side: Side) -> int:
    """Tokens of a request that a side holds: prefill the prompt, the others the output as well."""
    benchmark = recipe.model.benchmark
    if benchmark is None or benchmark.isl is None or benchmark.osl is None:
        return 0
    return benchmark.isl + (1 if side.name == "prefill" else benchmark.osl)


def _at(side: Side, name: str) -> Path:
    spelling = name if name in side.flags else name.replace("-", "_")
    return (*side.flags_at, spelling)
