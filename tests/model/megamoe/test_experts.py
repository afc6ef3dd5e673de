"""vLLM's MegaMoE experts over the stand-ins, against their definition in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from model.megamoe import mxfp8
from sim import Deadlock, RankContext, RankFailed
from tests.model.megamoe import dense
from tests.model.megamoe.harness import EXPERTS, HIDDEN, Tokens, launch, matrices, stored

pytestmark = pytest.mark.usefixtures("mega_ready")

COUNTS = {
    "tep1": ([7],),
    "tep2": ([5, 4], [0, 3]),
    "tep4": ([3, 0, 5, 1], [0, 0, 0, 0]),
    "tep8": ([1, 0, 2, 0, 3, 0, 0, 1],),
    "dep2tep2": ([2, 3, 0, 1],),
}
CASES = [(word, counts) for word, lists in COUNTS.items() for counts in lists]
FORMS = ("bf16", "mxfp8")


def staged(x: torch.Tensor, form: str) -> torch.Tensor:
    """Hidden states as the kernel has them, in float64."""
    x = x if form == "bf16" else mxfp8.dequantise(*mxfp8.quantise(x))
    return x.to(torch.float64)


def ratio(outputs: list[torch.Tensor], tokens: list[Tokens], form: str) -> float:
    """Largest error over its bound, of all elements of all ranks."""
    experts, worst = stored(matrices(), form), 0.0
    for y, mine in zip(outputs, tokens, strict=True):
        x = staged(mine.x, form)
        exact = dense.dense(x, experts, mine.ids, mine.weights)
        limit = dense.bound(
            x, torch.zeros_like(x), experts, mine.ids, mine.weights, mxfp8=form == "mxfp8"
        )
        worst = max([worst, *((y.to(torch.float64) - exact).abs() / limit).flatten().tolist()])
    return worst


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("word", "counts"), CASES)
def test_each_rank_gets_its_own_tokens_full_value(word: str, counts: list[int], form: str) -> None:
    tokens = [Tokens.random(count, seed) for seed, count in enumerate(counts)]
    outputs, _ = launch(word, form, matrices(), tokens)
    assert [tuple(y.shape) for y in outputs] == [(count, HIDDEN) for count in counts]
    assert all(y.dtype == torch.bfloat16 for y in outputs)
    assert ratio(outputs, tokens, form) <= 1


@pytest.mark.parametrize("form", FORMS)
def test_clamped_activations_meet_the_bound_too(form: str) -> None:
    tokens = [Tokens.random(4, seed) for seed in (1, 2)]
    loud = [Tokens(x=mine.x * 4, ids=mine.ids, weights=mine.weights) for mine in tokens]
    x = staged(loud[0].x, form)
    gate = torch.einsum("eih,th->eti", stored(matrices(), form).w1, x)
    assert 0.02 < float((gate > dense.CLAMP).double().mean()) < 0.5
    outputs, _ = launch("tep2", form, matrices(), loud)
    assert ratio(outputs, loud, form) <= 1


def test_mxfp8_is_within_its_bound_of_the_model_before_quantisation() -> None:
    tokens, plain = [Tokens.random(count, seed) for seed, count in enumerate([5, 2])], matrices()
    outputs, _ = launch("tep2", "mxfp8", plain, tokens)
    wide = {name: w.to(torch.float64) for name, w in plain.items()}
    errors = {f"d{name[1]}": dense.quantisation_error(w) for name, w in wide.items()}
    experts = dense.Experts(**wide, **errors)
    for y, mine in zip(outputs, tokens, strict=True):
        x = mine.x.to(torch.float64)
        exact = dense.dense(x, experts, mine.ids, mine.weights)
        dx = dense.quantisation_error(x)
        worst, likely = (
            dense.bound(x, dx, experts, mine.ids, mine.weights, mxfp8=True, independent=independent)
            for independent in (False, True)
        )
        moved = (y.to(torch.float64) - exact).abs()
        assert (moved <= likely).all() and (likely <= worst).all()
        # Far enough below a typical output to mean something.
        assert float(likely.median()) < 2 * float(exact.square().mean().sqrt())
        # And it is MXFP8 that ran: bfloat16 alone would be ten times closer.
        assert 0.01 < float(moved.norm() / exact.norm()) < 0.1


Tamper = Callable[[RankContext, Any], None]


def _swap_experts(ctx: RankContext, experts: Any) -> None:
    experts.w2_weight.data.copy_(experts.w2_weight.data.roll(1, 0))


def _swap_gate_and_up(ctx: RankContext, experts: Any) -> None:
    turns = experts.w13_weight.data.view(-1, 2, 8, HIDDEN)
    turns.copy_(turns.flip(1))


def _forget_the_clamp_on_one_rank(ctx: RankContext, experts: Any) -> None:
    if ctx.rank == 1:
        experts._kernel_kwargs = experts._kernel_kwargs | {"activation_clamp": None}


def _forget_beta(ctx: RankContext, experts: Any) -> None:
    experts._kernel_kwargs = experts._kernel_kwargs | {"activation_beta": 0.0}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "tamper", [_swap_experts, _swap_gate_and_up, _forget_the_clamp_on_one_rank, _forget_beta]
)
def test_the_bound_is_tight_enough_to_see_a_fault(form: str, tamper: Tamper) -> None:
    tokens = [Tokens.random(4, seed) for seed in (1, 2)]
    tokens = [Tokens(x=t.x * 4, ids=t.ids, weights=t.weights) for t in tokens]
    outputs, _ = launch("tep2", form, matrices(), tokens, tamper=tamper)
    assert ratio(outputs, tokens, form) > 1


@pytest.mark.parametrize("form", FORMS)
def test_slots_without_an_expert_add_nothing_and_their_weight_is_ignored(form: str) -> None:
    tokens = [Tokens.random(4, seed) for seed in (3, 4)]
    for mine in tokens:
        mine.ids[0, 1] = mine.ids[1, 0] = -1
        mine.ids[2] = -1
        mine.weights[mine.ids < 0] = torch.nan
        mine.x[2] = torch.nan
    outputs, _ = launch("tep2", form, matrices(), tokens)
    assert all(torch.equal(y[2], torch.zeros(HIDDEN).bfloat16()) for y in outputs)
    rest = [0, 1, 3]
    kept = [Tokens(x=t.x[rest], ids=t.ids[rest], weights=t.weights[rest]) for t in tokens]
    assert ratio([y[rest] for y in outputs], kept, form) <= 1


@pytest.mark.parametrize("form", FORMS)
def test_a_launch_leaves_nothing_behind_for_the_next(form: str) -> None:
    """The second of two equal launches gives the same bits, in another schedule too."""
    tokens = [Tokens.random(count, seed) for seed, count in enumerate([4, 0, 2, 1])]
    first, _ = launch("tep4", form, matrices(), tokens)
    again, _ = launch("tep4", form, matrices(), tokens, times=2, seed=5)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_pipeline_stages_give_the_same_bits_as_one_stage(form: str) -> None:
    tokens = [Tokens.random(count, seed) for seed, count in enumerate([5, 3])]
    alone, _ = launch("tep2", form, matrices(), tokens)
    staged_outputs, _ = launch("tep2pp2", form, matrices(), tokens * 2)
    for stage in (staged_outputs[:2], staged_outputs[2:]):
        assert all(torch.equal(a, b) for a, b in zip(alone, stage, strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_which_ranks_own_the_experts_does_not_change_the_order_of_the_sum(form: str) -> None:
    """One token a rank: every expert sees few rows, and any two worlds differ by less than a
    rounding of the last sum."""
    tokens = [Tokens.random(1, seed) for seed in range(4)]
    together = Tokens(
        **{name: torch.cat([getattr(t, name) for t in tokens]) for name in ("x", "ids", "weights")}
    )
    (whole,), _ = launch("tep1", form, matrices(), [together])
    spread, _ = launch("tep4", form, matrices(), tokens)
    assert ratio(spread, tokens, form) <= 1
    difference = (whole.double() - torch.cat(spread).double()).norm() / whole.double().norm()
    assert float(difference) < dense.U16 / 4


@pytest.mark.parametrize(
    ("times", "group", "operation"),
    # The first launch of a group begins with vLLM's own barrier.
    [(1, "ep.cpu[0, 1, 2, 3]", "barrier"), (2, "ep[0, 1, 2, 3]", "all_to_all_single")],
)
def test_the_rank_that_does_not_launch_is_named(times: int, group: str, operation: str) -> None:
    tokens = [Tokens.random(2, seed) for seed in range(4)]
    with pytest.raises(Deadlock) as caught:
        launch("tep4", "bf16", matrices(), tokens, times=times, absent=2)
    assert "ranks 0, 1, 3 wait" in caught.value.headline
    assert "rank 2 finished" in caught.value.headline
    reports = {report.rank: report for report in caught.value.ranks}
    assert reports[2].state == "has finished"
    assert {reports[r].group for r in (0, 1, 3)} == {group}
    assert all(reports[r].operation.startswith(operation) for r in (0, 1, 3))


def test_a_rank_without_tokens_may_not_stay_away() -> None:
    tokens = [Tokens.random(count, 0) for count in (3, 0)]
    launch("tep2", "bf16", matrices(), tokens)
    with pytest.raises(Deadlock, match=r"rank 0 waits .*; rank 1 finished"):
        launch("tep2", "bf16", matrices(), tokens, absent=1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("word", ["tep4", "tep2pp2"])
def test_the_exchange_of_a_launch(word: str, form: str) -> None:
    """Stated as data: three exchanges on the expert-parallel group, of exactly the rows needed."""
    counts = [3, 0, 5, 1]
    tokens = [Tokens.random(count, seed) for seed, count in enumerate(counts)]
    _, once = launch(word, form, matrices(), tokens)
    _, twice = launch(word, form, matrices(), tokens, times=2)
    groups = [[0, 1, 2, 3]] if word == "tep4" else [[0, 1], [2, 3]]
    for group in groups:
        first = [e for e in once.entries if list(e.ranks) == group]
        both = [e for e in twice.entries if list(e.ranks) == group]
        # vLLM's own barrier before the first launch, and the buffer's, once each.
        assert [(e.op, e.group) for e in first[:2]] == [("barrier", "ep.cpu"), ("barrier", "ep")]
        assert [(e.op, e.group) for e in first[2:]] == [("all_to_all_single", "ep")] * 3
        assert [(e.op, e.shapes) for e in both] == [(e.op, e.shapes) for e in [*first, *first[2:]]]
        # Rows of (expert, token) pairs whose expert lives on another rank of the group.
        local = EXPERTS // len(group)
        moved = [int((tokens[r].ids // local != i).sum()) for i, r in enumerate(group)]
        row = HIDDEN * 2 if form == "bf16" else HIDDEN + HIDDEN // 32
        counting, rows, results = first[2:]
        assert counting.bytes == 8 * local * len(group) * (len(group) - 1)
        assert rows.bytes == sum(moved) * (row + 4)
        assert results.bytes == sum(moved) * HIDDEN * 2
    assert len(once.entries) == 5 * len(groups)


def test_a_breach_on_one_rank_names_the_rank() -> None:
    tokens = [Tokens.random(2, seed) for seed in range(2)]
    tokens[1].ids[1, 3] = EXPERTS
    with pytest.raises(RankFailed, match=r"rank 1 raised PreconditionError: token 1, slot 3"):
        launch("tep2", "bf16", matrices(), tokens)
