"""Pad rows go to no expert and reach no token, whoever made them."""

from __future__ import annotations

import pytest
import torch

from tests.model.overlay.drive import Arm, Step, run
from tests.model.overlay.poison import pads_are_nan


@pytest.mark.parametrize(
    ("word", "tokens"),
    [("tep2", 1), ("tep4", 5), ("tep8", 3), ("tep2pp2", 33), ("tep4pp2", 2), ("tep2pp4", 1)],
)
def test_nan_in_pad_rows_reaches_no_token(stepped, word: str, tokens: int) -> None:
    arm = Arm(word=word, layers="dmmd", tokens=tokens, aux=(0, 1, 2, 4))
    clean = stepped(arm)
    with pads_are_nan() as filled:
        poisoned = run(arm)
    assert sum(filled) > 0
    assert torch.equal(poisoned.logprobs, clean.logprobs)
    assert poisoned.logprobs.isfinite().all()
    for mine, theirs in zip(poisoned.aux, clean.aux, strict=True):
        assert torch.equal(mine, theirs) and mine.isfinite().all()
    for one, other in zip(poisoned.ranks, clean.ranks, strict=True):
        for name, value in one.handed_on.items():
            assert torch.equal(value, other.handed_on[name])


def test_nan_in_pad_rows_reaches_no_token_of_a_whole_stream(stepped) -> None:
    arm = Arm(word="tep4", tokens=5, sp=False)
    with pads_are_nan() as filled:
        poisoned = run(arm)
    assert sum(filled) > 0
    assert torch.equal(poisoned.logprobs, stepped(arm).logprobs)


def dispatched(step: Step) -> list[bool]:
    """Whether the last MoE layer sent each row, pads included, to any expert."""
    rows = [rank.routed for rank in step.ranks if rank.logprobs is not None]
    return (torch.cat(rows) >= 0).any(dim=-1).tolist()


@pytest.mark.parametrize("sp", [True, False])
@pytest.mark.parametrize("word", ["tep4", "tep4pp2"])
def test_pad_rows_go_to_no_expert(stepped, word: str, sp: bool) -> None:
    arm = Arm(word=word, tokens=9, sp=sp)
    assert dispatched(stepped(arm)) == [True] * 9 + [False] * 3
    assert dispatched(stepped(arm.but(padded=2))) == [True] * 7 + [False] * 5


@pytest.mark.parametrize("sp", [True, False])
def test_marked_rows_change_no_other(stepped, sp: bool) -> None:
    arm = Arm(word="tep2pp2", tokens=9, sp=sp)
    marked, plain = stepped(arm.but(padded=2)).logprobs, stepped(arm).logprobs
    assert torch.equal(marked[:7], plain[:7])
    assert not torch.equal(marked[7:], plain[7:])


@pytest.mark.parametrize("sp", [True, False])
def test_the_context_has_its_own_mask_back(stepped, sp: bool) -> None:
    arm = Arm(word="tep2pp2", tokens=9, padded=2, sp=sp)
    for rank in stepped(arm).ranks:
        assert rank.mask_after.tolist() == [False] * 7 + [True] * 2
    assert all(rank.mask_after is None for rank in stepped(arm.but(padded=0)).ranks)
