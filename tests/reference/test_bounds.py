"""Bounds must hold for correct subjects, stay small, and be far below what a fault does.

Typical slack (bound / error, per tap, 54 seeds and shapes each): float32 35 to 310, bfloat16 6
to 55, float16 5 to 45; bound / max of tap: float32 1e-4, bfloat16 0.2 to 0.3, float16 0.03.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from reference import Bounds, bounds, forward
from tests.reference.subject import (
    FAULTS,
    Subject,
    random_batch,
    random_weights,
    tiny_config,
)

ROUNDED = [torch.float32, torch.bfloat16, torch.float16]


def compare(
    dtype: torch.dtype,
    ranks: int = 2,
    seq_lens: tuple[int, ...] = (5, 3),
    seed: int = 0,
    fault: str | None = None,
) -> tuple[Bounds, dict[str, float]]:
    """Bounds with the subject's routing, and the largest error of each tap."""
    config = tiny_config()
    weights = random_weights(config, seed, dtype)
    batch = random_batch(config, seq_lens, seed)
    subject = Subject(config=config, weights=weights, dtype=dtype, ranks=ranks, fault=fault)
    taps = subject(batch)
    limits = bounds(
        config, weights, batch, dtype=dtype, ranks=ranks, routing=subject.routing(taps), seed=seed
    )
    exact = limits.result.taps
    return limits, {n: float((tap.double() - exact[n]).abs().max()) for n, tap in taps.items()}


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("seq_lens", [(1,), (5, 3), (33,)])
@pytest.mark.parametrize("seed", range(3))
def test_a_correct_subject_stays_inside_with_slack(
    dtype: torch.dtype, ranks: int, seq_lens: tuple[int, ...], seed: int
) -> None:
    limits, errors = compare(dtype, ranks, seq_lens, seed)
    assert limits.result.routing_rejected == ()
    assert set(errors) == set(limits.taps)
    slack = {n: limits.taps[n] / e for n, e in errors.items() if e}
    assert len(slack) >= len(errors) - 4  # all but embed and the chosen experts have an error
    assert min(slack.values()) > 3, slack
    assert max(slack.values()) < 600, slack


@pytest.mark.parametrize(
    ("dtype", "largest"), [(torch.float32, 1e-3), (torch.float16, 0.1), (torch.bfloat16, 0.5)]
)
@pytest.mark.parametrize("seq_lens", [(1,), (5, 3), (33,)])
def test_bounds_are_small_beside_the_tap(
    dtype: torch.dtype, largest: float, seq_lens: tuple[int, ...]
) -> None:
    limits, _ = compare(dtype, 8, seq_lens)
    for name, tap in limits.result.taps.items():
        assert limits.taps[name] < largest * float(tap.abs().max()) or "chosen" in name, name


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("seed", range(3))
def test_a_fault_exceeds_the_float32_bound_more_than_hundredfold(fault: str, seed: int) -> None:
    limits, errors = compare(torch.float32, seed=seed, fault=fault)
    first = "layers.1.attn" if "all-reduce" in fault else "layers.1.ffn"
    order = list(limits.taps)
    assert next(n for n in order if errors[n] > limits.taps[n]) == first
    assert errors[first] > 100 * limits.taps[first]
    assert errors["logprobs"] > 100 * limits.taps["logprobs"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_exceeds_the_bfloat16_bound(fault: str) -> None:
    limits, errors = compare(torch.bfloat16, fault=fault)
    first = "layers.1.attn" if "all-reduce" in fault else "layers.1.ffn"
    assert errors[first] > 2 * limits.taps[first]


def test_a_float64_subject_meets_a_float64_bound() -> None:
    config = tiny_config()
    weights, batch = random_weights(config), random_batch(config, (5, 3))
    taps = Subject(config=config, weights=weights, dtype=torch.float64, ranks=4)(batch)
    limits = bounds(config, weights, batch, dtype=torch.float64, ranks=4, accumulate=torch.float64)
    for name, tap in taps.items():
        assert (tap - limits.result.taps[name]).abs().max() <= limits.taps[name] < 1e-10, name


def test_low_precision_flips_near_ties_and_the_reference_follows() -> None:
    flips = 0
    for seed in range(6):
        limits, errors = compare(torch.bfloat16, 1, (33,), seed)
        assert limits.result.routing_rejected == ()
        config = tiny_config()
        own = forward(
            config, random_weights(config, seed, torch.bfloat16), random_batch(config, (33,), seed)
        )
        flips += sum(
            not torch.equal(own.taps[n], tap)
            for n, tap in limits.result.taps.items()
            if "chosen" in n
        )
        assert all(errors[n] == 0 for n in errors if "chosen" in n)
    assert flips, "no near tie in these seeds: the test shows nothing"


def test_result_is_the_exact_forward_with_the_reported_tie() -> None:
    config = tiny_config()
    weights, batch = random_weights(config), random_batch(config, (5, 3))
    proposed = torch.stack([torch.arange(8), (torch.arange(8) + 1) % 8], 1)
    routing = {2: proposed}
    limits = bounds(config, weights, batch, dtype=torch.float32, ranks=2, routing=routing)
    assert set(limits.tie) == {1, 2, 3}
    exact = forward(config, weights, batch, routing=routing, tie=limits.tie)
    assert exact.routing_rejected == limits.result.routing_rejected != ()
    for name, tap in exact.taps.items():
        torch.testing.assert_close(limits.result.taps[name], tap, rtol=0, atol=1e-12)


def test_bounds_are_deterministic_and_grow_with_safety_and_ranks() -> None:
    config = tiny_config("dm")
    weights, batch = random_weights(config), random_batch(config, (4,))

    def at(**options: float) -> dict[str, float]:
        given = {"ranks": 2, "seed": 0} | options
        return bounds(config, weights, batch, dtype=torch.bfloat16, **given).taps  # type: ignore[arg-type]

    assert at() == at()
    assert at() != at(seed=1)
    assert at(safety=8.0)["norm"] > 1.8 * at()["norm"]
    assert at(ranks=16)["layers.0.attn"] > 1.5 * at()["layers.0.attn"]
    assert at()["layers.1.experts_chosen"] == 0.0
    assert at()["embed"] > 0.0  # the floor: one rounding


def test_far_positions_are_less_exact() -> None:
    config = tiny_config("d", rope_theta=5e6)
    weights, batch = random_weights(config), random_batch(config, (8,))
    far = type(batch)(token_ids=batch.token_ids, positions=batch.positions + 400_000, seq_lens=(8,))
    near_bound, far_bound = (
        bounds(config, weights, b, dtype=torch.float32, ranks=1).taps["layers.0.attn"]
        for b in (batch, far)
    )
    assert far_bound > 10 * near_bound
    taps = Subject(config=config, weights=weights, dtype=torch.float32)(far)
    error = taps["layers.0.attn"].double() - forward(config, weights, far).taps["layers.0.attn"]
    assert near_bound < float(error.abs().max()) < far_bound


def test_no_tokens() -> None:
    config = tiny_config("dm")
    batch = random_batch(config, (0,))
    limits = bounds(config, random_weights(config), batch, dtype=torch.float32, ranks=2)
    assert set(limits.taps.values()) == {0.0}
    assert all(math.isfinite(tie) for tie in limits.tie.values())


def test_mxfp8_experts_have_wider_bounds_from_the_first_experts_on() -> None:
    """E4M3 rounds operands by up to 2^-4; what comes before the first experts knows nothing."""
    config = dataclasses.replace(tiny_config(), hidden_size=64, intermediate_size=32)
    weights, batch = random_weights(config, 0, torch.bfloat16), random_batch(config, (8,), 0)
    plain = bounds(config, weights, batch, dtype=torch.bfloat16, ranks=2)
    mxfp8 = bounds(config, weights, batch, dtype=torch.bfloat16, ranks=2, mxfp8_experts=True)
    first = config.moe_layer_freq.index(1)
    name = f"layers.{first}.ffn"
    assert mxfp8.taps[name] > 1.5 * plain.taps[name]
    assert mxfp8.taps[name] < float(mxfp8.result.taps[name].abs().max())
    assert torch.equal(mxfp8.result.taps[name], plain.result.taps[name])
