"""Collectives of unequal sizes against their definition, folded and over real gloo groups."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from model import dp
from model.groups import join_groups
from model.rank_state import RANK_LOCAL
from model.subject import prepare
from reference import collectives
from sim import Mismatch, RankContext, RankFailed, World
from sim.gloo import GlooPool, GlooWorld

pytestmark = pytest.mark.usefixtures("vllm_ready")

SIZES = {
    "even": [2, 2, 2],
    "uneven": [3, 1, 2],
    "zero": [0, 4, 0],
    "one row in all": [0, 0, 1],
    "none": [0, 0, 0],
}


def communicator() -> Any:
    made = importlib.import_module("model.communicator").FoldedCommunicator
    return made(dist.group.WORLD, torch.device("cpu"), dist.group.WORLD, unique_name="ep:0")


def rows(rank: int, count: int, width: int = 2) -> Tensor:
    """float64 [count, width], whole numbers, so that every order of summation is exact."""
    start = 100.0 * rank
    return torch.arange(start, start + count * width, dtype=torch.float64).view(count, width)


def gather(ctx: RankContext, sizes: list[int]) -> Tensor:
    return communicator().all_gatherv(rows(ctx.rank, sizes[ctx.rank]), 0, sizes)


def scatter(ctx: RankContext, sizes: list[int]) -> Tensor:
    return communicator().reduce_scatterv(rows(ctx.rank, sum(sizes)), 0, sizes)


PROGRAMS: dict[str, tuple[Callable[..., Tensor], Callable[[list[int]], Sequence[Any]]]] = {
    "all_gatherv": (
        gather,
        lambda sizes: collectives.all_gather([rows(r, n).numpy() for r, n in enumerate(sizes)]),
    ),
    "reduce_scatterv": (
        scatter,
        lambda sizes: collectives.reduce_scatter(
            [rows(r, sum(sizes)).numpy() for r in range(len(sizes))], sizes=sizes
        ),
    ),
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_size_meets_the_definition(name: str, sizes: list[int]) -> None:
    program, wanted = PROGRAMS[name]
    with World(3) as world:
        for got, want in zip(world.run(program, sizes), wanted(sizes), strict=True):
            assert torch.equal(got, torch.from_numpy(want))


@pytest.mark.gloo
def test_gloo_agrees(vllm_ready: None) -> None:
    with GlooPool(prepare) as pool, GlooWorld(3, pool=pool) as world:
        for program, wanted in PROGRAMS.values():
            for sizes in SIZES.values():
                for got, want in zip(world.run(program, sizes), wanted(sizes), strict=True):
                    assert torch.equal(got, torch.from_numpy(want)), (program.__name__, sizes)


def test_what_the_ledger_sees_is_one_collective() -> None:
    """An equal exchange is the plain collective, an unequal one the collective over lists."""
    with World(3) as world:
        for sizes, ops in [
            (SIZES["even"], ["all_gather_into_tensor", "reduce_scatter_tensor"]),
            (SIZES["uneven"], ["all_gather", "reduce_scatter"]),
        ]:
            world.ledger.clear()
            world.run(gather, sizes)
            world.run(scatter, sizes)
            assert [entry.op for entry in world.ledger.entries] == ops


def test_several_tensors_at_once_and_other_layouts() -> None:
    sizes = [3, 1, 2]

    def program(ctx: RankContext) -> tuple[Any, Tensor]:
        made, own = communicator(), sizes[ctx.rank]
        ids = torch.full((own,), ctx.rank, dtype=torch.int32)
        # Columns of a wider tensor, and a transposed one: neither is contiguous.
        part = rows(ctx.rank, own, 4)[:, 1:3]
        gathered = made.all_gatherv([part, ids], 0, sizes)
        return gathered, made.reduce_scatterv(rows(ctx.rank, 6).t(), -1, sizes)

    with World(3) as world:
        results = world.run(program)
    parts = torch.cat([rows(r, n, 4)[:, 1:3] for r, n in enumerate(sizes)])
    total = sum(rows(r, 6) for r in range(3))
    starts = [0, 3, 4, 6]
    for rank, ((gathered, ids), scattered) in enumerate(results):
        assert torch.equal(gathered, parts)
        assert ids.tolist() == [0, 0, 0, 1, 2, 2] and ids.dtype == torch.int32
        assert torch.equal(scattered, total[starts[rank] : starts[rank + 1]].t())
        assert scattered.is_contiguous()


def test_an_all_reduce_leaves_its_input_as_it_is() -> None:
    """As vLLM's on CUDA: who keeps the addend has it, and who drops the result has no sum."""

    def program(ctx: RankContext) -> tuple[Tensor, Tensor]:
        mine = rows(ctx.rank, 2)
        return communicator().all_reduce(mine), mine

    with World(2) as world:
        for rank, (total, mine) in enumerate(world.run(program)):
            assert torch.equal(total, rows(0, 2) + rows(1, 2))
            assert torch.equal(mine, rows(rank, 2))


def test_without_sizes_all_have_as_many() -> None:
    def program(ctx: RankContext) -> tuple[Tensor, Tensor]:
        made = communicator()
        return made.all_gatherv(rows(ctx.rank, 2)), made.reduce_scatterv(rows(ctx.rank, 4), 0)

    with World(2) as world:
        for rank, (gathered, scattered) in enumerate(world.run(program)):
            assert torch.equal(gathered, torch.cat([rows(0, 2), rows(1, 2)]))
            total = rows(0, 4) + rows(1, 4)
            assert torch.equal(scattered, total[2 * rank : 2 * rank + 2])


WRONG: dict[str, tuple[Callable[[Any, int], object], str]] = {
    "rows that were not agreed": (
        lambda made, rank: made.all_gatherv(rows(rank, 2 + rank), 0, [2, 2]),
        r"all_gatherv on group ep, rank 1: 3 rows, but sizes \[2, 2\] say 2; count the tokens",
    ),
    "sizes of other rows": (
        lambda made, rank: made.reduce_scatterv(rows(rank, 5), 0, [2, 2]),
        r"reduce_scatterv on group ep, rank 0: 5 rows, but sizes \[2, 2\] add up to 4; scatter",
    ),
    "rows that do not divide": (
        lambda made, rank: made.reduce_scatterv(rows(rank, 5), 0),
        r"reduce_scatterv on group ep, rank 0: 5 rows do not divide by 2; give sizes",
    ),
    "another group's sizes": (
        lambda made, rank: made.all_gatherv(rows(rank, 2), 0, [2, 2, 2, 2]),
        r"4 sizes \[2, 2, 2, 2\] for group ep, which has 2 ranks; these are another group's",
    ),
    "another dim": (
        lambda made, rank: made.all_gatherv(rows(rank, 2), 1, [2, 2]),
        "all_gatherv along dim 1; vLLM's takes dim 0 only",
    ),
    "no all-to-all": (
        lambda made, rank: made.combine(rows(rank, 2)),
        "dispatch or combine on group ep, rank 0: no all-to-all here; vLLM makes one for the",
    ),
}


@pytest.mark.parametrize(("call", "said"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_right_is_said_in_a_line(
    call: Callable[[Any, int], object], said: str
) -> None:
    def program(ctx: RankContext) -> object:
        return call(communicator(), ctx.rank)

    with World(2) as world, pytest.raises(RankFailed, match=said):
        world.run(program)


def test_ranks_that_disagree_on_sizes_are_named() -> None:
    """On a GPU such a gather would hang, or read beyond the end."""

    def program(ctx: RankContext) -> object:
        sizes = [2, 1] if ctx.rank == 0 else [1, 1]
        return communicator().all_gatherv(rows(ctx.rank, sizes[ctx.rank]), 0, sizes)

    with World(2) as world, pytest.raises(Mismatch) as caught:
        world.run(program)
    assert {report.rank for report in caught.value.ranks} == {0, 1}


def test_a_kernel_for_another_device_is_refused(vllm_ready: None) -> None:
    def program(ctx: RankContext) -> None:
        config = importlib.import_module("vllm.config")
        parallel = dp.parallel_config(ctx.topology, ctx.rank)
        parallel.all2all_backend = "deepep_low_latency"
        with config.set_current_vllm_config(config.VllmConfig(parallel_config=parallel)):
            join_groups(ctx)

    with (
        World("dep2", rank_local=RANK_LOCAL) as world,
        pytest.raises(RankFailed, match="deepep_low_latency is a CUDA kernel; use allgather_red"),
    ):
        world.run(program)
