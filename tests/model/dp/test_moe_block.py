"""vLLM's MiniMaxM3MoE where DP ranks share the experts, against its definition in float64."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sim import Deadlock, RankContext
from tests.model.dp.conftest import Built
from tests.model.dp.harness import ABSENT, Arm, Blocks, wrong

pytestmark = pytest.mark.usefixtures("vllm_ready")

EVEN, UNEVEN, ZERO, ONE = "even", "uneven", "zero", "one"
TOKENS = {
    2: {EVEN: (4, 4), UNEVEN: (3, 5), ZERO: (0, 5), ONE: (1, 0)},
    4: {EVEN: (3, 3, 3, 3), UNEVEN: (7, 1, 2, 5), ZERO: (0, 4, 0, 3), ONE: (0, 0, 1, 0)},
}
WORDS = ["dp2", "dep2", "dep4", "dp2tp2", "dp2tep2", "dp4tp2", "dp4tep2"]


def arm(word: str, case: str, **more: Any) -> Arm:
    degree = Arm(word=word, tokens=()).topology.dp
    return Arm(word=word, tokens=TOKENS[degree][case], **more)


@pytest.mark.parametrize("case", [EVEN, UNEVEN, ZERO, ONE])
@pytest.mark.parametrize("word", WORDS)
def test_every_rank_gets_its_own_tokens_results(built: Built, word: str, case: str) -> None:
    drawn = arm(word, case)
    assert wrong(drawn, built(drawn).run(drawn)) == []


@pytest.mark.parametrize("case", [EVEN, UNEVEN, ZERO, ONE])
@pytest.mark.parametrize("word", ["dp2tep2", "dp4tep2"])
def test_tokens_scattered_over_the_tp_ranks_too(built: Built, word: str, case: str) -> None:
    """Sequence-parallel MoE: each EP rank dispatches a share of its DP rank's tokens."""
    drawn = arm(word, case, scattered=True)
    assert wrong(drawn, built(drawn).run(drawn)) == []


@settings(max_examples=25)
@given(
    word=st.sampled_from(["dp4tp2", "dp4tep2", "dep4"]),
    tokens=st.tuples(*[st.integers(0, 6)] * 4),
    idle=st.booleans(),
    pad=st.booleans(),
)
@example(word="dep4", tokens=(0, 0, 0, 0), idle=False, pad=False)
@example(word="dep4", tokens=(0, 0, 0, 0), idle=True, pad=True)
def test_any_tokens_with_dummy_rows_and_pads(
    built: Built, word: str, tokens: tuple[int, ...], idle: bool, pad: bool
) -> None:
    drawn = Arm(word=word, tokens=tokens, idle=idle, pad=pad)
    assert wrong(drawn, built(drawn).run(drawn)) == []


def test_sixteen_ranks(built: Built) -> None:
    drawn = Arm(word="dep16", tokens=(5, 0, 1, 3) * 4)
    assert wrong(drawn, built(drawn).run(drawn)) == []


def test_which_exchanges_each_layout_makes(built: Built) -> None:
    """Hidden states, weights and ids go out, and one sum comes back; TP ranks then add theirs."""
    gathers = {"all_gather_into_tensor": 3, "reduce_scatter_tensor": 1}
    # The counts are agreed on first, by one all-reduce of each DP group.
    for word, scattered, wanted in [
        ("dep4", False, {("dp", "all_reduce"): 1} | {("dp", op): n for op, n in gathers.items()}),
        (
            "dp2tep2",
            False,
            {("dp", "all_reduce"): 2, ("tp", "all_reduce"): 2}
            | {("dp", op): 2 * n for op, n in gathers.items()},
        ),
        (
            "dp2tep2",
            True,
            {("dp", "all_reduce"): 2, ("tp", "all_gather_into_tensor"): 2}
            | {("ep", op): n for op, n in gathers.items()},
        ),
    ]:
        drawn = arm(word, EVEN, scattered=scattered)
        blocks = built(drawn)
        blocks.run(drawn)
        seen = Counter((entry.group.partition(".")[0], entry.op) for entry in blocks.ledger.entries)
        assert seen == wanted, (word, scattered)


# --- each piece is able to fail ---


def identity(ctx: RankContext, call: Any) -> Any:
    """vLLM's base communicator: dispatch and combine hand back what they were given."""
    from vllm.distributed import get_ep_group
    from vllm.distributed.device_communicators.base_device_communicator import (
        DeviceCommunicatorBase as Base,
    )

    def forward(x: torch.Tensor) -> torch.Tensor:
        own = get_ep_group().device_communicator
        names = ("dispatch", "combine", "combine_into_output", "allocate_combine_input")
        for name in names:
            setattr(own, name, getattr(Base, name).__get__(own))
        try:
            return call(x)
        finally:
            for name in names:
                delattr(own, name)

    return forward


@pytest.mark.parametrize("word", ["dep2", "dp2tep2", "dp2", "dp4tp2"])
def test_dispatch_that_does_nothing_is_wrong_on_every_rank(built: Built, word: str) -> None:
    drawn = arm(word, UNEVEN)
    blocks = built(drawn)
    assert wrong(drawn, blocks.run(drawn, identity)) == list(range(blocks.world.size))
    assert wrong(drawn, blocks.run(drawn)) == []


def rolled(ctx: RankContext, call: Any) -> Any:
    """Sums that are scattered one row off: each rank gets a row of its neighbour's."""
    from vllm.distributed import get_dp_group

    def forward(x: torch.Tensor) -> torch.Tensor:
        group = get_dp_group().device_communicator
        real = group.reduce_scatterv
        group.reduce_scatterv = lambda y, dim, sizes: real(y.roll(1, dims=0), dim, sizes)
        try:
            return call(x)
        finally:
            del group.reduce_scatterv

    return forward


def test_rows_that_come_back_one_off_are_wrong(built: Built) -> None:
    drawn = arm("dep4", EVEN)
    assert wrong(drawn, built(drawn).run(drawn, rolled)) == [0, 1, 2, 3]


def test_a_rank_that_does_not_launch_is_a_deadlock_named_at_once(vllm_ready: None) -> None:
    """vllm#43547: a DP rank without tokens returns before the MoE layers."""
    drawn = arm("dep4", ZERO)
    blocks = Blocks(drawn)

    def early(ctx: RankContext, call: Any) -> Any:
        return ABSENT if ctx.rank == 2 else call

    try:
        with pytest.raises(Deadlock) as caught:
            blocks.run(drawn, early)
        reports = {report.rank: report for report in caught.value.ranks}
        assert reports[2].state == "has finished"
        for rank in (0, 1, 3):
            assert reports[rank].state == "waits in"
            assert "all_gather" in reports[rank].operation
            assert "[0, 1, 2, 3]" in reports[rank].group
    finally:
        blocks.close()


def test_other_ranks_tokens_do_not_move_mine(built: Built) -> None:
    alone, together = Arm(word="dep4", tokens=(3, 0, 0, 0)), Arm(word="dep4", tokens=(3, 5, 1, 2))
    one, other = (built(drawn).run(drawn)[0] for drawn in (alone, together))
    # The float32 router sees a rank's own rows alone, so it says the same; the experts' float64
    # products are over more rows, and may sum 64 terms in another order.
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
