"""Replicated values are the same bits on all TP ranks, and stages get what was sent to them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from properties import Verdict, same_across_ranks, same_across_stages
from sim import Topology
from tests.properties.captures import Tap, captured, full, with_rows


def across_ranks(
    *values: torch.Tensor | None, topology: str = "tp2", declared: str = "replicate"
) -> Verdict:
    """The verdict on one tap with these values on the ranks."""
    return same_across_ranks(Topology.parse(topology), captured("tap", *values, declared=declared))


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool],
    ids=str,
)
def test_the_same_bits_hold(dtype: torch.dtype) -> None:
    verdict = across_ranks(full().to(dtype), full().to(dtype))
    assert verdict.ok
    assert verdict.what.startswith("1 replicated value")


def test_values_are_compared_within_tp_groups_only() -> None:
    assert across_ranks(full(), full(), full() + 1, full() + 1, topology="tp2pp2").ok
    assert not across_ranks(full(), full(), full(), full() + 1, topology="tp2pp2").ok


@given(st.integers(0, 3))
def test_the_odd_rank_is_named(odd: int) -> None:
    values = [full() + 0.5 * (rank == odd) for rank in range(4)]
    verdict = across_ranks(*values, topology="tp4")
    assert not verdict.ok
    assert verdict.name == "replication"
    assert f"rank {odd}" in verdict.where or f"ranks [{odd}]" in verdict.where
    assert "tap" in verdict.where
    assert verdict.why == "largest difference 0.5"


def test_one_bit_is_enough() -> None:
    value = full()
    value[3, 2] = torch.nextafter(value[3, 2], torch.tensor(math.inf, dtype=torch.float64))
    assert not across_ranks(full(), value).ok


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("a", "b"),
    [(NAN, 0.0), (0.0, NAN), (INF, torch.finfo(torch.float64).max), (0.0, -0.0), (INF, -INF)],
)
def test_values_that_look_alike_but_are_not(a: float, b: float) -> None:
    assert not across_ranks(with_rows(full(), [1], a), with_rows(full(), [1], b)).ok


@pytest.mark.parametrize("value", [NAN, INF, -INF, -0.0])
def test_the_same_odd_values_are_the_same(value: float) -> None:
    assert across_ranks(with_rows(full(), [1], value), with_rows(full(), [1], value)).ok


def test_shapes_and_dtypes_count() -> None:
    shapes = across_ranks(full(), full(5))
    assert not shapes.ok
    assert shapes.why == "shapes [5, 3] and [4, 3]"
    dtypes = across_ranks(full(), full().float())
    assert not dtypes.ok
    assert dtypes.why == "dtypes torch.float32 and torch.float64"


def test_the_odd_rank_is_named_also_when_it_is_the_first() -> None:
    verdict = across_ranks(full() + 1, full(), full(), full(), topology="tp4")
    assert verdict.where.endswith("ranks [0] against ranks [1, 2, 3]")


def test_a_rank_that_lacks_the_tap_is_named() -> None:
    verdict = across_ranks(full(), full(), None, full(), topology="tp4")
    assert not verdict.ok
    assert "[2]" in verdict.where
    assert verdict.why == "these ranks do not have it"


def test_partial_sums_need_not_be_the_same() -> None:
    verdict = across_ranks(full(), 2 * full(), declared="partial:tp")
    assert verdict.ok
    assert verdict.what.startswith("0 ")


def test_the_first_odd_tap_in_program_order_is_named() -> None:
    ranks = [
        {name: Tap(full() + odd * rank) for name, odd in (("z", 0), ("y", 1), ("x", 1))}
        for rank in range(2)
    ]
    verdict = same_across_ranks(Topology.parse("tp2"), ranks)
    assert verdict.where.startswith("y,")


# --- from stage to stage ---


def stages(
    sent: dict[str, torch.Tensor], received: dict[str, torch.Tensor]
) -> list[dict[str, Tap]]:
    """tp2pp2 in which rank 1 sends and rank 3 receives these, and ranks 0 and 2 what is right."""
    right = {"hidden": full(), "residual": 2 * full()}

    def taps(stage: int, way: str, tensors: dict[str, torch.Tensor]) -> dict[str, Tap]:
        return {f"stage.{stage}.{way}.{key}": Tap(value) for key, value in tensors.items()}

    return [
        taps(0, "send", right),
        taps(0, "send", sent),
        taps(1, "recv", right),
        taps(1, "recv", received),
    ]


def transfer(sent: dict[str, torch.Tensor], received: dict[str, torch.Tensor]) -> Verdict:
    """The verdict on these stages."""
    return same_across_stages(Topology.parse("tp2pp2"), stages(sent, received))


RIGHT = {"hidden": full(), "residual": 2 * full()}


def test_what_arrives_as_it_was_sent_holds() -> None:
    verdict = transfer(RIGHT, RIGHT)
    assert verdict.ok
    assert verdict.what.startswith("4 tensors")


def test_lost_rows_are_found() -> None:
    verdict = transfer(RIGHT, {**RIGHT, "hidden": full()[:3]})
    assert not verdict.ok
    assert verdict.name == "stage transfer"
    assert verdict.where == "hidden, rank 1 to 3"
    assert verdict.what == "stage 1 did not receive what stage 0 sent"


def test_mixed_rows_are_found() -> None:
    mixed = torch.cat([full()[:2], full()[2:] + 1])
    verdict = transfer(RIGHT, {**RIGHT, "residual": mixed})
    assert not verdict.ok
    assert verdict.where == "residual, rank 1 to 3"


@pytest.mark.parametrize("lost", ["hidden", "residual"])
def test_a_key_that_did_not_arrive_is_named(lost: str) -> None:
    verdict = transfer(RIGHT, {key: value for key, value in RIGHT.items() if key != lost})
    assert not verdict.ok
    assert verdict.where == f"{lost}, rank 1 to 3"


def test_a_key_that_was_not_sent_is_named() -> None:
    verdict = transfer(RIGHT, {**RIGHT, "extra": full()})
    assert not verdict.ok
    assert verdict.where == "extra, rank 1 to 3"


def test_the_stage_that_lost_something_is_named() -> None:
    column = [
        {"stage.0.send.h": Tap(full())},
        {"stage.1.recv.h": Tap(full()), "stage.1.send.h": Tap(full() + 1)},
        {"stage.2.recv.h": Tap(full())},
    ]
    verdict = same_across_stages(Topology.parse("pp3"), column)
    assert not verdict.ok
    assert verdict.what == "stage 2 did not receive what stage 1 sent"
    assert verdict.where == "h, rank 1 to 2"


def test_one_stage_has_nothing_to_hand_over() -> None:
    assert same_across_stages(Topology.parse("tp2"), captured("tap", full(), full())).ok
