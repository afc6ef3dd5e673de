"""Taps against the reference: right ones pass, wrong ones are named with ranks, rows and why."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from properties import PlacementError, TapVerdict, compare_taps
from sim import Topology
from tests.properties.captures import Tap, captured, full, with_rows

BOUND = 1e-6
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def judge(
    *values: torch.Tensor | None,
    truth: torch.Tensor | None = None,
    declared: str = "replicate",
    topology: str = "tp2",
    bound: float = BOUND,
) -> TapVerdict:
    """The verdict on one tap with these values on the ranks."""
    taps = captured("tap", *values, declared=declared)
    truths = {"tap": full() if truth is None else truth}
    [verdict] = compare_taps(Topology.parse(topology), taps, truths, {"tap": bound})
    assert verdict.name == "tap"
    assert verdict.bound == bound
    assert verdict.ok == (verdict.max_abs_err <= bound)
    assert bool(verdict.why) == bool(verdict.where) == (not verdict.ok)
    assert "\n" not in verdict.why + verdict.where
    return verdict


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 4])
def test_right_values_hold(rows: int, dtype: torch.dtype) -> None:
    truth = full(rows)
    verdict = judge(truth.to(dtype), truth.to(dtype), truth=truth)
    assert verdict.ok
    assert verdict.expected == "Replicate"
    assert verdict.max_abs_err == 0


@pytest.mark.parametrize("axis", ["tp", "ep"])
@pytest.mark.parametrize("rows", [0, 1, 4])
def test_partial_sums_hold_when_their_sum_does(rows: int, axis: str) -> None:
    part = full(rows) / 4
    verdict = judge(part, full(rows) - part, truth=full(rows), declared=f"partial:{axis}")
    assert verdict.ok
    assert verdict.expected == f"Partial({axis})"


@given(st.floats(0, 1))
def test_the_bound_is_the_border(error: float) -> None:
    values = full()
    values[2, 1] += error
    verdict = judge(full(), values, bound=0.5)
    assert verdict.max_abs_err == pytest.approx(error, abs=1e-12)
    assert verdict.ok == (error <= 0.5)


def test_the_wrong_rank_and_its_rows_are_named() -> None:
    verdict = judge(full(), full(), with_rows(full(), [1, 3], 0.25), full(), topology="tp4")
    assert not verdict.ok
    assert verdict.where == "rank 2, rows 1, 3 of 4"
    assert verdict.why == "only rows [1, 3] of 4 are wrong"
    assert verdict.max_abs_err == 11.75


def test_the_worst_of_several_wrong_ranks_is_named() -> None:
    verdict = judge(full() + 0.1, full() + 0.2)
    assert verdict.where.startswith("rank 1,")
    assert verdict.max_abs_err == pytest.approx(0.2)


def test_many_wrong_rows_are_not_all_listed() -> None:
    verdict = judge(full(20) + 1, full(20), truth=full(20))
    assert verdict.where == "rank 0, rows 0, 1, 2, 3, 4, 5, 6, 7, ... of 20"


def test_a_wrong_group_of_partial_sums_is_named() -> None:
    half = full() / 2
    values = [half, half, half, with_rows(half, [2], 0.0)]
    verdict = judge(*values, declared="partial:tp", topology="tp2pp2")
    assert verdict.where == "the sum over ranks [2, 3], rows 2 of 4"
    assert verdict.why == "only rows [2] of 4 are wrong"


def test_a_missing_reduction_is_recognised_from_the_other_ranks() -> None:
    verdict = judge(full() / 4, full() * 3 / 4)
    assert verdict.why == "looks like Partial(tp): a reduction over tp is missing"


def test_values_declared_partial_that_are_full_already() -> None:
    verdict = judge(full(), full(), declared="partial:tp")
    assert "full value already" in verdict.why
    assert verdict.max_abs_err == float(full().max())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_infinitely_wrong(value: float) -> None:
    verdict = judge(full(), with_rows(full(), [3], value))
    assert verdict.max_abs_err == math.inf
    assert verdict.where == "rank 1, rows 3 of 4"
    assert "not finite" in verdict.why


def test_a_wrong_shape_is_infinitely_wrong() -> None:
    verdict = judge(full(), full(5))
    assert verdict.max_abs_err == math.inf
    assert verdict.where == "rank 1"
    assert verdict.why == "the ranks' shapes differ: [[4, 3], [5, 3]]"


def test_a_single_row_is_not_broadcast() -> None:
    same = torch.ones(4, 3, dtype=torch.float64)
    verdict = judge(same, same[:1], truth=same)
    assert not verdict.ok
    assert verdict.max_abs_err == math.inf


def test_shards_for_a_full_value() -> None:
    verdict = judge(full()[:2], full()[2:])
    assert verdict.why == "looks like Shard(tokens, tp): a gather is missing"


@pytest.mark.parametrize("rows", [0, 1, 4, 5])
def test_shards_hold_whatever_their_padding_is(rows: int) -> None:
    padded = torch.cat([full(rows), torch.full((rows % 2, 3), math.nan)])
    top, bottom = padded.tensor_split(2)
    verdict = judge(top, bottom, truth=full(rows), declared="shard:tp")
    assert verdict.ok
    assert verdict.expected == "Shard(tokens, tp)"


def test_a_wrong_row_of_a_shard_is_named_by_its_place_in_the_whole() -> None:
    verdict = judge(full()[:2], with_rows(full()[2:], [1], 0.0), declared="shard:tp")
    assert verdict.where == "the shards of ranks [0, 1], rows 3 of 4"
    assert verdict.why == "rows [3] are zero: they were dropped"


def test_partial_sums_of_several_shapes() -> None:
    verdict = judge(full(), full(3), declared="partial:tp")
    assert verdict.max_abs_err == math.inf
    assert verdict.where == "ranks [0, 1]"


def test_two_ranks_that_are_wrong_in_two_ways() -> None:
    verdict = judge(with_rows(full(), [0], math.nan), full(3))
    assert verdict.max_abs_err == math.inf
    assert verdict.where.startswith("rank 0")


def test_a_partial_value_that_part_of_a_group_lacks() -> None:
    verdict = judge(full(), None, declared="partial:tp")
    assert verdict.max_abs_err == math.inf
    assert "ranks [0] of [0, 1]" in verdict.why


def test_a_right_group_does_not_hide_that_another_lacks_the_value() -> None:
    half = full() / 2
    verdict = judge(half, half, half, None, declared="partial:tp", topology="tp2pp2")
    assert "ranks [2] of [2, 3]" in verdict.why


def test_the_group_whose_shapes_are_wrong_is_explained() -> None:
    half = full() / 2
    verdict = judge(half, half, full(3), full(3), declared="partial:tp", topology="tp2pp2")
    assert "[3, 3]" in verdict.why


def test_ranks_of_another_stage_need_not_have_the_tap() -> None:
    assert judge(None, None, full(), full(), topology="tp2pp2").ok
    assert judge(None, None, full() / 2, full() / 2, topology="tp2pp2", declared="partial:tp").ok


def test_ranks_that_declare_different_placements() -> None:
    taps = [{"tap": Tap(full(), "replicate")}, {"tap": Tap(full(), "partial:tp")}]
    [verdict] = compare_taps(Topology.parse("tp2"), taps, {"tap": full()}, {"tap": BOUND})
    assert not verdict.ok
    assert verdict.why == "the ranks declare different placements"
    assert {"Replicate", "Partial(tp)"} == set(verdict.expected.split(" or "))


def test_a_declaration_that_means_nothing_is_an_error() -> None:
    with pytest.raises(PlacementError, match="banana"):
        judge(full(), full(), declared="banana")


def test_verdicts_come_in_the_references_order() -> None:
    truth = {"b": full(), "a": full() + 1, "unseen": full()}
    taps = [{"a": Tap(full()), "not in the reference": Tap(full()), "b": Tap(full())}] * 2
    bounds = dict.fromkeys(truth, BOUND)
    verdicts = compare_taps(Topology.parse("tp2"), taps, truth, bounds)
    assert [(v.name, v.ok) for v in verdicts] == [("b", True), ("a", False), ("unseen", False)]
    assert verdicts[-1].why == "no rank has it: the module it is taken from did not run"
