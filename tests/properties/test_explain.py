"""What wrong values look like, each beside values that look almost so and are something else."""

from __future__ import annotations

import pytest
import torch

from properties.explain import explain
from properties.placement import Placement
from tests.properties.captures import full, with_rows

BOUND = 1e-9
REPLICATE, PARTIAL, SHARD = Placement(), Placement("partial"), Placement("shard")
NAN, INF = float("nan"), float("inf")

TOP, BOTTOM = full()[:2], full()[2:]
SWAPPED = full()[[1, 0, 2, 3]]

DIAGNOSES = {
    "a missing gather": (
        [TOP, BOTTOM],
        REPLICATE,
        "looks like Shard(tokens, tp): a gather is missing",
    ),
    "a missing gather of partial sums": (
        [TOP, BOTTOM],
        PARTIAL,
        "looks like Shard(tokens, tp): a gather is missing",
    ),
    "a shape of its own": ([full(3) + 1] * 2, REPLICATE, "has shape [3, 3] instead of [4, 3]"),
    "the first rows on every rank": (
        [full()[:2]] * 2,
        REPLICATE,
        "rows [2, 3] are missing on every rank",
    ),
    "rows of a table cut over ranks": (
        [with_rows(full(), [0, 2], 0.0), with_rows(full(), [1, 3], 0.0)],
        REPLICATE,
        "looks like Partial(tp): a reduction over tp is missing",
    ),
    "shards set into zeros": (
        [with_rows(full(), [2, 3], 0.0), with_rows(full(), [0, 1], 0.0)],
        REPLICATE,
        "rows [2, 3] are zero: they were dropped",
    ),
    "equal parts": ([full() / 2] * 2, REPLICATE, "is 0.5 x the full value"),
    "features for tokens": ([full().T] * 2, REPLICATE, "has shape [3, 4] instead of [4, 3]"),
    "several shapes": ([full(), full(3)], REPLICATE, "the ranks' shapes differ: [[3, 3], [4, 3]]"),
    "several shapes, one not finite": (
        [full(4) * NAN, full(3)],
        REPLICATE,
        "the ranks' shapes differ: [[3, 3], [4, 3]]",
    ),
    "not a number": (
        [with_rows(full(), [1, 3], NAN), full()],
        REPLICATE,
        "rows [1, 3] are not finite: uninitialised or padding rows leaked in",
    ),
    "infinite": ([with_rows(full(), [2], INF), full()], REPLICATE, "rows [2] are not finite"),
    "infinite in one part": (
        [full() * 0, with_rows(full(), [2], -INF)],
        PARTIAL,
        "rows [2] are not finite",
    ),
    "full already": (
        [full(), full()],
        PARTIAL,
        "every rank of tp has the full value already: the sum counts it 2 times",
    ),
    "a missing reduction": (
        [full() / 4, full() * 3 / 4],
        REPLICATE,
        "looks like Partial(tp): a reduction over tp is missing",
    ),
    "reduced twice": (
        [2 * full()] * 2,
        REPLICATE,
        "is 2 x the full value: summed over tp once too often",
    ),
    "reduced twice at four ranks": (
        [4 * full()] * 4,
        REPLICATE,
        "is 4 x the full value: summed over tp once too often",
    ),
    "partial sums of twice the value": (
        [full(), full() / 2, full() / 2],
        PARTIAL,
        "is 2 x the full value: summed over tp once too often",
    ),
    "shards of twice the value": (
        [2 * TOP, 2 * BOTTOM],
        SHARD,
        "is 2 x the full value: summed over tp once too often",
    ),
    "never sharded": (
        [full()] * 2,
        SHARD,
        "every rank of tp has all tokens: it was never sharded, or gathered too early",
    ),
    "a missing reduce-scatter": (
        [full() / 4, full() * 3 / 4],
        SHARD,
        "looks like Partial(tp) of all tokens: a reduce-scatter is missing",
    ),
    "a shard of too many rows": (
        [full(3)] * 2,
        SHARD,
        "every rank has shape [3, 3] where a shard of 4 tokens has 2 rows",
    ),
    "dropped rows": (
        [with_rows(full(), [0, 2], 0.0), full()],
        REPLICATE,
        "rows [0, 2] are zero: they were dropped",
    ),
    "rows of others": (
        [SWAPPED, full()],
        REPLICATE,
        "rows [0, 1] hold the values of rows [1, 0]",
    ),
    "shards in the wrong order": (
        [BOTTOM, TOP],
        SHARD,
        "rows [0, 1, 2, 3] hold the values of rows [2, 3, 0, 1]",
    ),
    "wrong rows": (
        [with_rows(full(), [0, 2], 7.5), full()],
        REPLICATE,
        "only rows [0, 2] of 4 are wrong",
    ),
    "rows wrong and rows dropped": (
        [with_rows(with_rows(full(), [0], 7.5), [2], 0.0), full()],
        REPLICATE,
        "only rows [0, 2] of 4 are wrong",
    ),
    "nothing known": ([full() ** 2 + 0.5, full()], REPLICATE, "no simple relation"),
    "almost twice": ([1.9 * full()] * 2, REPLICATE, "is 1.9 x the full value"),
    "divided": ([full() / 3] * 2, REPLICATE, "is 0.3333 x the full value"),
    "three times at two ranks": ([3 * full()] * 2, REPLICATE, "is 3 x the full value"),
    "twice at one rank": ([2 * full()], REPLICATE, "is 2 x the full value"),
    "parts that do not add up": (
        [full() / 4, full() * 3 / 5],
        REPLICATE,
        "no simple relation",
    ),
}


@pytest.mark.parametrize("name", DIAGNOSES)
def test_wrong_values_are_explained(name: str) -> None:
    local, placement, expected = DIAGNOSES[name]
    text = explain(local, full(), BOUND, placement)
    assert text.startswith(expected)
    assert "\n" not in text


@pytest.mark.parametrize("axis", ["tp", "ep", "dp"])
def test_the_axis_is_named(axis: str) -> None:
    values = [full(), full()]
    assert f"rank of {axis} " in explain(values, full(), BOUND, Placement("partial", axis))


@pytest.mark.parametrize("worst", [0, 1, 2])
def test_the_worst_rank_is_looked_at(worst: int) -> None:
    local = [with_rows(full(), [rank], 0.0) for rank in range(3)]
    assert explain(local, full(), BOUND, REPLICATE, worst).startswith(f"rows [{worst}] are zero")


@pytest.mark.parametrize("placement", [REPLICATE, PARTIAL, SHARD], ids=str)
def test_a_single_row_is_explained_too(placement: Placement) -> None:
    truth = full(1)
    text = explain([truth * 2, truth * 2], truth, BOUND, placement)
    times = 4 if placement is PARTIAL else 2
    assert (f"{times} x" in text) == (times == 2)
    assert "gather" not in text


def test_a_value_of_one_dim_is_explained_too() -> None:
    truth = torch.arange(1.0, 5.0, dtype=torch.float64)
    assert explain([truth.flip(0)], truth, BOUND, REPLICATE).endswith("[3, 2, 1, 0]")


def test_zeros_in_the_truth_are_no_diagnosis() -> None:
    truth = with_rows(full(), [1], 0.0)
    text = explain([with_rows(truth, [2], 7.5)] * 2, truth, BOUND, REPLICATE)
    assert text == "only rows [2] of 4 are wrong"


def test_a_wrong_shape_is_told_also_where_the_rest_of_the_sum_is_known() -> None:
    shards = [full()[:2], full()[2:] + 1]
    why = explain(shards, full(), BOUND, Placement(), parts={"part": full()})
    assert why.startswith("looks like Shard(tokens, tp): a gather is missing")
