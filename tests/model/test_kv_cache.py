"""The KV caches: where tokens go, what a new request may see, and what is refused."""

from __future__ import annotations

import pytest
import torch

from model.batch import Batch
from model.checkpoint import checkpoint
from model.rank_state import RANK_LOCAL
from model.subject import StepResult, Subject
from model.tiny import TinyM3
from sim import RankContext, RankFailed, World

pytestmark = pytest.mark.usefixtures("vllm_ready")

TINY = TinyM3(layers="dm", attention="model")
WEIGHTS = checkpoint(TINY, 0, torch.float32)


def steps(batches: list[Batch], word: str = "tp1", **options: int) -> list[list[StepResult]]:
    """Each step's results by rank, of one subject."""

    def program(ctx: RankContext) -> list[StepResult]:
        subject = Subject(ctx, TINY, WEIGHTS, **options)
        return [subject.step(batch) for batch in batches]

    with World(word, rank_local=RANK_LOCAL) as world:
        return [list(of_step) for of_step in zip(*world.run(program), strict=True)]


def logits(of_step: list[StepResult]) -> torch.Tensor:
    value = of_step[-1].logits
    assert value is not None
    return value


def tokens(count: int, seed: int = 0) -> list[int]:
    return Batch.random(count, TINY.vocab_size, seed).token_ids.tolist()


def test_a_request_goes_on_where_it_was_among_others() -> None:
    """Chunks of two requests in turns, in either order, are the whole of each."""
    one, two = tokens(11, 1), tokens(6, 2)
    whole = logits(steps([Batch.of(one + two, (11, 6))])[0])
    first, second, third = steps(
        [
            Batch.of(one[:5], (5,), (0,), (0,)),
            Batch.of(two[:1] + one[5:10], (1, 5), (0, 5), (3, 0)),
            Batch.of(one[10:] + two[1:], (1, 5), (10, 1), (0, 3)),
        ]
    )
    # The same sums in another order: rounding alone.
    assert torch.allclose(logits(first), whole[:5], atol=2e-5)
    assert torch.allclose(logits(second), torch.cat((whole[11:12], whole[5:10])), atol=2e-5)
    assert torch.allclose(logits(third), torch.cat((whole[10:11], whole[12:])), atol=2e-5)


def test_a_new_request_sees_nothing_of_the_one_before_it() -> None:
    """Bit for bit what a fresh subject computes, also when it is shorter."""
    old, new = tokens(30, 1), tokens(7, 2)
    alone = steps([Batch.of(new, (7,))])[0]
    after = steps([Batch.of(old, (30,)), Batch.of(new, (7,))])[1]
    assert torch.equal(logits(after), logits(alone))


def test_what_is_in_the_caches_matters() -> None:
    """The same new token after another text has other logits: the test above can fail."""
    last = tokens(1, 3)
    results = [
        logits(
            steps(
                [Batch.of(tokens(9, seed), (9,)), Batch.of(last, (1,), (9,), (0,))],
            )[1]
        )
        for seed in (1, 2)
    ]
    assert not torch.allclose(*results, atol=1e-2)


def test_the_caches_grow_with_a_long_request() -> None:
    """What was held moves: 40 tokens, then 90 more, are 130 at once."""
    text = tokens(130)
    whole = logits(steps([Batch.of(text, (130,))])[0])
    parts = steps([Batch.of(text[:40], (40,)), Batch.of(text[40:], (90,), (40,), (0,))])
    assert torch.allclose(torch.cat([logits(part) for part in parts]), whole, atol=2e-5)


def test_pages_are_scattered_and_nobody_has_page_0() -> None:
    def program(ctx: RankContext) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        subject = Subject(ctx, TINY, WEIGHTS)
        subject.step(Batch.of(tokens(9), (9,)))
        return subject.caches._pages, subject.caches._caches

    with World("tp1", rank_local=RANK_LOCAL) as world:
        pages, caches = world.run(program)[0]
    assert sorted(pages.flatten().tolist()) == [*range(1, pages.numel() + 1)]
    used = pages[0, :3].tolist()
    assert used != sorted(used) or used[2] - used[0] != 2
    assert {tuple(cache.shape[1:]) for cache in caches.values()} == {(4, 4, 32), (1, 4, 16)}
    for cache in caches.values():
        written = ~cache.isnan().all(-1)
        assert written.any(1).sum() == 9  # each token once, in every layer's cache
        assert not written[0].any()


def test_an_empty_step_touches_nothing() -> None:
    text = tokens(9)
    results = steps(
        [
            Batch.of(text[:8], (8,)),
            Batch.of([], (0,)),
            Batch.of(text[8:], (1,), (8,), (0,)),
        ],
        word="tp2pp2",
    )
    assert logits(results[1]).shape[0] == 0
    whole = logits(steps([Batch.of(text, (9,))], word="tp2pp2")[0])
    assert torch.allclose(logits(results[2]), whole[8:], atol=2e-5)


@pytest.mark.parametrize(
    ("batches", "said"),
    [
        ([Batch.of([1], (1,), (3,), (0,))], "said to have 3 tokens in the caches; they hold 0"),
        (
            [Batch.of([1, 2], (2,)), Batch.of([1], (1,), (1,), (0,))],
            "said to have 1 tokens in the caches; they hold 2",
        ),
        ([Batch.of([1], (1,), (0,), (2,))], "the caches hold 2 requests, 0 to 1"),
    ],
)
def test_a_batch_that_the_caches_cannot_serve_is_refused(batches: list[Batch], said: str) -> None:
    with pytest.raises(RankFailed, match=said):
        steps(batches, requests=2)


def test_what_another_rank_computed_can_be_written_and_gone_on_with() -> None:
    """The hand-over's way in: read token by token from one cache, written to another one."""
    ids = tokens(11, 1)

    def program(ctx: RankContext) -> list[torch.Tensor]:
        first, second = (Subject(ctx, TINY, WEIGHTS) for _ in range(2))
        first.step(Batch.of(ids[:10], (10,), (0,), (2,)))
        for held in second.held:
            values = first.caches.read(2, held.layer, 0, 10)
            for place in range(len(held.heads)):
                second.caches.write(5, held.layer, 0, place, values[:, place])
        second.caches.hold(5, 10)
        steps = (
            first.step(Batch.of(ids[10:], (1,), (10,), (2,))),
            second.step(Batch.of(ids[10:], (1,), (10,), (5,))),
        )
        second.caches.free(5)
        left = [second.caches.read(5, held.layer, 0, 11) for held in second.held]
        assert all(bool(each.isnan().all()) for each in left)
        return [logits([step]) for step in steps]

    with World("tp1", rank_local=RANK_LOCAL) as world:
        mine, theirs = world.run(program)[0]
    assert torch.equal(mine, theirs)


def test_pages_of_another_size_change_no_bit() -> None:
    dense = TinyM3(layers="dm")
    weights = checkpoint(dense, 0, torch.float32)
    batches = [Batch.of(tokens(9, 1), (9,)), Batch.of(tokens(1, 2), (1,), (9,))]

    def program(ctx: RankContext) -> list[list[torch.Tensor]]:
        subjects = [Subject(ctx, dense, weights, page=page) for page in (0, 8, 3)]
        return [[logits([subject.step(batch)]) for batch in batches] for subject in subjects]

    with World("tp1", rank_local=RANK_LOCAL) as world:
        own, larger, smaller = world.run(program)[0]
    for mine, a, b in zip(own, larger, smaller, strict=True):
        assert torch.equal(mine, a) and torch.equal(mine, b)
