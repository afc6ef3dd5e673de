"""Values declared replicated: what differs is found and explained, what is the same is not."""

import pytest
import torch
import torch.distributed as dist

from properties.sanitizer import Sanitizer
from properties.sanitizer.differ import same
from sim import RankContext, Topology, World
from sim.callsite import Frame
from tests.properties.sanitizer.layouts import Mesh, Program, gather, seeded, summed

FRAMES = (Frame("program.py", 7, "main"),)


def declared(program: Program, word: str = "dp2tp2", ranks: tuple[int, ...] = ()) -> Sanitizer:
    """Run a program whose result on each rank is declared replicated."""
    topology = Topology.parse(word)
    sanitizer = Sanitizer(topology=topology)
    over = ranks or tuple(range(topology.world_size))

    def run(ctx: RankContext) -> None:
        out = program(ctx)
        assert isinstance(out, torch.Tensor)
        sanitizer.replicated(ctx.rank, over, [out], name="out", frames=FRAMES)

    with World(word, observers=[sanitizer]) as world:
        world.run(run)
    return sanitizer


def term(ctx: RankContext) -> torch.Tensor:
    return seeded(1, 4, 4) @ seeded(ctx.rank, 4, 4)


def term_over_tp(ctx: RankContext) -> torch.Tensor:
    return seeded(1, 4, 4) @ seeded(ctx.rank % 2, 4, 4)


def terms_that_add_up_over_tp(ctx: RankContext) -> torch.Tensor:
    """Both replicas have the same sum, of other terms."""
    whole, part = seeded(1, 4, 4), seeded(ctx.rank // 2 + 5, 4, 4)
    return part if ctx.rank % 2 else whole - part


def over_the_wrong_group(ctx: RankContext) -> torch.Tensor:
    return summed(term_over_tp(ctx), Mesh(ctx).dp)


def gathered_over_the_wrong_group(ctx: RankContext) -> torch.Tensor:
    return gather(seeded(ctx.rank % 2, 4, 4), Mesh(ctx).dp)


def reduced_to_one_rank(ctx: RankContext) -> torch.Tensor:
    x = torch.zeros(4, 4)
    return term(ctx) if ctx.rank == 0 else x


def own_part_of_zeros(ctx: RankContext) -> torch.Tensor:
    x = torch.zeros(8, 4)
    x[2 * ctx.rank : 2 * ctx.rank + 2] = seeded(ctx.rank, 2, 4)
    return x


def one_row_off(ctx: RankContext) -> torch.Tensor:
    x = seeded(0, 4, 4)
    x[2] += ctx.rank
    return x


def scaled_on_one_rank(ctx: RankContext) -> torch.Tensor:
    return seeded(0, 4, 4) * (2 if ctx.rank == 3 else 1)


def uneven(ctx: RankContext) -> torch.Tensor:
    return seeded(0, 1 + ctx.rank % 2, 4)


def counts(ctx: RankContext) -> torch.Tensor:
    return torch.tensor([ctx.rank, 5])


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (term, "a reduction over default_pg[0, 1, 2, 3] is missing"),
        (term_over_tp, "a reduction over tp[0, 1] is missing"),
        (terms_that_add_up_over_tp, "a reduction over tp[0, 1] is missing"),
        (over_the_wrong_group, "all_reduce at"),
        (gathered_over_the_wrong_group, "all_gather_into_tensor at"),
        (reduced_to_one_rank, "a broadcast is missing"),
        (own_part_of_zeros, "a gather over default_pg[0, 1, 2, 3] is missing"),
        (one_row_off, "only rows 2 of 4 differ"),
        (scaled_on_one_rank, "rank 3 holds 2 x what rank"),
        (uneven, "shapes differ"),
        (counts, "differs over default_pg[0, 1, 2, 3]"),
    ],
)
def test_what_differs_is_found_and_explained(program: Program, says: str) -> None:
    (finding,) = [f for f in declared(program).findings if f.rule == "not replicated"]
    assert says in f"{finding.what}; {finding.why}", finding
    assert "program.py:7" in finding.where


def reduced(ctx: RankContext) -> torch.Tensor:
    return summed(term(ctx))


def in_another_order(ctx: RankContext) -> torch.Tensor:
    terms = [seeded(k, 4, 4) for k in range(6)]
    return sum(terms[ctx.rank :] + terms[: ctx.rank], torch.zeros(4, 4))


def in_another_order_bfloat16(ctx: RankContext) -> torch.Tensor:
    terms = [seeded(k, 4, 4).bfloat16() for k in range(6)]
    return sum(terms[ctx.rank :] + terms[: ctx.rank], torch.zeros(4, 4).bfloat16())


def not_a_number(ctx: RankContext) -> torch.Tensor:
    return torch.tensor([float("nan"), float("inf"), 1.5])


def empty(ctx: RankContext) -> torch.Tensor:
    return torch.empty(0, 4)


@pytest.mark.parametrize(
    "program", [reduced, in_another_order, in_another_order_bfloat16, not_a_number, empty]
)
def test_what_is_the_same_is_left_alone(program: Program) -> None:
    sanitizer = declared(program)
    assert sanitizer.findings == []
    assert sanitizer.looked_at["declared values"] == 1


def test_a_group_may_hold_another_value_than_the_next() -> None:
    def program(ctx: RankContext) -> torch.Tensor:
        return seeded(ctx.rank // 2, 4, 4)

    assert declared(program, ranks=(0, 1)).findings == []
    assert [f.rule for f in declared(program, ranks=(0, 2)).findings] == ["not replicated"]


def test_what_not_every_rank_declares_equally_often_is_not_compared() -> None:
    sanitizer = Sanitizer()

    def program(ctx: RankContext) -> None:
        for step in range(1 + (ctx.rank == 0)):
            value = [seeded(step, 2, 2)] if ctx.rank else [seeded(1 - step, 2, 2)]
            sanitizer.replicated(ctx.rank, (0, 1), value, name="out", frames=FRAMES)
        dist.barrier()

    with World("tp2", observers=[sanitizer]) as world:
        world.run(program)
    assert sanitizer.findings == []
    assert sanitizer.not_judged == [
        "`out` at program.py:7 was declared 2 on rank 0, 1 on rank 1: not compared"
    ]


@pytest.mark.parametrize(
    ("dtype", "factor", "equal"),
    [
        (torch.float32, 1 + 2**-18, True),
        (torch.float32, 1 + 2**-10, False),
        (torch.bfloat16, 1 + 2**-6, True),
        (torch.bfloat16, 1.5, False),
        (torch.float64, 1 + 2**-30, False),
    ],
)
def test_replicas_are_compared_within_rounding(
    dtype: torch.dtype, factor: float, equal: bool
) -> None:
    x = seeded(0, 8, 8).to(dtype)
    assert same(x, (x.double() * factor).to(dtype), 4) is equal
