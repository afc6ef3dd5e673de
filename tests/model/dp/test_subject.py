"""The whole model where each DP rank has a batch of its own: each gets what one rank alone gets."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch

from model.batch import Batch
from model.checkpoint import checkpoint
from model.rank_state import RANK_LOCAL
from model.subject import StepResult, Subject
from model.tiny import TinyM3
from sim import Deadlock, RankContext, Topology, World

pytestmark = pytest.mark.usefixtures("vllm_ready")


PLAIN = TinyM3()
SPARSE = TinyM3(attention="model")


@cache
def weights(tiny: TinyM3) -> dict[str, torch.Tensor]:
    return checkpoint(tiny, 0, torch.float32)


def batches(tokens: Sequence[int]) -> list[Batch]:
    """One of each DP rank, all different."""
    return [Batch.random(n, 256, seed=d, sequences=min(2, n) or 1) for d, n in enumerate(tokens)]


def step(word: str, tiny: TinyM3, *steps: Sequence[Batch]) -> list[list[StepResult]]:
    """Each step's results by rank; of each step a batch for each DP rank."""

    def program(ctx: RankContext) -> list[StepResult]:
        subject = Subject(ctx, tiny, weights(tiny))
        own = ctx.topology.coordinates(ctx.rank)["dp"]
        return [subject.step(of_step[own]) for of_step in steps]

    with World(word, rank_local=RANK_LOCAL) as world:
        by_rank = world.run(program)
    return [list(results) for results in zip(*by_rank, strict=True)]


@cache
def alone(tiny: TinyM3, tokens: tuple[int, ...]) -> list[StepResult]:
    """Each DP rank's batch, one after the other, on one rank."""
    return [of_step[0] for of_step in step("tp1", tiny, *[[b] for b in batches(tokens)])]


CASES = [
    ("dp2", (3, 4)),
    ("dep2", (4, 4)),
    ("dp2tp2", (5, 0)),
    ("dp2tep2", (1, 5)),
    ("dp4tp2", (1, 5, 0, 2)),
    ("dp4tep2", (1, 5, 0, 2)),
    ("dp2tp2pp2", (0, 4)),
    ("dep2pp2", (3, 1)),
    ("dep8", (1, 0, 3, 4, 5, 0, 0, 2)),
    ("dep16", (1, 0, 3, 4, 2, 2, 0, 0, 7, 1, 1, 1, 0, 5, 6, 3)),
]


def worst(word: str, results: Sequence[StepResult], one: Sequence[StepResult]) -> float:
    """The largest deviation of any rank's logits."""
    topology, moves = Topology.parse(word), [0.0]
    for rank, result in enumerate(results):
        if result.logits is None:
            continue
        wanted = one[topology.coordinates(rank)["dp"]].logits
        assert wanted is not None and result.logits.shape == wanted.shape
        if wanted.numel():
            moves.append(float((result.logits.double() - wanted.double()).abs().max()))
    return max(moves)


@pytest.mark.parametrize(("word", "tokens"), CASES)
def test_each_dp_rank_gets_its_own_results(word: str, tokens: tuple[int, ...]) -> None:
    [results] = step(word, PLAIN, batches(tokens))
    # As in tests/model/test_subject.py: float32 sums in other orders.
    assert worst(word, results, alone(PLAIN, tokens)) < 1e-4


def test_with_block_sparse_attention() -> None:
    tokens = (9, 0, 1, 17)
    [results] = step("dep4", SPARSE, batches(tokens))
    assert worst("dep4", results, alone(SPARSE, tokens)) < 1e-4


def test_stages_change_nothing_at_all() -> None:
    tokens = (5, 0)
    [one], [two] = (step(word, PLAIN, batches(tokens)) for word in ("dp2tp2", "dp2tp2pp2"))
    last = [result.logits for result in two if result.logits is not None]
    for result, staged in zip(one, last, strict=True):
        assert torch.equal(result.logits, staged)


def test_an_idle_rank_shows_nothing_of_its_dummy_row() -> None:
    [results] = step("dep2", PLAIN, batches((3, 0)))
    busy, idle = results
    assert list(busy.taps) == list(idle.taps)
    assert {tap.value.shape[0] for tap in busy.taps.values()} == {3}
    assert {tap.value.shape[0] for tap in idle.taps.values()} == {0}
    assert idle.logits is not None and idle.logits.shape == (0, 256)
    assert idle.overwritten == ()


def test_a_dummy_row_leaves_the_caches_as_they_are() -> None:
    """Rank 0 decodes after two steps in which only rank 1 had tokens."""
    ids = Batch.random(6, 256, seed=0).token_ids
    first, last = Batch.of(ids[:5], [5]), Batch.of(ids[5:], [1], context_lens=[5])
    idle, other = Batch.of([], [0]), Batch.random(4, 256, seed=1)
    steps = step("dep2", PLAIN, [first, other], [idle, other], [idle, other], [last, idle])
    [[whole]] = step("tp1", PLAIN, [Batch.of(ids, [6])])
    decoded = steps[-1][0].logits
    assert decoded is not None and whole.logits is not None
    assert (decoded - whole.logits[5:]).abs().max() < 1e-4


def test_a_rank_that_does_not_step_is_a_deadlock_named_at_once() -> None:
    given = batches((3, 2, 0, 1))

    def program(ctx: RankContext) -> None:
        subject = Subject(ctx, PLAIN, weights(PLAIN))
        if given[ctx.rank].tokens:
            subject.step(given[ctx.rank])

    with World("dep4", rank_local=RANK_LOCAL) as world, pytest.raises(Deadlock) as caught:
        world.run(program)
    states = {report.rank: report.state for report in caught.value.ranks}
    assert states == {0: "waits in", 1: "waits in", 2: "has finished", 3: "waits in"}


def test_seventy_two_ranks() -> None:
    """An NVL72: one expert on each rank."""
    tiny = TinyM3(layers="dm", num_local_experts=72)
    tokens = tuple(rank % 3 for rank in range(72))
    [results] = step("dep72", tiny, batches(tokens))
    few = [rank for rank, count in enumerate(tokens) if count][:6]
    for rank in few:
        [[one]] = step("tp1", tiny, [batches(tokens)[rank]])
        assert one.logits is not None and results[rank].logits is not None
        assert (results[rank].logits - one.logits).abs().max() < 1e-4
