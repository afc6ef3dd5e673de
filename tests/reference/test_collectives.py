"""The collectives against results written by hand, and identities between them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference import collectives as c
from reference.collectives import Array


def ranks(*values: object, dtype: str = "int64") -> list[Array]:
    return [np.array(value, dtype=dtype) for value in values]


def plain(results: list[Array]) -> list[object]:
    return [x.tolist() for x in results]


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("sum", [9, 14]),
        ("product", [12, 54]),
        ("min", [1, 2]),
        ("max", [6, 9]),
        ("band", [0, 0]),
        ("bor", [7, 11]),
        ("bxor", [5, 8]),
    ],
)
def test_all_reduce(op: str, expected: list[int]) -> None:
    inputs = ranks([1, 2], [2, 3], [6, 9])
    assert plain(c.all_reduce(inputs, op)) == [expected] * 3
    assert plain(c.reduce(inputs, 1, op)) == [[1, 2], expected, [6, 9]]


def test_avg_and_dtype() -> None:
    [first, _] = c.all_reduce(ranks([1, 2], [2, 4], dtype="float32"), "avg")
    assert first.tolist() == [1.5, 3.0] and first.dtype == np.float32
    [wrapped, _] = c.all_reduce(ranks([200], [100], dtype="uint8"), "sum")
    assert wrapped.tolist() == [44] and wrapped.dtype == np.uint8
    scalar = c.all_reduce(ranks(1.0, 2.0, dtype="float16"), "sum")
    assert scalar[0].shape == () and scalar[0].dtype == np.float16
    assert (
        plain(c.all_reduce(ranks([True, False], [True, True], dtype="bool"), "band"))
        == [[True, False]] * 2
    )


def test_broadcast() -> None:
    assert plain(c.broadcast(ranks([1], [2], [3]), 2)) == [[3], [3], [3]]


def test_gathers_keep_rank_order_and_uneven_rows() -> None:
    inputs = ranks([[1, 2]], [[3, 4], [5, 6]])
    full = [[1, 2], [3, 4], [5, 6]]
    assert plain(c.all_gather(inputs)) == [full, full]
    assert plain(c.gather(inputs, 1)) == [[], full]
    assert c.gather(inputs, 1)[0].shape == (0, 2)


def test_scatter() -> None:
    inputs = ranks([0, 0, 0], [1, 2, 3], [0, 0, 0])
    assert plain(c.scatter(inputs, 1)) == [[1], [2], [3]]
    assert plain(c.scatter(inputs, 1, [0, 2, 1])) == [[], [1, 2], [3]]


def test_reduce_scatter() -> None:
    inputs = ranks([1, 2, 3, 4], [10, 20, 30, 40])
    assert plain(c.reduce_scatter(inputs)) == [[11, 22], [33, 44]]
    assert plain(c.reduce_scatter(inputs, "max", [3, 1])) == [[10, 20, 30], [40]]


def test_all_to_all_transposes() -> None:
    inputs = [ranks([1], [2, 3]), ranks([4, 5, 6], [])]
    assert [plain(row) for row in c.all_to_all(inputs)] == [[[1], [4, 5, 6]], [[2, 3], []]]


def test_all_to_all_single() -> None:
    inputs = ranks([1, 2], [3, 4])
    assert plain(c.all_to_all_single(inputs)) == [[1, 3], [2, 4]]
    inputs = ranks([1, 2, 3], [4])
    assert plain(c.all_to_all_single(inputs, [[1, 2], [0, 1]])) == [[1], [2, 3, 4]]


def test_results_share_no_storage() -> None:
    inputs = ranks([1, 2], [3, 4])
    for results in (
        c.all_reduce(inputs),
        c.reduce(inputs, 0),
        c.broadcast(inputs, 0),
        c.all_gather(inputs),
        c.scatter(inputs, 0),
        c.reduce_scatter(inputs),
        c.all_to_all_single(inputs),
    ):
        for x in results:
            x += 100
    assert plain(inputs) == [[1, 2], [3, 4]]
    first, second = c.all_gather(inputs)
    first += 1
    assert second.tolist() == [1, 2, 3, 4]


@given(world=st.integers(1, 5), rows=st.integers(0, 3), seed=st.integers(0, 2**32 - 1))
def test_identities(world: int, rows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    full = [rng.integers(-99, 99, (world * rows, 2)) for _ in range(world)]
    gathered = c.all_gather(c.reduce_scatter(full))
    assert plain(gathered) == plain(c.all_reduce(full))
    assert plain(c.all_to_all_single(c.all_to_all_single(full))) == plain(full)
    splits = rng.integers(0, 4, (world, world)).tolist()
    uneven = [rng.integers(0, 99, (sum(row), 2)) for row in splits]
    there = c.all_to_all_single(uneven, splits)
    back = c.all_to_all_single(there, np.transpose(splits).tolist())
    assert plain(back) == plain(uneven)
    root = int(rng.integers(world))
    assert plain(c.scatter(c.gather(full, root), root)) == plain(full)
    assert plain(c.broadcast(c.reduce(full, root), root)) == plain(c.all_reduce(full))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: c.all_reduce(ranks([1], [1, 2])), r"agree in shape and dtype: int64\[1\], int64"),
        (lambda: c.all_reduce(ranks([1], [2]), "mean"), "unknown reduce op 'mean'; use one of sum"),
        (lambda: c.all_reduce(ranks([1], [2]), "avg"), "avg needs a floating-point dtype"),
        (lambda: c.all_reduce(ranks([1.0], dtype="float32"), "bxor"), "bxor needs an integer"),
        (lambda: c.broadcast(ranks([1], [2]), 2), r"root 2 is not a rank of 0\.\.1"),
        (lambda: c.all_gather(ranks([[1]], [[1, 2]])), "agree in dtype and in all dims but"),
        (lambda: c.all_gather(ranks(1, 2)), "must have rows"),
        (lambda: c.reduce_scatter(ranks([1], [2])), "1 rows do not divide by 2 ranks; pass"),
        (
            lambda: c.reduce_scatter(ranks([1], [2]), sizes=[1, 1]),
            r"\[1, 1\] must be 2 .* sum to 1",
        ),
        (lambda: c.all_to_all([ranks([1])] * 2), "rank 0 passes 1 arrays; 2 ranks want 2"),
        (lambda: c.all_to_all_single(ranks([1], [2]), [[1, 0]]), "splits has 1 rows; 2 ranks"),
    ],
)
def test_misuse_is_one_clear_line(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]
