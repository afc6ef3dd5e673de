"""Gathers over the wrong group, and slices of shards: found by their rule alone."""

import pytest
import torch
import torch.distributed as dist

from properties.sanitizer import Allow, Sanitizer
from sim import RankContext, Topology, World
from tests.properties.sanitizer import crossed
from tests.properties.sanitizer.crossed import WRONG
from tests.properties.sanitizer.layouts import Mesh, Program, gather, seeded


def watched(program: Program, word: str = "dp2tp2", allow: tuple[Allow, ...] = ()) -> Sanitizer:
    sanitizer = Sanitizer(allow, topology=Topology.parse(word))
    with World(word, observers=[sanitizer]) as world:
        world.run(program)
    return sanitizer


@pytest.mark.parametrize(
    ("rule", "program", "word"),
    [
        (rule, program, word)
        for rule, some in WRONG.items()
        for program in some
        for word in ("dp2tp2", "tp4")
        # Its one operation is on all ranks: the other rank's groups come from the topology alone.
        if (program, word) != (crossed.the_group_is_forgotten, "tp4")
    ],
)
def test_a_wrong_program_is_found_by_its_rule_alone(rule: str, program: Program, word: str) -> None:
    sanitizer = watched(program, word)
    assert {finding.rule for finding in sanitizer.findings} == {rule}
    assert all(finding.site for finding in sanitizer.findings)


@pytest.mark.parametrize("program", WRONG["wrong group"])
def test_both_groups_are_named(program: Program) -> None:
    found = watched(program).findings
    assert all(f"{list(finding.ranks)}" in finding.what for finding in found)
    assert any("tp[0, 1]" in finding.what for finding in found)


@pytest.mark.parametrize("rule", ["wrong group", "sliced shards"])
def test_a_site_can_be_allowed(rule: str) -> None:
    for program in WRONG[rule]:
        allow = tuple(
            Allow(rule=rule, site=site, reason="a drill") for site in ("layouts.py", "crossed.py")
        )
        sanitizer = watched(program, allow=allow)
        assert sanitizer.findings and sanitizer.ok


def test_an_operation_over_the_group_of_the_shards_takes_the_finding_back() -> None:
    """A dispatch comes back to tp in the end; without that, the same gather is wrong."""

    def dispatch(ctx: RankContext) -> None:
        crossed.shards_of_replicas_gathered_over_dp(ctx)
        gather(seeded(ctx.rank, 4, 4), Mesh(ctx).tp)

    assert watched(dispatch).findings == []


def test_slices_of_tensors_that_differ_by_rounding_alone_are_right() -> None:
    def program(ctx: RankContext) -> None:
        x = seeded(0, 4, 8) * (1 + ctx.rank % 2 * 2**-22)
        crossed._sends(ctx, x * 1.0)

    assert watched(program).findings == []


def test_a_slice_written_in_part_is_a_buffer() -> None:
    def program(ctx: RankContext) -> None:
        buffer = torch.tanh(seeded(ctx.rank, 4, 8))
        buffer[:2] += 1
        crossed._sends(ctx, buffer)

    assert watched(program).findings == []


def test_slices_that_nobody_gathers_are_left_alone() -> None:
    def program(ctx: RankContext) -> None:
        if ctx.rank < 2:
            dist.send(seeded(ctx.rank, 4, 8)[2 * ctx.rank :][:2], ctx.rank + 2)
        else:
            dist.recv(torch.empty(2, 8), ctx.rank - 2)

    assert watched(program).findings == []


def test_no_tensor_outlives_the_program_in_the_sanitizer() -> None:
    """Sent slices are kept as samples: a large tensor is not held."""
    import weakref

    kept: list[weakref.ref[torch.Tensor]] = []

    def program(ctx: RankContext) -> None:
        x = torch.tanh(seeded(ctx.rank, 4, 8))
        kept.append(weakref.ref(x))
        crossed._sends(ctx, x)

    sanitizer = watched(program)
    assert sanitizer.findings and all(reference() is None for reference in kept)
