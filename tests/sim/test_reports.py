"""A program that breaks is reported at once, with its ranks, group, operation and own lines."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from sim import Deadlock, Mismatch, Misuse, RankContext, RankReport, World
from tests.sim.faults import FAULTS, At, Fault
from tests.sim.programs import assert_usable, broken_run, ones, place, total_of_ranks


def assert_says(report: RankReport, expected: At | str, fault: Fault) -> None:
    """One rank's line of a report says where the rank is."""
    if isinstance(expected, str):
        assert expected in report.state
        return
    assert expected.operation in report.operation
    assert report.group.endswith(expected.group)
    assert report.sequence == expected.sequence
    assert report.site.endswith(place(fault.wrong, expected.line))


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_is_reported(fault: Fault) -> None:
    error = broken_run(fault.error, fault.wrong, fault.topology, **fault.options)
    for text in fault.says:
        assert text in error.headline
    reports = {report.rank: report for report in error.ranks}
    for rank, expected in fault.ranks.items():
        assert_says(reports[rank], expected, fault)
        assert str(reports[rank]) in str(error)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_right_twin_passes(fault: Fault) -> None:
    with World(fault.topology, **fault.options) as world:
        world.run(fault.right)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
@settings(max_examples=8)
@given(seed=st.integers(0, 50))
def test_the_verdict_does_not_depend_on_the_schedule(fault: Fault, seed: int) -> None:
    with World(fault.topology, seed=seed, **fault.options) as world:
        world.run(fault.right)
    with World(fault.topology, seed=seed, **fault.options) as world, pytest.raises(fault.error):
        world.run(fault.wrong)


def test_a_report_is_also_plain_data() -> None:
    fault = next(fault for fault in FAULTS if fault.wrong.__name__ == "wrong_shape")
    data = broken_run(fault.error, fault.wrong).to_json()
    assert data["kind"] == "mismatch"
    assert [rank["rank"] for rank in data["ranks"]] == [0, 1]
    assert data["ranks"][1]["site"].endswith(place(fault.wrong, "# rank 1"))
    assert data["headline"].startswith("mismatch on default_pg[0, 1]")


def test_the_odd_rank_out_is_named_also_when_it_is_not_the_last() -> None:
    def program(ctx: RankContext) -> None:
        dist.all_reduce(ones(5 if ctx.rank == 1 else 2))

    error = broken_run(Mismatch, program, "tp4")
    assert "rank 1 has [5]" in error.headline


def helper() -> None:
    dist.all_reduce(ones())  # the helper's line


def test_declared_plumbing_is_not_the_headline() -> None:
    """With this file declared plumbing there is nothing else, and so it is named after all."""

    def program(ctx: RankContext) -> None:
        if ctx.rank == 0:
            helper()

    plain = broken_run(Deadlock, program)
    plumbed = broken_run(Deadlock, program, plumbing=("tests/sim/test_reports.py",))
    assert plain.ranks[0].site.endswith(place(helper, "# the helper's line"))
    assert plumbed.ranks[0].site.endswith(place(helper, "# the helper's line"))


def test_a_broken_world_can_only_be_closed() -> None:
    def program(ctx: RankContext) -> None:
        if ctx.rank == 0:
            dist.barrier()

    with World("tp2") as world:
        with pytest.raises(Deadlock):
            world.run(program)
        with pytest.raises(Misuse, match=r"broken.*deadlock"):
            world.run(total_of_ranks)
    assert_usable()


def test_a_closed_world_says_so() -> None:
    world = World("tp2")
    world.close()
    world.close()
    with pytest.raises(Misuse, match="closed"):
        world.run(total_of_ranks)
