"""Runs a case folded, and compares its results with gloo's and with the numpy reference's."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sim import World
from tests.sim.conformance.case import Case
from tests.sim.conformance.gloo_pool import Invocation
from tests.sim.conformance.operands import Array, Kind, bits, magnitudes, numbers

Results = list[list[torch.Tensor]]
"""For each rank, the tensors its program returned."""

WHOLE = Kind(values="whole")
ROUNDED = ("sum", "avg", "product", "premul_sum")


def folded(
    world_size: int, schedule: int | None, batch: Sequence[Invocation], *, limit: float = 10.0
) -> list[Results]:
    """Run a batch in one folded world; results[program][rank].

    Raises:
        TimeoutError: it blocked the whole process, which the runtime must never do.
    """
    found: list[Any] = []

    def run() -> None:
        try:
            with World(world_size, seed=schedule) as world:
                found.append(world.run(lambda ctx: [b(ctx.rank, ctx.world_size) for b in batch]))
        except BaseException as error:
            found.append(error)

    # On a thread of its own: one that blocks can then be left behind, and the test fails.
    thread = threading.Thread(target=run, name="folded", daemon=True)
    thread.start()
    thread.join(limit)
    if not found:
        raise TimeoutError(f"folded {', '.join(map(str, batch))}: blocked for {limit:g} s")
    if isinstance(found[0], BaseException):
        raise found[0]
    return [[of_rank[i] for of_rank in found[0]] for i in range(len(batch))]


def roundings(invocation: Invocation, world_size: int) -> int:
    """How many roundings lie between an operand and the result; 0 where results are exact."""
    kind, op = invocation.options.get("kind", WHOLE), invocation.options.get("op", "")
    if kind.values != "real" or op not in ROUNDED:
        return 0
    # One for each addition or product; the factor of premul_sum and the division of avg round too.
    return world_size - (op in ("sum", "product"))


def expected(
    case: Case, invocation: Invocation, world_size: int
) -> tuple[list[list[Array]], list[list[Array]] | None]:
    """What the reference says, and a bound on the absolute error, or None if it is exact.

    The bound is gamma(k) times the same reduction of magnitudes, where gamma(k) = k u / (1 - k u)
    and u is the dtype's unit roundoff (Higham, Accuracy and Stability, lemma 3.1): it holds for
    any order of the reduction.
    """
    options = dict(invocation.options)
    kind: Kind = options.pop("kind", WHOLE)
    assert case.truth is not None
    k = roundings(invocation, world_size)
    view = bits if kind.values == "bits" else numbers

    def of(convert: object) -> list[list[Array]]:
        assert callable(convert) and case.truth is not None

        def make(rank: int, shape: tuple[int, ...], stream: int = 0) -> Array:
            result: Array = convert(kind.tensor(invocation.seed, rank, shape, stream))
            return result

        return case.truth(world_size, invocation.seed, make, **options)

    if not k:
        return of(view), None
    u = torch.finfo(kind.dtype).eps / 2
    gamma = k * u / (1 - k * u)
    return of(numbers), [[gamma * x for x in of_rank] for of_rank in of(magnitudes)]


def difference(
    got: Results, wanted: list[list[Array]], bound: list[list[Array]] | None
) -> str | None:
    """The first difference, in words: rank, output and both values; None if there is none."""
    for rank, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
        if len(mine) != len(theirs):
            return f"rank {rank} returns {len(mine)} tensors, not {len(theirs)}"
        for i, (tensor, want) in enumerate(zip(mine, theirs, strict=True)):
            have = bits(tensor) if want.dtype.kind == "u" else numbers(tensor)
            if have.shape != want.shape:
                return f"rank {rank}, output {i}: shape {have.shape}, not {want.shape}"
            if bound is None:
                good = np.array_equal(have, want, equal_nan=have.dtype.kind == "f")
            else:
                good = bool(np.all(np.abs(have - want) <= bound[rank][i]))
            if not good:
                return f"rank {rank}, output {i}:\n{have}\nis not\n{want}"
    return None


def as_wanted(results: Results, invocation: Invocation) -> list[list[Array]]:
    """One transport's results as what the other must return."""
    view = bits if invocation.options.get("kind", WHOLE).values == "bits" else numbers
    return [[view(t) for t in of_rank] for of_rank in results]
