"""What DP ranks agree on before a step, by vLLM's own code."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model import dp
from model.dp import Rows
from sim import Deadlock, RankContext, RankFailed
from tests.model.dp.conftest import Built
from tests.model.dp.harness import Arm, Blocks

pytestmark = pytest.mark.usefixtures("vllm_ready")


def agreed(built: Built, arm: Arm, absent: int | None = None) -> list[Rows]:
    """What each DP rank of a DEP world runs."""

    def program(ctx: RankContext) -> Any:
        if ctx.rank == absent:
            return None
        return dp.agree(ctx.kept["config"], arm.tokens[ctx.rank], idle=arm.idle, pad=arm.pad)

    return built(arm).world.run(program)


@settings(max_examples=25)
@given(tokens=st.tuples(*[st.integers(0, 9)] * 4), idle=st.booleans(), pad=st.booleans())
def test_all_ranks_know_the_rows_of_all(
    built: Built, tokens: tuple[int, ...], idle: bool, pad: bool
) -> None:
    rows = agreed(built, Arm(word="dep4", tokens=tokens, idle=idle, pad=pad))
    run = [1 if idle and not count else count for count in tokens]
    if pad:
        run = [max(run)] * 4
    for rank, mine in enumerate(rows):
        assert mine.tokens == tokens[rank]
        assert mine.across_dp is not None and mine.across_dp.tolist() == run
        assert mine.count == run[rank]
        mask = mine.padding
        if mask is None:
            assert mine.count == mine.tokens
        else:
            assert mask.tolist() == [row >= tokens[rank] for row in range(run[rank])]


def test_one_dp_rank_has_nothing_to_agree_on(built: Built) -> None:
    arm = Arm(word="tep2", tokens=(0,), idle=True, pad=True)
    built(arm).ledger.clear()

    def program(ctx: RankContext) -> Rows:
        return dp.agree(ctx.kept["config"], 0)

    for rows in built(arm).world.run(program):
        assert (rows.tokens, rows.count, rows.across_dp, rows.padding) == (0, 0, None, None)
    assert not built(arm).ledger.entries


def test_the_forward_context_has_the_sizes_of_every_ep_rank(built: Built) -> None:
    """Under sequence-parallel MoE the EP ranks of a DP rank share its tokens, rounded up."""

    def program(ctx: RankContext) -> tuple[list[int], list[int]]:
        config = ctx.kept["config"]
        context = importlib.import_module("vllm.forward_context")
        rows = dp.agree(config, [5, 0][ctx.topology.coordinates(ctx.rank)["dp"]], idle=False)
        with dp.forward_context(config, None, rows):
            metadata = context.get_forward_context().dp_metadata
            with metadata.sp_local_sizes(2):
                scattered = metadata.get_chunk_sizes_across_dp_rank()
            with metadata.sp_local_sizes(1):
                return metadata.get_chunk_sizes_across_dp_rank(), scattered

    results = built(Arm(word="dp2tep2", tokens=(5, 0))).world.run(program)
    assert results == [([5, 0], [3, 3, 0, 0])] * 4


def test_a_rank_that_does_not_agree_is_a_deadlock(vllm_ready: None) -> None:
    blocks = Blocks(Arm(word="dep2", tokens=(3, 0)))
    try:
        with pytest.raises(Deadlock) as caught:
            agreed(lambda _: blocks, Arm(word="dep2", tokens=(3, 0)), absent=1)
        waiting = {report.rank: report for report in caught.value.ranks}
        assert waiting[0].state == "waits in" and "all_reduce" in waiting[0].operation
        assert waiting[1].state == "has finished"
    finally:
        blocks.close()


def test_a_context_over_other_rows_than_agreed_is_refused(vllm_ready: None) -> None:
    blocks = Blocks(Arm(word="dep2", tokens=()))

    def program(ctx: RankContext) -> None:
        rows = dp.agree(ctx.kept["config"], 3)
        stale = Rows(tokens=2, count=2, across_dp=rows.across_dp)
        with dp.forward_context(ctx.kept["config"], None, stale):
            pass

    try:
        with pytest.raises(RankFailed, match="AssertionError: 3 2"):
            blocks.world.run(program)
    finally:
        blocks.close()
