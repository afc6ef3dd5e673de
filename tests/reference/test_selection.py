"""The rules for following the blocks that a subject chose."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from reference import EXACT, Result, forward
from reference.sparse import select
from tests.reference.subject import random_batch, random_weights, tiny_config

CONFIG = tiny_config("dm", ".s")
WEIGHTS = random_weights(CONFIG)
BATCH = random_batch(CONFIG, (3, 30))
ROW, HEAD = 3 + 21, 2  # of the second sequence, in block 5 of it: of 6 blocks it attends to 3


def run(proposed: Tensor | None = None, tie: dict[int, float] | float = 0.0) -> Result:
    selection = None if proposed is None else {1: proposed}
    return forward(CONFIG, WEIGHTS, BATCH, selection=selection, selection_tie=tie)


OWN = run()
CHOSEN = OWN.taps["layers.1.blocks_chosen"]


def scores() -> list[float]:
    """The block scores of ROW and HEAD."""
    seen: list[Tensor] = []

    def tolerance(scores: Tensor) -> float:
        seen.append(scores)
        return 0.0

    x = OWN.taps["layers.0.stream"]
    weight = 1 + WEIGHTS["layers.1.input_layernorm.weight"].double()
    x = torch.nn.functional.rms_norm(x, (64,), weight, CONFIG.rms_norm_eps)
    weights = {name: value.double() for name, value in WEIGHTS.items()}
    positions, seq_lens = BATCH.positions, BATCH.seq_lens
    select(CONFIG, weights, 1, x[None], positions, seq_lens, None, tolerance, EXACT)
    return [float(score) for score in seen[0][0, ROW, HEAD]]


def with_row(row: list[int]) -> Tensor:
    proposed = CHOSEN.clone()
    proposed[ROW, HEAD] = torch.tensor(row)
    return proposed


def test_own_choice_in_any_order_changes_nothing() -> None:
    same = run(CHOSEN.flip(-1).to(torch.int32))
    assert same.selection_rejected == ()
    for name, tap in OWN.taps.items():
        assert torch.equal(same.taps[name], tap), name


def test_a_legal_tie_is_followed_and_an_illegal_one_is_not() -> None:
    score = scores()
    free = sorted(range(1, 5), key=lambda b: -score[b])  # all but the first and the own
    assert CHOSEN[ROW, HEAD].tolist() == sorted([0, 5, free[0]])
    gap = score[free[0]] - score[free[1]]
    proposed = with_row([5, free[1], 0])

    followed = run(proposed, gap * 1.001)
    assert followed.selection_rejected == ()
    expected = CHOSEN.clone()
    expected[ROW, HEAD] = torch.tensor(sorted([0, 5, free[1]]))
    assert torch.equal(followed.taps["layers.1.blocks_chosen"], expected)
    moved = followed.taps["layers.1.attn"] != OWN.taps["layers.1.attn"]
    assert moved.any(-1).nonzero().flatten().tolist() == [ROW]
    assert torch.equal(run(proposed, {1: gap * 1.001}).taps["norm"], followed.taps["norm"])

    too_small: list[dict[int, float] | float] = [gap * 0.999, 0.0, {}]
    for tie in too_small:
        refused = run(proposed, tie)
        assert refused.selection_rejected == ((1, ROW),)
        assert torch.equal(refused.taps["logprobs"], OWN.taps["logprobs"])


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ([0, 2, 2], "twice"),
        ([0, 5, -1], "too few"),
        ([-1, -1, -1], "none"),
        ([0, 2, 3], "not its own block"),
        ([2, 3, 5], "not the first block"),
        ([0, 5, 6], "a block that has not begun"),
        ([0, 5, 7], "a block of this sequence's later tokens"),
        ([0, 5, 8], "no block of any sequence"),
        ([0, 5, -2], "no block"),
    ],
)
def test_what_no_indexer_may_choose_is_illegal_whatever_the_tolerance(
    row: list[int], why: str
) -> None:
    refused = run(with_row(row), math.inf)
    assert refused.selection_rejected == ((1, ROW),), why
    for name, tap in OWN.taps.items():
        assert torch.equal(refused.taps[name], tap), name


@pytest.mark.parametrize("row", [[0, 5, b] for b in (1, 2, 3, 4)])
def test_its_near_twin_is_legal(row: list[int]) -> None:
    followed = run(with_row(row), math.inf)
    assert followed.selection_rejected == ()
    assert followed.taps["layers.1.blocks_chosen"][ROW, HEAD].tolist() == sorted(row)


def test_early_rows_choose_all_that_has_begun_and_no_more() -> None:
    early = 3 + 5  # in block 1
    assert CHOSEN[early].tolist() == [[0, 1, -1]] * 4
    proposed = CHOSEN.clone()
    proposed[early, 1] = torch.tensor([-1, 1, 0])
    assert run(proposed).selection_rejected == ()
    for row in ([0, 1, 2], [1, -1, -1], [0, -1, -1], [0, 1, 1]):
        proposed[early, 1] = torch.tensor(row)
        assert run(proposed, math.inf).selection_rejected == ((1, early),), row


def test_only_the_head_at_fault_is_refused() -> None:
    proposed = with_row([0, 5, 5])
    other = (HEAD + 1) % 4
    proposed[ROW, other] = torch.tensor([0, 5, 1 if 1 not in CHOSEN[ROW, other] else 2])
    mixed = run(proposed, math.inf)
    assert mixed.selection_rejected == ((1, ROW),)
    assert torch.equal(mixed.taps["layers.1.blocks_chosen"][ROW, HEAD], CHOSEN[ROW, HEAD])
    followed = mixed.taps["layers.1.blocks_chosen"][ROW, other]
    assert followed.tolist() == proposed[ROW, other].sort().values.tolist()


def test_a_selection_of_the_wrong_form_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"selection of layer 1 .* blocks of shape \(33, 4, 3\)"):
        run(CHOSEN[..., :2])
    with pytest.raises(ValueError, match="must be integer blocks"):
        run(CHOSEN.double())
    with pytest.raises(ValueError, match=r"selection names layer 0; sparse layers are \(1,\)"):
        forward(CONFIG, WEIGHTS, BATCH, selection={0: CHOSEN})
