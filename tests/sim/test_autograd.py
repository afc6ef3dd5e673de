"""Collectives write into tensors without autograd seeing it, in whatever mode each rank is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sim import RankContext, World
from tests.sim.programs import ones

SEEDS = [None, 0, 1, 2]


def by_rank(ctx: RankContext, mode: Callable[[], Any], ranks: tuple[int, ...]) -> Any:
    """The mode on these ranks, and none on the others."""
    return mode() if ctx.rank in ranks else contextlib.nullcontext()


@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_flow_past_a_collective(seed: int | None) -> None:
    def program(ctx: RankContext) -> tuple[list[float], list[float]]:
        weight = torch.full((2,), ctx.rank + 2.0, requires_grad=True)
        product = weight * weight
        reduced = product.clone()
        dist.all_reduce(reduced)
        assert reduced.grad_fn is not None
        torch.autograd.backward((3 * reduced).sum())
        assert weight.grad is not None
        return reduced.tolist(), weight.grad.tolist()

    with World("tp2", seed=seed) as world:
        # To autograd the all_reduce is not there, as with NCCL: d(3 w^2)/dw = 6 w.
        assert world.run(program) == [([13.0, 13.0], [12.0, 12.0]), ([13.0, 13.0], [18.0, 18.0])]


def test_a_parameter_can_be_reduced_and_stays_a_leaf() -> None:
    def program(ctx: RankContext) -> list[float]:
        weight = torch.full((2,), float(ctx.rank), requires_grad=True)
        dist.all_reduce(weight)
        assert weight.is_leaf and weight.requires_grad and weight.grad_fn is None
        torch.autograd.backward(weight.sum())
        assert weight.grad is not None
        assert weight.grad.tolist() == [1.0, 1.0]
        return weight.tolist()

    with World("tp2") as world:
        assert world.run(program) == [[1.0, 1.0]] * 2


@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_survive_ranks_in_no_grad_mode(seed: int | None) -> None:
    def program(ctx: RankContext) -> list[float]:
        with by_rank(ctx, torch.no_grad, (1,)):
            weight = torch.full((2,), 3.0, requires_grad=True)
            out = (weight * weight).clone()
            dist.all_reduce(out)
            assert out.requires_grad == (ctx.rank == 0)
            assert torch.is_grad_enabled() == (ctx.rank == 0)
        if ctx.rank == 0:
            torch.autograd.backward(out.sum())
            assert weight.grad is not None
            return weight.grad.tolist()
        return out.tolist()

    with World("tp2", seed=seed) as world:
        assert world.run(program) == [[6.0, 6.0], [18.0, 18.0]]


def exchange(ctx: RankContext) -> tuple[list[float], list[float], list[float]]:
    """A reduction, a gather and a message."""
    x, gathered, received = ones(), torch.empty(4), torch.empty(2)
    dist.all_reduce(x)
    dist.all_gather([gathered[:2], gathered[2:]], x)
    works = [dist.isend(x, 1 - ctx.rank), dist.irecv(received, 1 - ctx.rank)]
    for work in works:
        assert work is not None
        work.wait()
    return x.tolist(), gathered.tolist(), received.tolist()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ranks", [(), (0,), (1,), (0, 1)], ids=str)
def test_ranks_may_be_in_inference_mode_or_not(ranks: tuple[int, ...], seed: int | None) -> None:
    def program(ctx: RankContext) -> Any:
        with by_rank(ctx, torch.inference_mode, ranks):
            result = exchange(ctx)
            assert torch.is_inference_mode_enabled() == (ctx.rank in ranks)
        assert not torch.is_inference_mode_enabled()
        return result

    with World("tp2", seed=seed) as world:
        assert world.run(program) == [([2.0] * 2, [2.0] * 4, [2.0] * 2)] * 2


@pytest.mark.parametrize("seed", SEEDS)
def test_an_inference_tensor_is_written_after_its_rank_has_left_the_mode(seed: int | None) -> None:
    def program(ctx: RankContext) -> list[float]:
        with by_rank(ctx, torch.inference_mode, (0,)):
            x = ones()
            work = dist.all_reduce(x, async_op=True)
        work.wait()
        assert x.is_inference() == (ctx.rank == 0)
        return x.tolist()

    with World("tp2", seed=seed) as world:
        assert world.run(program) == [[2.0, 2.0]] * 2


@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_survive_ranks_in_inference_mode(seed: int | None) -> None:
    def program(ctx: RankContext) -> list[float]:
        with by_rank(ctx, torch.inference_mode, (1,)):
            weight = torch.full((2,), 3.0, requires_grad=ctx.rank == 0)
            out = (weight * weight).clone()
            dist.all_reduce(out)
        if ctx.rank == 0:
            torch.autograd.backward(out.sum())
            assert weight.grad is not None
            return weight.grad.tolist()
        return out.tolist()

    with World("tp2", seed=seed) as world:
        assert world.run(program) == [[6.0, 6.0], [18.0, 18.0]]
