"""Sampling: greedy takes the largest, seeded follows the softmax, and requests do not meet."""

from __future__ import annotations

import pytest
import torch

from rankfold.errors import UsageError
from rankfold.serving.sampling import Sampling

LOGITS = torch.tensor([0.5, 2.0, -1.0, 2.0])


def test_greedy_takes_the_first_of_the_largest() -> None:
    assert Sampling().sample(0, 0, LOGITS) == 1
    assert Sampling().sample(3, 7, LOGITS.bfloat16()) == 1


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_seeded_sampling_has_the_probabilities_of_the_softmax(temperature: float) -> None:
    sampling = Sampling(seed=1, temperature=temperature)
    draws = 4000
    counts = torch.bincount(
        torch.tensor([sampling.sample(0, count, LOGITS) for count in range(draws)]), minlength=4
    )
    expected = (LOGITS.double() / temperature).softmax(0)
    # Four standard deviations of a binomial share.
    allowed = 4 * (expected * (1 - expected) / draws).sqrt()
    assert bool(((counts / draws - expected).abs() <= allowed).all())


def test_draws_depend_on_the_seed_the_request_and_the_count_alone() -> None:
    def drawn(seed: int, request: int) -> list[int]:
        sampling = Sampling(seed=seed)
        return [sampling.sample(request, count, torch.zeros(1000)) for count in range(8)]

    assert drawn(1, 0) == drawn(1, 0)
    assert drawn(1, 0) != drawn(1, 1) and drawn(1, 0) != drawn(2, 0)
    assert len({*drawn(1, 0)}) > 1


@pytest.mark.parametrize("seed", [None, 3])
def test_logits_of_a_broken_run_are_sampled_without_an_error(seed: int | None) -> None:
    row = torch.tensor([torch.nan, 1.0, -torch.inf, torch.inf])
    assert Sampling(seed=seed).sample(0, 0, row) == 1
    assert Sampling(seed=seed).sample(0, 0, torch.full((3,), torch.nan)) == 0


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"seed": -1}, "--seed-sampling -1"),
        ({"seed": 1, "temperature": 0.0}, "positive"),
        ({"seed": 1, "temperature": float("nan")}, "positive"),
        ({"seed": 1, "temperature": float("inf")}, "positive"),
    ],
)
def test_what_makes_no_sense_is_refused(more: dict[str, float], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Sampling(**more)  # type: ignore[arg-type]
