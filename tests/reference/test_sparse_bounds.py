"""Bounds of sparse attention: they hold for correct subjects, and a wrong choice is told apart.

Blocks are scored in bfloat16 in a model of any dtype, so near ties fall either way and are
followed; what attention over the chosen blocks may deviate by is as small as in a dense layer.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from reference import Bounds, bounds, forward
from tests.reference.subject import Subject, random_batch, random_weights, tiny_config

ROUNDED = [torch.float32, torch.bfloat16, torch.float16]
CONFIG = tiny_config("dmmm", ".sss")


def compare(
    dtype: torch.dtype, ranks: int = 2, seq_lens: tuple[int, ...] = (30, 9), seed: int = 0
) -> tuple[Bounds, dict[str, Tensor], dict[str, float]]:
    """Bounds with the subject's choices, its taps and the largest error of each."""
    weights = random_weights(CONFIG, seed, dtype)
    batch = random_batch(CONFIG, seq_lens, seed)
    subject = Subject(config=CONFIG, weights=weights, dtype=dtype, ranks=ranks)
    taps = subject(batch)
    limits = bounds(
        CONFIG,
        weights,
        batch,
        dtype=dtype,
        ranks=ranks,
        routing=subject.routing(taps),
        selection=subject.selection(taps),
        seed=seed,
    )
    exact = limits.result.taps
    return limits, taps, {n: float((t.double() - exact[n]).abs().max()) for n, t in taps.items()}


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize(("ranks", "seq_lens"), [(1, (30, 9)), (8, (45,))])
@pytest.mark.parametrize("seed", range(3))
def test_a_correct_subject_stays_inside_with_slack(
    dtype: torch.dtype, ranks: int, seq_lens: tuple[int, ...], seed: int
) -> None:
    limits, _, errors = compare(dtype, ranks, seq_lens, seed)
    assert limits.result.routing_rejected == limits.result.selection_rejected == ()
    assert set(errors) == set(limits.taps)
    assert {errors[name] for name in errors if "chosen" in name} == {0.0}
    slack = {n: limits.taps[n] / e for n, e in errors.items() if e}
    assert min(slack.values()) > 3, slack
    assert max(slack.values()) < 600, slack


@pytest.mark.parametrize(
    ("dtype", "largest"), [(torch.float32, 1e-3), (torch.float16, 0.1), (torch.bfloat16, 0.5)]
)
def test_bounds_are_as_small_as_in_dense_layers(dtype: torch.dtype, largest: float) -> None:
    limits, _, _ = compare(dtype, 8)
    for name, tap in limits.result.taps.items():
        assert limits.taps[name] < largest * float(tap.abs().max()) or "chosen" in name, name


@pytest.mark.parametrize("dtype", ROUNDED)
def test_near_ties_fall_the_other_way_and_the_reference_follows(dtype: torch.dtype) -> None:
    flips = 0
    for seed in range(4):
        limits, _, _ = compare(dtype, 1, (60,), seed)
        weights = random_weights(CONFIG, seed, dtype)
        own = forward(CONFIG, weights, random_batch(CONFIG, (60,), seed)).taps
        name = "layers.1.blocks_chosen"
        flips += int((own[name] != limits.result.taps[name]).any(-1).sum())
        assert limits.result.selection_rejected == ()
    assert flips, "no near tie in these seeds: the test shows nothing"


def test_the_tolerance_of_blocks_is_bfloat16s_in_a_float32_model() -> None:
    """Twice the safety of 4 on an error of some 2^-8 of a score."""
    limits, _, _ = compare(torch.float32)
    assert set(limits.selection_tie) == {1, 2, 3}
    assert all(0.1 < tie < 2.0 for tie in limits.selection_tie.values()), limits.selection_tie
    assert all(tie < 1e-3 for tie in limits.tie.values())


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("wrong", ["heads swapped", "worst blocks", "row late"])
def test_a_wrong_choice_is_rejected(dtype: torch.dtype, wrong: str) -> None:
    _, taps, _ = compare(dtype)
    chosen = taps["layers.1.blocks_chosen"]
    if wrong == "heads swapped":
        chosen = chosen.flip(1)
    elif wrong == "row late":
        chosen = chosen.roll(1, 0)
    else:
        weights = random_weights(CONFIG, 0, dtype)
        weights["layers.1.self_attn.index_q_proj.weight"] *= -1
        batch = random_batch(CONFIG, (30, 9), 0)
        chosen = Subject(config=CONFIG, weights=weights, dtype=dtype)(batch)[
            "layers.1.blocks_chosen"
        ]
    limits = bounds(
        CONFIG,
        random_weights(CONFIG, 0, dtype),
        random_batch(CONFIG, (30, 9), 0),
        dtype=dtype,
        ranks=2,
        selection={1: chosen},
    )
    assert limits.result.selection_rejected
    assert {layer for layer, _ in limits.result.selection_rejected} == {1}


def test_attention_to_blocks_that_were_not_chosen_exceeds_the_float32_bound() -> None:
    """A subject that chooses right and attends to all is told from one that attends to those."""
    limits, _, errors = compare(torch.float32)
    weights = random_weights(CONFIG, 0)
    dense = tiny_config("dmmm")
    plain = {name: value for name, value in weights.items() if "index" not in name}
    batch = random_batch(CONFIG, (30, 9), 0)
    attends_to_all = Subject(config=dense, weights=plain, dtype=torch.float32)(batch)
    name = "layers.1.attn"
    error = (attends_to_all[name].double() - limits.result.taps[name]).abs().max()
    assert errors[name] < limits.taps[name]
    assert float(error) > 100 * limits.taps[name]


def test_result_is_the_exact_forward_with_the_reported_tie() -> None:
    _, taps, _ = compare(torch.bfloat16)
    weights, batch = random_weights(CONFIG, 0, torch.bfloat16), random_batch(CONFIG, (30, 9), 0)
    wanted = {1: taps["layers.1.blocks_chosen"].flip(1), 2: taps["layers.2.blocks_chosen"]}
    limits = bounds(CONFIG, weights, batch, dtype=torch.bfloat16, ranks=2, selection=wanted)
    exact = forward(CONFIG, weights, batch, selection=wanted, selection_tie=limits.selection_tie)
    assert exact.selection_rejected == limits.result.selection_rejected != ()
    for name, tap in exact.taps.items():
        torch.testing.assert_close(limits.result.taps[name], tap, rtol=0, atol=1e-12)


def test_no_tokens() -> None:
    limits = bounds(
        CONFIG, random_weights(CONFIG), random_batch(CONFIG, (0,)), dtype=torch.float32, ranks=2
    )
    assert set(limits.taps.values()) == {0.0}
    assert all(math.isfinite(tie) for tie in limits.selection_tie.values())
