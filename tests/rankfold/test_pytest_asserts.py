"""The assertions of `rankfold.testing`: each fails wrong values and passes their right twins."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rankfold.testing import (
    assert_conserved,
    assert_ledger,
    assert_placed,
    assert_same,
    axis_group,
    rounding_bound,
)
from rankfold.testing.strategies import token_counts, topologies
from sim import RankContext, Topology, World

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TERMS = [X * 0.25 + torch.randn(5, 4, dtype=torch.float64) for _ in range(4)]
TERMS[0] += X - torch.stack(TERMS).sum(0)
PADDED = [*torch.cat([X, torch.zeros(3, 4)]).chunk(4)]

RIGHT: dict[str, tuple[Sequence[Tensor], str]] = {
    "replicated": ([X] * 4, "Replicate"),
    "replicated over a named axis": ([X] * 4, "Replicate(ep)"),
    "rounded": ([X.float()] * 4, "Replicate"),
    "summed": (TERMS, "Partial(tp)"),
    "sharded by token, padded": (PADDED, "Shard(tokens, tp)"),
    "sharded by token, unevenly": ([*X.split([2, 1, 2, 0])], "Shard(tokens, tp)"),
    "sharded by feature": ([*X.chunk(4, -1)], "Shard(features, tp)"),
}
WRONG: dict[str, tuple[Sequence[Tensor], str, str]] = {
    "summed twice": ([4 * X] * 4, "Replicate", "is 4 x the full value"),
    "never summed": (TERMS, "Replicate", "a reduction over tp is missing"),
    "summed already": ([X] * 4, "Partial(tp)", "every rank of tp has the full value already"),
    "never gathered": (PADDED, "Replicate", "looks like Shard(tokens, tp): a gather is missing"),
    "gathered already": ([X] * 4, "Shard(tokens, tp)", "every rank of tp has all tokens"),
    "another dim": (PADDED, "Shard(features, tp)", "looks like Shard(tokens, tp)"),
    "other features": ([*X.flip(-1).chunk(4, -1)], "Shard(features, tp)", "come in blocks"),
    "one rank": ([X, X, X + 1, X], "Replicate", "wrong on rank 2"),
    "not finite": ([X, X, X * torch.nan, X], "Replicate", "wrong on rank 2"),
    "swapped": (
        [X[[1, 0, 2, 3, 4]]] * 4,
        "Replicate",
        "rows [0, 1] hold the values of rows [1, 0]",
    ),
    "rounded to less": ([X.bfloat16().double()] * 4, "Replicate", "the full value"),
}


@pytest.mark.parametrize("case", RIGHT)
def test_right_values_are_placed(case: str) -> None:
    local, placement = RIGHT[case]
    assert_placed(local, X, placement)


@pytest.mark.parametrize("case", WRONG)
def test_wrong_values_are_not(case: str) -> None:
    local, placement, why = WRONG[case]
    with pytest.raises(AssertionError) as caught:
        assert_placed(local, X, placement, name="y")
    said = str(caught.value)
    assert said.startswith(f"y is not {placement}: ")
    assert why in said
    assert len(said.splitlines()) == 3


def test_each_group_of_a_topology_is_judged() -> None:
    assert_placed([TERMS[0], X - TERMS[0]] * 2, X, "Partial(tp)", topology="tp2pp2")
    with pytest.raises(AssertionError, match=r"where: tp\[2, 3\]"):
        assert_placed([TERMS[0], X - TERMS[0], X, X], X, "Partial(tp)", topology="tp2pp2")


def test_ranks_without_a_value_are_passed_over_but_not_within_a_group() -> None:
    assert_placed([None, None, X, X], X, "Replicate", topology="tp2pp2")
    with pytest.raises(AssertionError, match=r"on ranks \[0\] of tp\[0, 1\], and the others"):
        assert_placed([X, None, X, X], X, "Replicate", topology="tp2pp2")


def test_values_that_only_round_otherwise_are_called_rounding() -> None:
    """Also where no dtype's half of the digits is reached, nothing worse is claimed."""
    near = [(X * (1 + 1e-5)).float()] * 4
    with pytest.raises(AssertionError, match="rounding\\? Then compute the truth in float64"):
        assert_placed(near, X, "Replicate")
    assert_placed(near, X, "Replicate", bound=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inner", [4, 16, 512])
def test_the_derived_bound_holds_for_sums_of_random_terms(dtype: torch.dtype, inner: int) -> None:
    """And is far below what one rank's part too many would change."""
    generator = torch.Generator().manual_seed(inner)
    for _ in range(20):
        x, w = (torch.randn(9, inner, generator=generator).to(dtype) for _ in range(2))
        truth = x.double() @ w.double().T
        parts = [a @ b.T for a, b in zip(x.chunk(4, -1), w.chunk(4, -1), strict=True)]
        assert_placed(parts, truth, "Partial(tp)", terms=inner)
        assert_placed([torch.stack(parts).sum(0)] * 4, truth, "Replicate", terms=inner)
        assert rounding_bound(truth, dtype, terms=inner, ranks=4) < 0.05 * float(truth.abs().max())
        for wrong in ([*parts[:3], parts[3] * 2], [*parts[:3], parts[3] * 0]):
            with pytest.raises(AssertionError):
                assert_placed(wrong, truth, "Partial(tp)", terms=inner)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"placement": "Sharded(tp)"}, "'Sharded(tp)' is no placement; use Replicate, Partial(tp)"),
        ({"placement": "Shard(tp)"}, "is no placement"),
        ({"placement": "Partial"}, "is no placement"),
        ({"placement": "Replicate", "topology": "tp4"}, "tp4 has 4 ranks, and 2 values were given"),
        ({"placement": "Partial(cp)", "topology": "tp2"}, "no axis 'cp'; use tp, pp, dp, ep"),
        ({"placement": "Replicate", "local": [None, None]}, "no rank has a value"),
        ({"placement": "Replicate", "bound": 9.0}, "no less than the values themselves"),
        ({"placement": "Replicate", "bound": float("nan")}, "use 0 or a positive number"),
    ],
)
def test_a_bad_argument_is_told(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        assert_placed(**{"local": [X, X], "truth": X, **arguments})  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_same_bits() -> None:
    assert_same([X, X.clone(), X * 2, X * 2], topology="tp2pp2")
    assert_same([X, X * 2, X, X * 2], axis="pp", topology="tp2pp2")
    with pytest.raises(AssertionError, match=r"tp\[0, 1\]: ranks \[1\] against ranks \[0\]"):
        assert_same([X, X * 2, X, X * 2], topology="tp2pp2")
    with pytest.raises(AssertionError, match="float32"):
        assert_same([X, X.float()])
    with pytest.raises(AssertionError, match="missing on ranks"):
        assert_same([X, None])
    with pytest.raises(AssertionError, match="another one on every rank of tp"):
        assert_same([X, X * 2, X * 3])
    last = X.clone()
    last[4, 3] = torch.nextafter(last[4, 3], last[4, 3] + 1)
    with pytest.raises(AssertionError, match="rows 4 of 5 differ"):
        assert_same([X, X, last])


def test_rows_are_conserved() -> None:
    assert_conserved(X, [X[2:], X[:2]])
    assert_conserved(X, PADDED, padding=True)
    assert_conserved(X, torch.cat([X, X.flip(0)]), copies=2)
    assert_conserved([X[:0], X], [X, X[:0]])


@pytest.mark.parametrize(
    ("after", "options", "message"),
    [
        ([X[:3], X[2:]], {}, "0 lost, 1 too many"),
        ([X[:3], X[4:]], {}, "lost: row 3"),
        (PADDED, {}, "too many: row 1 of rank 3 (3 instead of 0)"),
        (torch.cat([X, X[:4]]), {"copies": 2}, "lost: row 4 (1 of 2)"),
        (torch.cat([X, X + 1]), {"padding": True}, "0 lost, 5 too many"),
        (X.float(), {}, "5 lost, 5 too many"),
    ],
)
def test_rows_that_are_not(
    after: Tensor | Sequence[Tensor], options: dict[str, int], message: str
) -> None:
    with pytest.raises(AssertionError) as caught:
        assert_conserved(X, after, **options)  # type: ignore[arg-type]
    assert message in str(caught.value)


def traffic(ctx: RankContext) -> None:
    """One all-reduce and one gather over TP, and a message from the first stage."""
    group, x = axis_group(ctx, "tp"), torch.ones(4, 2) * ctx.rank
    dist.all_reduce(x, group=group)
    dist.all_gather([torch.empty_like(x) for _ in range(2)], x, group=group)
    if ctx.rank < 2:
        dist.send(x, ctx.rank + 2)
    else:
        dist.recv(x, ctx.rank - 2)


HOLDS: list[dict[str, object]] = [
    {"group": "tp", "all_reduce": 1, "all_gather": 1},
    {"group": "tp", "order": ["all_reduce", "all_gather"]},
    {"ranks": [0, 1], "all_reduce": 1, "all_gather": 1, "send": 1},
    {"ranks": [2], "all_reduce": 1, "all_gather": 1, "recv": 1},
    {"group": "pp"},
    {"group": "tp", "all_reduce": 1, "all_gather": 1, "bytes": 256},
]
FAILS: list[tuple[dict[str, object], str]] = [
    ({"group": "tp", "all_reduce": 1}, "the ledger of tp is not as expected on ranks 0-3"),
    ({"group": "tp", "all_reduce": 2, "all_gather": 1}, "all_reduce         2          1"),
    ({"all_reduce": 1, "all_gather": 1}, "recv               0           0           1"),
    ({"group": "tp", "order": ["all_gather", "all_reduce"]}, "has another order on rank 0"),
    ({"group": "pp", "send": 1}, "nothing happened there; the ledger has groups"),
    ({"group": "tp", "all_reduce": 1, "all_gather": 1, "bytes": 1}, "bytes, expected 1"),
]


@pytest.fixture(scope="module")
def driven() -> World:
    with World("tp2pp2") as world:
        world.run(traffic)
        return world


@pytest.mark.parametrize("wanted", HOLDS, ids=str)
def test_a_ledger_as_expected(driven: World, wanted: dict[str, object]) -> None:
    assert_ledger(driven, **wanted)  # type: ignore[arg-type]


@pytest.mark.parametrize(("wanted", "message"), FAILS, ids=str)
def test_a_ledger_that_is_not(driven: World, wanted: dict[str, object], message: str) -> None:
    with pytest.raises(AssertionError) as caught:
        assert_ledger(driven, **wanted)  # type: ignore[arg-type]
    said = str(caught.value)
    assert message in said
    assert "test_pytest_asserts.py:" in said or "nothing happened" in said


def test_a_long_ledger_is_cut() -> None:
    def program(ctx: RankContext) -> None:
        for _ in range(40):
            dist.barrier()

    with World("tp2") as world:
        world.run(program)
        with pytest.raises(AssertionError) as caught:
            assert_ledger(world, barrier=1)
    lines = str(caught.value).splitlines()
    assert lines[-1] == "    ... and 28 more"
    assert len(lines) < 20


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"group": "tpp"}, "no group 'tpp'; the ledger has default_pg, tp"),
        ({"ranks": [4]}, "ranks [4]: the world has ranks 0 to 3"),
        ({"order": [], "send": 1}, "give an order or counts"),
    ],
)
def test_a_ledger_question_that_means_nothing(
    driven: World, wanted: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError) as caught:
        assert_ledger(driven, **wanted)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_a_group_along_no_axis_is_told() -> None:
    with World("tp2") as world, pytest.raises(Exception, match="no axis 'cp'; use tp, pp, dp, ep"):
        world.run(axis_group, "cp")


@given(topologies(max_ranks=8, axes=("tp", "pp", "dp"), ep=True))
def test_topologies_are_drawn_within_their_limits(topology: Topology) -> None:
    assert 2 <= topology.world_size <= 8
    assert Topology.parse(topology.word) == topology


@given(
    topologies(axes=("tp",), max_ranks=4).flatmap(lambda t: st.tuples(st.just(t), token_counts(t)))
)
def test_token_counts_are_those_around_the_degree(drawn: tuple[Topology, int]) -> None:
    topology, tokens = drawn
    primes = {2: {3, 5, 7}, 4: {5, 7, 11}}[topology.tp]
    size = topology.tp
    assert tokens in {0, 1, size - 1, size, size + 1, 2 * size} | primes


@pytest.mark.parametrize(
    "make",
    [
        lambda: topologies(axes=("cp",)),
        lambda: topologies(min_ranks=9),
        lambda: token_counts(0),
    ],
)
def test_a_strategy_of_nothing_is_told(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError):
        make()
