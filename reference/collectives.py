"""What each collective computes, as pure functions over the values of all ranks at once.

Argument and result are lists by rank: entry r is what rank r passes in, or holds afterwards.
Inputs are never changed and results never share storage with them. Rows means dim 0.
Reductions run in rank order in the array's own dtype, so float results are one legal order of
summation and integer results wrap as the dtype does.

Legend: x_r input of rank r, y_r result of rank r, R ranks, (+) the reduce op, ++ concatenation
along dim 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce as fold
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_OPS: dict[str, Callable[[Array, Array], Array]] = {
    "sum": np.add,
    "avg": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


def all_reduce(inputs: Sequence[Array], op: str = "sum") -> list[Array]:
    """y_r = x_0 (+) x_1 (+) ... (+) x_{R-1}, the same on every rank.

    op: sum, avg (sum / R; floats only), product, min, max, band, bor, bxor (bitwise; integers
    and bool only). All inputs agree in shape and dtype, which the result keeps.
    """
    result = _reduced(inputs, op)
    return [result.copy() for _ in inputs]


def reduce(inputs: Sequence[Array], root: int, op: str = "sum") -> list[Array]:
    """y_root = x_0 (+) ... (+) x_{R-1}; y_r = x_r elsewhere.

    c10d leaves the buffers of the other ranks unspecified; here they are as they were.
    """
    _check_root(inputs, root)
    return [_reduced(inputs, op) if r == root else x.copy() for r, x in enumerate(inputs)]


def broadcast(inputs: Sequence[Array], root: int) -> list[Array]:
    """y_r = x_root. All inputs agree in shape and dtype."""
    _check_root(inputs, root)
    _check_alike(inputs)
    return [inputs[root].copy() for _ in inputs]


def all_gather(inputs: Sequence[Array]) -> list[Array]:
    """y_r = x_0 ++ x_1 ++ ... ++ x_{R-1}; numbers of rows may differ by rank."""
    return [_joined(inputs) for _ in inputs]


def gather(inputs: Sequence[Array], root: int) -> list[Array]:
    """y_root = x_0 ++ ... ++ x_{R-1}; y_r has no rows elsewhere. Row counts may differ."""
    _check_root(inputs, root)
    full = _joined(inputs)
    return [full.copy() if r == root else full[:0].copy() for r in range(len(inputs))]


def scatter(inputs: Sequence[Array], root: int, sizes: Sequence[int] | None = None) -> list[Array]:
    """y_r = chunk r of x_root, where x_root = chunk 0 ++ ... ++ chunk R-1.

    sizes: rows of each chunk; left out, the rows divide evenly by R.
    """
    _check_root(inputs, root)
    return _chunks(inputs[root], sizes, len(inputs))


def reduce_scatter(
    inputs: Sequence[Array], op: str = "sum", sizes: Sequence[int] | None = None
) -> list[Array]:
    """y_r = chunk r of (x_0 (+) ... (+) x_{R-1}); every x_r is full.

    sizes: rows of each chunk; left out, the rows divide evenly by R. op as in `all_reduce`.
    """
    return _chunks(_reduced(inputs, op), sizes, len(inputs))


def all_to_all(inputs: Sequence[Sequence[Array]]) -> list[list[Array]]:
    """y_r[s] = x_s[r]: entry s of rank r's list goes to rank s, and lands at entry r there."""
    ranks = len(inputs)
    for r, row in enumerate(inputs):
        if len(row) != ranks:
            raise ValueError(f"rank {r} passes {len(row)} arrays; {ranks} ranks want {ranks}")
    return [[inputs[s][r].copy() for s in range(ranks)] for r in range(ranks)]


def all_to_all_single(
    inputs: Sequence[Array], splits: Sequence[Sequence[int]] | None = None
) -> list[Array]:
    """y_r = x_0[chunk r] ++ x_1[chunk r] ++ ... ++ x_{R-1}[chunk r].

    splits[r][s]: rows that rank r sends to rank s (column r is what rank r receives); left
    out, each input's rows divide evenly by R.
    """
    ranks = len(inputs)
    if splits is not None and len(splits) != ranks:
        raise ValueError(f"splits has {len(splits)} rows; {ranks} ranks want {ranks}")
    sent = [_chunks(x, None if splits is None else splits[r], ranks) for r, x in enumerate(inputs)]
    return [_joined(received) for received in all_to_all(sent)]


def _reduced(inputs: Sequence[Array], op: str) -> Array:
    _check_alike(inputs)
    dtype = inputs[0].dtype
    if op not in _OPS:
        raise ValueError(f"unknown reduce op {op!r}; use one of {', '.join(_OPS)}")
    if op == "avg" and dtype.kind != "f":
        raise ValueError(f"avg needs a floating-point dtype, not {dtype}")
    if op in ("band", "bor", "bxor") and dtype.kind not in "iub":
        raise ValueError(f"{op} needs an integer or bool dtype, not {dtype}")
    result = np.array(fold(_OPS[op], inputs), dtype=dtype)
    return result / dtype.type(len(inputs)) if op == "avg" else result


def _joined(inputs: Sequence[Array]) -> Array:
    if len({(x.shape[1:], x.dtype) for x in inputs}) != 1 or not inputs[0].ndim:
        raise ValueError(
            "inputs must have rows, and agree in dtype and in all dims but the first: "
            + ", ".join(f"{x.dtype}{list(x.shape)}" for x in inputs)
        )
    return np.concatenate(inputs, axis=0)


def _chunks(x: Array, sizes: Sequence[int] | None, ranks: int) -> list[Array]:
    if sizes is None:
        if x.shape[0] % ranks:
            raise ValueError(f"{x.shape[0]} rows do not divide by {ranks} ranks; pass the sizes")
        sizes = [x.shape[0] // ranks] * ranks
    if len(sizes) != ranks or min(sizes) < 0 or sum(sizes) != x.shape[0]:
        raise ValueError(
            f"sizes {list(sizes)} must be {ranks} non-negative numbers that sum to {x.shape[0]}"
        )
    ends = np.cumsum(sizes)
    return [x[end - n : end].copy() for n, end in zip(sizes, ends, strict=True)]


def _check_alike(inputs: Sequence[Array]) -> None:
    if len({(x.shape, x.dtype) for x in inputs}) != 1:
        raise ValueError(
            "inputs must agree in shape and dtype: "
            + ", ".join(f"{x.dtype}{list(x.shape)}" for x in inputs)
        )


def _check_root(inputs: Sequence[Array], root: int) -> None:
    if not 0 <= root < len(inputs):
        raise ValueError(f"root {root} is not a rank of 0..{len(inputs) - 1}")
