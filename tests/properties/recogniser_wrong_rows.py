"""Examples for the recogniser: rows that are wrong, each with a right twin."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.properties.captures import with_rows
from tests.properties.recogniser_examples import (
    BOTTOM,
    HALVES,
    NAN,
    PAD,
    PARTIAL,
    REPLICATE,
    TOP,
    ZERO,
    Example,
    X,
    expecting,
    is_a,
)

# What is wrong, and values almost like it that are right: they hold the placement named last.
WRONG_ROWS: dict[str, tuple[Example, Sequence[Tensor], str]] = {
    "zero rows": (
        Example(
            [X, with_rows(X, [0, 2], 0.0)],
            is_a(
                "missing",
                "rows [0, 2] are zero: they were dropped",
                "replicate",
                rows=(0, 2),
                ranks=(1,),
            ),
        ),
        [X, X],
        "replicate",
    ),
    "a zero shard": (
        Example(
            [TOP, TOP * 0],
            is_a(
                "missing",
                "rows [2, 3] are zero: they were dropped",
                "shard",
                rows=(2, 3),
                ranks=(1,),
            ),
        ),
        [TOP, BOTTOM],
        "shard",
    ),
    "zeros on a rank that should have the value": (
        Example(
            [X, ZERO],
            is_a(
                "missing",
                "rows [0, 1, 2, 3] are zero: they were dropped",
                "replicate",
                rows=(0, 1, 2, 3),
                ranks=(1,),
            ),
            options=expecting(REPLICATE),
        ),
        [X, X],
        "replicate",
    ),
    "a row too few": (
        Example(
            [X[[0, 2, 3]]] * 2,
            is_a("missing", "rows [1] are missing", "replicate", rows=(1,), ranks=(0, 1)),
        ),
        [X[[0, 1, 2, 3]]] * 2,
        "replicate",
    ),
    "shards with a row too few": (
        Example(
            [X[:2], X[3:]],
            is_a("missing", "rows [2] are missing", "shard", rows=(2,), ranks=(1,)),
        ),
        [X[:2], X[2:]],
        "shard",
    ),
    "a row twice": (
        Example(
            [X[[0, 0, 2, 3]]] * 2,
            is_a(
                "duplicated",
                "rows [1] hold the values of rows [0]",
                "replicate",
                rows=(1,),
                origins=(0,),
                ranks=(0, 1),
            ),
        ),
        [X[[0, 1, 2, 3]]] * 2,
        "replicate",
    ),
    "the same shard twice": (
        Example(
            [TOP, TOP],
            is_a(
                "duplicated",
                "rows [2, 3] hold the values of rows [0, 1]",
                "shard",
                rows=(2, 3),
                origins=(0, 1),
                ranks=(1,),
            ),
        ),
        [TOP, BOTTOM],
        "shard",
    ),
    "gathered twice": (
        Example(
            [torch.cat([X, X])] * 2,
            is_a(
                "duplicated",
                "rows [4, 5, 6, 7] repeat rows [0, 1, 2, 3]",
                "replicate",
                rows=(4, 5, 6, 7),
                origins=(0, 1, 2, 3),
                ranks=(0, 1),
            ),
        ),
        [X] * 2,
        "replicate",
    ),
    "swapped rows": (
        Example(
            [X[[1, 0, 2, 3]]] * 2,
            is_a(
                "swapped",
                "rows [0, 1] hold the values of rows [1, 0]",
                "replicate",
                rows=(0, 1),
                origins=(1, 0),
                ranks=(0, 1),
            ),
        ),
        [X] * 2,
        "replicate",
    ),
    "shards in the wrong order": (
        Example(
            [BOTTOM, TOP],
            is_a(
                "swapped",
                "rows [0, 1, 2, 3] hold the values of rows [2, 3, 0, 1]",
                "shard",
                rows=(0, 1, 2, 3),
                origins=(2, 3, 0, 1),
                ranks=(0, 1),
            ),
        ),
        [TOP, BOTTOM],
        "shard",
    ),
    "swapped rows of partial sums": (
        Example(
            [X[[1, 0, 2, 3]] / 2] * 2,
            is_a(
                "swapped",
                "rows [0, 1] hold the values of rows [1, 0]",
                "partial",
                rows=(0, 1),
                origins=(1, 0),
                ranks=(0, 1),
            ),
            options=expecting(PARTIAL),
        ),
        [X / 2] * 2,
        "partial",
    ),
    "padding inside": (
        Example(
            [torch.cat([X[:1], PAD, X[1:3]])] * 2,
            is_a(
                "padding",
                "rows [1] are padding inside: the last 1 rows were pushed out",
                "replicate",
                rows=(1,),
                ranks=(0, 1),
            ),
        ),
        [torch.cat([X[:1], X[1:3], X[3:]])] * 2,
        "replicate",
    ),
    "padding inside, too many rows": (
        Example(
            [torch.cat([X[:2], PAD, X[2:], PAD])] * 2,
            is_a(
                "padding", "rows [2, 5] are padding inside", "replicate", rows=(2, 5), ranks=(0, 1)
            ),
        ),
        [torch.cat([X[:2], X[2:]])] * 2,
        "replicate",
    ),
    "padding left": (
        Example(
            [torch.cat([X, PAD])] * 2,
            is_a(
                "padding",
                "rows [4] are padding that was not cut off",
                "replicate",
                rows=(4,),
                ranks=(0, 1),
            ),
        ),
        [torch.cat([X, PAD])[:4]] * 2,
        "replicate",
    ),
    "not a number": (
        Example(
            [X, with_rows(X, [2], NAN)],
            is_a(
                "not finite",
                "rows [2] are not finite: uninitialised or padding rows leaked in",
                "replicate",
                rows=(2,),
                ranks=(1,),
            ),
        ),
        [X, X],
        "replicate",
    ),
    "not a number in a shard": (
        Example(
            [TOP, BOTTOM * NAN],
            is_a(
                "not finite",
                "rows [2, 3] are not finite: uninitialised or padding rows leaked in",
                "shard",
                rows=(2, 3),
                ranks=(1,),
            ),
        ),
        [TOP, BOTTOM],
        "shard",
    ),
    "wrong rows": (
        Example(
            [X, with_rows(X, [0, 2], 7.5)],
            is_a(
                "unknown", "only rows [0, 2] of 4 are wrong", "replicate", rows=(0, 2), ranks=(1,)
            ),
        ),
        [X, X],
        "replicate",
    ),
    "a row that several rows are like": (
        Example(
            [HALVES[[1, 1, 2, 3]]] * 2,
            is_a("unknown", "only rows [0] of 4 are wrong", "replicate", rows=(0,), ranks=(0, 1)),
            HALVES,
        ),
        [HALVES[[2, 1, 2, 3]]] * 2,
        "replicate",
    ),
}
