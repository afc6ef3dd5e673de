"""The plan: every token once, in order, decodes first, as many as a step may have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.tiny import TinyM3
from rankfold.errors import UsageError
from rankfold.serving.plan import Part, Plan, plan_of
from rankfold.serving.request import Request, lengths_of, requests_of


@given(
    requests=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 9)), min_size=1, max_size=8),
    chunk=st.integers(0, 12),
    most=st.integers(1, 40),
)
def test_every_token_is_brought_once_and_in_order(
    requests: list[tuple[int, int]], chunk: int, most: int
) -> None:
    prompts, decode = zip(*requests, strict=True)
    plan = plan_of(prompts, decode, chunk=chunk, most_tokens=most)
    done = [0] * len(requests)
    for step in plan.steps:
        assert 0 < step.tokens <= most
        assert len({part.request for part in step.parts}) == len(step.parts)
        assert len(step.rows()) == step.tokens
        for part in step.parts:
            assert part.start == done[part.request] and part.length > 0
            done[part.request] = part.end
            if plan.is_decode(part):
                assert part.length == 1
            elif chunk:
                assert part.length <= chunk and part.end <= prompts[part.request]
        # vLLM wants requests with one token before all others.
        lengths = [part.length > 1 for part in step.parts]
        assert lengths == sorted(lengths)
    assert done == [p + d for p, d in requests] == list(plan.lengths)


def test_whole_prompts_go_first_and_then_one_token_a_step() -> None:
    plan = plan_of([5, 1, 3], [2, 0, 1])
    parts = [[(p.request, p.start, p.length) for p in step.parts] for step in plan.steps]
    assert parts == [
        [(1, 0, 1), (0, 0, 5), (2, 0, 3)],
        [(0, 5, 1), (2, 3, 1)],
        [(0, 6, 1)],
    ]


def test_chunks_split_blocks_and_mix_with_decodes() -> None:
    plan = plan_of([7, 2], [1, 3], chunk=3)
    parts = [[(p.request, p.start, p.length) for p in step.parts] for step in plan.steps]
    assert parts == [
        [(0, 0, 3), (1, 0, 2)],
        [(1, 2, 1), (0, 3, 3)],
        [(0, 6, 1), (1, 3, 1)],
        [(0, 7, 1), (1, 4, 1)],
    ]
    assert plan.describe(1) == "step 1: decode of request 1, 3 prompt tokens of request 0"


def test_what_is_sampled_after_which_part() -> None:
    plan = Plan(lengths=(4,), prompts=(3,), steps=())
    assert not plan.samples(Part(request=0, start=0, length=2))
    assert plan.samples(Part(request=0, start=2, length=1))
    assert plan.samples(Part(request=0, start=3, length=1))
    assert not plan.is_decode(Part(request=0, start=2, length=1))
    assert plan.is_decode(Part(request=0, start=3, length=1))


@pytest.mark.parametrize(
    ("prompts", "decode", "more", "says"),
    [
        ([0], [1], {}, "one token or more"),
        ([3], [-1], {}, "one token or more"),
        ([3], [1], {"chunk": -1}, "--chunk -1"),
        ([3], [1], {"most_tokens": 0}, "use 1 or more"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(
    prompts: list[int], decode: list[int], more: dict[str, int], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        plan_of(prompts, decode, **more)


@pytest.mark.parametrize("seed", range(20))
def test_lengths_are_shorter_and_longer_than_a_block_and_than_all_blocks(seed: int) -> None:
    tiny = TinyM3(attention="model")
    block, kept = tiny.sparse_block_size, tiny.sparse_topk_blocks * tiny.sparse_block_size
    lengths = lengths_of(8, tiny, seed)
    assert len(set(lengths)) == 8 and lengths == lengths_of(8, tiny, seed)
    # The first drops a block at its last token: it has more blocks than are chosen.
    assert -(-lengths[0] // block) > tiny.sparse_topk_blocks
    assert lengths[1] < block < lengths[2] < kept
    assert lengths_of(2, tiny, seed) == lengths[:2]


def test_requests_are_cut_from_ids() -> None:
    made = requests_of([1, 2, 3, 4, 5], [2, 3], 4)
    assert made == (Request(prompt=(1, 2), decode=4), Request(prompt=(3, 4, 5), decode=4))
    assert made[0].length == 6


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (Request(prompt=()), "empty prompt"),
        (Request(prompt=(1, 256)), "token id 256: use 0 to 255"),
        (Request(prompt=(-1,)), "token id -1"),
        (Request(prompt=(1,), decode=-1), "decode steps"),
        (Request(prompt=(1,) * 4000, decode=97), "has 4096 positions"),
    ],
)
def test_a_request_that_the_model_cannot_take_is_refused(request_: Request, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        request_.check(TinyM3())
    Request(prompt=(1, 255), decode=4094).check(TinyM3())
