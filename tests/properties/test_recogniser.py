"""Which placement local values hold, as a table; each wrong one has a right twin beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from properties import Placement, PlacementError, Recognised, recognise
from properties.explain import explain
from properties.recogniser_case import ORDER
from tests.properties.captures import full, with_rows
from tests.properties.recogniser_examples import (
    AMBIGUOUS,
    BOTTOM,
    BOUND,
    NAN,
    PAD,
    PARTIAL,
    PLACED,
    REPLICATE,
    SHARD,
    TOP,
    Example,
    X,
    is_a,
)
from tests.properties.recogniser_wrong_rows import WRONG_ROWS
from tests.properties.recogniser_wrong_sums import WRONG_SUMS
from tests.properties.recogniser_wrong_values import WRONG_VALUES

WRONG = {**WRONG_VALUES, **WRONG_SUMS, **WRONG_ROWS}


def ask(example: Example, local: Sequence[Tensor] | None = None) -> Recognised:
    options = {"bound": BOUND, **example.options}
    return recognise(example.local if local is None else local, example.truth, axis="tp", **options)


TABLE = {
    **PLACED,
    **AMBIGUOUS,
    **{name: example for name, (example, _, _) in WRONG.items()},
}


def test_the_table_has_every_kind_and_forty_cases() -> None:
    kinds = {example.want.kind for example in TABLE.values()}
    assert len(TABLE) == len(PLACED) + len(AMBIGUOUS) + len(WRONG) >= 40
    assert kinds == {
        *ORDER,
        *("unreduced", "not finite", "stale", "wrong group", "missing", "duplicated", "swapped"),
        *("padding", "counted", "mixed", "shards summed", "features swapped", "scaled"),
        *("shapes", "unknown"),
    }


@pytest.mark.parametrize("name", TABLE)
def test_the_values_are_recognised(name: str) -> None:
    example = TABLE[name]
    found = ask(example)
    assert replace(found, off=0.0) == example.want
    assert "\n" not in found.text


@pytest.mark.parametrize("name", WRONG)
def test_the_right_twin_is_recognised(name: str) -> None:
    example, twin, kind = WRONG[name]
    found = ask(example, twin)
    assert replace(found, off=0.0) == is_a(kind)
    assert found.off <= BOUND * len(twin)
    if "expected" not in example.options:
        # It is the values that make the difference, not what is expected of them; one rank's
        # features and others have no placement that could be expected.
        expected = {"replicate": REPLICATE, "partial": PARTIAL, "shard": SHARD}.get(kind)
        asked = replace(example, options={**example.options, "expected": expected})
        assert ask(asked, twin).kind == kind


@pytest.mark.parametrize(
    ("local", "off"),
    [
        ([X, X], 0.0),
        ([X + 2**-31, X], 2**-31),
        ([X, with_rows(X, [3], 0.0)], 12.0),
        ([1.75 * X, X * X], 120.0),
        ([X, with_rows(X, [3], NAN)], float("inf")),
        ([X, full(5)], float("inf")),
    ],
)
def test_it_says_how_far_off_it_is(local: list[Tensor], off: float) -> None:
    assert recognise(local, X, BOUND, axis="tp").off == off


@pytest.mark.parametrize("axis", ["tp", "ep", "dp"])
def test_the_axis_is_named(axis: str) -> None:
    found = recognise([X / 4, X * 3 / 4], X, BOUND, axis=axis)
    assert (found.axis, found.text) == (axis, f"Partial({axis})")


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_rank_asked_for_is_looked_at(rank: int) -> None:
    local = [with_rows(X, [i], 0.0) for i in range(3)]
    found = recognise(local, X, BOUND, axis="tp", rank=rank)
    assert (found.kind, found.rows, found.ranks) == ("missing", (rank,), (0, 1, 2))


def test_a_rank_that_is_right_is_not_looked_at() -> None:
    found = recognise([X, with_rows(X, [1], 0.0)], X, BOUND, axis="tp", rank=0)
    assert (found.kind, found.rows, found.ranks) == ("missing", (1,), (1,))


@pytest.mark.parametrize(
    ("held", "missing", "rank"),
    [(([0, 1], [2]), 3, 1), (([0, 1], [3]), 2, 1), (([0], [2, 3]), 1, 0), (([1], [2, 3]), 0, 0)],
)
def test_a_missing_row_is_its_owners(
    held: tuple[list[int], list[int]], missing: int, rank: int
) -> None:
    found = recognise([X[rows] for rows in held], X, BOUND, axis="tp")
    assert (found.kind, found.rows, found.ranks) == ("missing", (missing,), (rank,))


@pytest.mark.parametrize(
    ("local", "truth", "options", "message"),
    [
        ([], X, {}, "at least one rank"),
        ([X.sum()], X, {}, "needs a value"),
        ([X], X.sum(), {}, "needs a value"),
        ([X], X, {"expected": Placement("partial", "dp")}, "give a placement over tp"),
        ([X], X, {"tokens": 5}, "use 0 to 4"),
        ([X], X, {"tokens": -1}, "use 0 to 4"),
        ([X], X, {"bound": -1.0}, "use 0 or a positive"),
        ([X], X, {"bound": NAN}, "use 0 or a positive"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    local: list[Tensor], truth: Tensor, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        recognise(local, truth, **{"bound": BOUND, "axis": "tp", **options})
    assert "\n" not in str(caught.value)


def test_a_placement_error_is_raised_for_values_that_cannot_be_placed() -> None:
    with pytest.raises(PlacementError, match="at least one rank"):
        recognise([], X, BOUND, axis="tp")


@pytest.mark.parametrize(
    ("local", "placement", "expected"),
    [
        ([2 * TOP, 2 * BOTTOM], REPLICATE, "looks like 2 x Shard(tokens, tp): a gather is missing"),
        (
            [2 * X] * 2,
            PARTIAL,
            "every rank of tp has 2 x the full value already: the sum counts it 4 times",
        ),
        (
            [2 * X] * 2,
            SHARD,
            "every rank of tp has 2 x all tokens: it was never sharded, or gathered too early",
        ),
        (
            [X[:, :2], X[:, :1]],
            REPLICATE,
            "the ranks' shapes differ: [[4, 1], [4, 2]]",
        ),
        (
            [X[:, :2], X[:, 2:]],
            REPLICATE,
            "looks like Shard(features, tp): a gather is missing",
        ),
        (
            [torch.cat([X, PAD])] * 2,
            REPLICATE,
            "has shape [5, 3] instead of [4, 3]; rows [4] are padding that was not cut off",
        ),
        ([X[:3]] * 2, REPLICATE, "rows [3] are missing on every rank"),
        ([X[:3]], REPLICATE, "has shape [3, 3] instead of [4, 3]; rows [3] are missing"),
        (
            [X[:2], X[3:]],
            SHARD,
            "the ranks' shapes differ: [[1, 3], [2, 3]]; rows [2] are missing",
        ),
        (
            [TOP, BOTTOM * NAN],
            REPLICATE,
            "looks like Shard(tokens, tp): a gather is missing; rows [2, 3] are not finite: "
            "uninitialised or padding rows leaked in",
        ),
    ],
)
def test_a_finding_is_put_into_words_against_the_placement_expected(
    local: list[Tensor], placement: Placement, expected: str
) -> None:
    assert explain(local, X, BOUND, placement) == expected


@pytest.mark.parametrize("zero", [0, 1])
def test_a_dropped_single_row_is_not_taken_for_a_sum(zero: int) -> None:
    local = [X[:1], X[:1]]
    local[zero] = PAD
    found = recognise(local, X[:1], BOUND, axis="tp", expected=SHARD)
    assert found.kind == ("missing" if zero == 0 else "shard")
    assert recognise(local, X[:1], BOUND, axis="tp", expected=REPLICATE).kind == "missing"


SEEDS = st.integers(0, 2**32 - 1)
TOKENS, RANKS, FEATURES = st.integers(0, 9), st.integers(2, 5), st.integers(1, 6)


def random_value(seed: int, tokens: int, features: int) -> Tensor:
    """Float64 [tokens, features], no element near zero."""
    chance = torch.Generator().manual_seed(seed)
    value = torch.rand(tokens, features, generator=chance, dtype=torch.float64) + 0.5
    return value * (torch.randint(0, 2, value.shape, generator=chance) * 2 - 1)


def place(value: Tensor, kind: str, ranks: int, seed: int) -> list[Tensor]:
    """Local values that hold this placement of the full value; padding rows hold anything."""
    if kind == "replicate":
        return [value.clone() for _ in range(ranks)]
    if kind == "features":
        return [*torch.tensor_split(value, ranks, dim=-1)]
    if kind == "unpadded":
        return [*torch.tensor_split(value, ranks)]
    if kind == "shard":
        rows = -(-len(value) // ranks)
        padding = random_value(seed + 1, rows * ranks - len(value), value.shape[1])
        return [*torch.cat([value, padding]).view(ranks, rows, value.shape[1])]
    parts = [random_value(seed + 1 + rank, *value.shape) for rank in range(ranks - 1)]
    return [*parts, value - sum(parts, torch.zeros_like(value))]


@given(
    SEEDS,
    TOKENS,
    FEATURES,
    RANKS,
    st.sampled_from([*ORDER, "unpadded"]),
    st.booleans(),
    st.floats(0, 0.99),
)
def test_every_placement_is_recognised_also_with_noise(
    seed: int, tokens: int, features: int, ranks: int, how: str, told: bool, noise: float
) -> None:
    value = random_value(seed, tokens, features)
    kind = "shard" if how == "unpadded" else how
    # Without tokens a value's shape is all there is: only what is expected can be told.
    told = told and kind != "features"
    assume(tokens > 0 or told)
    bound = 1e-6
    local = place(value, how, ranks, seed)
    # The bound of a sum that is expected is the sum's: each part has a share of it.
    size = bound * noise / (ranks if told and kind == "partial" else 1)
    local = [
        part + size * random_value(seed + 9 + i, *part.shape).sign() for i, part in enumerate(local)
    ]
    expected = Placement(kind) if told else None
    found = recognise(local, value, bound, axis="tp", expected=expected)
    assert (found.kind, found.times, found.rows) == (kind, 1, ())
    assert found.off <= bound * ranks


@given(SEEDS, st.integers(2, 6), st.integers(2, 4), st.sampled_from(ORDER), st.integers(2, 5))
def test_every_multiple_up_to_the_ranks_is_recognised(
    seed: int, tokens: int, ranks: int, kind: str, times: int
) -> None:
    assume(times <= ranks)
    value = random_value(seed, tokens, 6)
    local = [times * part for part in place(value, kind, ranks, seed)]
    found = recognise(local, value, 1e-9, axis="tp")
    assert (found.kind, found.times) == (kind, times)


@pytest.mark.parametrize("name", sorted(WRONG))
@settings(max_examples=20)
@given(seed=SEEDS, noise=st.floats(0, 0.2))
def test_noise_below_the_bound_changes_no_answer(name: str, seed: int, noise: float) -> None:
    example, _, _ = WRONG[name]
    # It is zero rows that are said to be dropped: noise on them would be another value.
    local = [
        part + part.ne(0) * noise * BOUND * random_value(seed + i, 1, part.numel()).view(part.shape)
        for i, part in enumerate(example.local)
    ]
    found = ask(example, local)
    assert (found.kind, found.times, found.rows, found.origins, found.ranks, found.source) == (
        *(example.want.kind, example.want.times, example.want.rows, example.want.origins),
        *(example.want.ranks, example.want.source),
    )


@given(SEEDS, st.integers(2, 9), st.integers(2, 4), st.data())
def test_rows_in_any_order_are_named(
    seed: int, tokens: int, ranks: int, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(tokens)))
    value = random_value(seed, tokens, 6)
    found = recognise([value[order]] * ranks, value, 1e-9, axis="tp")
    wrong = tuple(i for i, origin in enumerate(order) if i != origin)
    assert found.kind == ("swapped" if wrong else "replicate")
    assert (found.rows, found.origins) == (wrong, tuple(order[i] for i in wrong))


@pytest.mark.parametrize("placement", [REPLICATE, PARTIAL, SHARD], ids=str)
def test_right_values_cost_little(placement: Placement) -> None:
    value = random_value(0, 8, 64)
    local = [part.float() for part in place(value, placement.kind, 4, 0)]
    times = []
    for _ in range(300):
        start = perf_counter()
        found = recognise(local, value, 1e-5, axis="tp", expected=placement)
        times.append(perf_counter() - start)
        assert found.kind == placement.kind
    # Seen: 50 to 110 us. Ten times that, of the fastest of many: a guard against another order
    # of growth, that a slow or busy machine does not fail.
    assert min(times) < 1e-3
