"""Examples for the recogniser: whole values that are wrong, each with a right twin."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.properties.captures import full
from tests.properties.recogniser_examples import (
    BOTTOM,
    BOUND,
    HALVES,
    OTHER,
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
WRONG_VALUES: dict[str, tuple[Example, Sequence[Tensor], str]] = {
    "reduced twice": (
        Example([2 * X] * 2, is_a("replicate", "2 x the full value", times=2, ranks=(0, 1))),
        [X] * 2,
        "replicate",
    ),
    "reduced twice on one rank": (
        Example([X, 2 * X], is_a("replicate", "2 x the full value", times=2, ranks=(1,))),
        [X, X],
        "replicate",
    ),
    "twice the shards": (
        Example(
            [2 * TOP, 2 * BOTTOM],
            is_a("shard", "2 x Shard(tokens, tp)", times=2, ranks=(0, 1)),
        ),
        [TOP, BOTTOM],
        "shard",
    ),
    "twice the shards of equal halves": (
        Example(
            [2 * TOP] * 2,
            is_a("shard", "2 x Shard(tokens, tp)", times=2, ranks=(0, 1)),
            HALVES,
        ),
        [TOP] * 2,
        "shard",
    ),
    "three times the features": (
        Example(
            [3 * X[:, :1], 3 * X[:, 1:2], 3 * X[:, 2:]],
            is_a("features", "3 x Shard(features, tp)", times=3, ranks=(0, 1, 2)),
        ),
        [X[:, :1], X[:, 1:2], X[:, 2:]],
        "features",
    ),
    "partial sums of twice the value": (
        Example(
            [X, X / 2, X / 2],
            is_a("partial", "2 x Partial(tp)", times=2, ranks=(0, 1, 2)),
        ),
        [X / 2, X / 4, X / 4],
        "partial",
    ),
    "full where partial sums are due": (
        Example([X] * 2, is_a("replicate"), options=expecting(PARTIAL)),
        [X / 2] * 2,
        "partial",
    ),
    "the residual and a part of the output": (
        Example(
            [TOP + BOTTOM / 4, TOP + BOTTOM * 3 / 4],
            is_a(
                "unreduced",
                "the residual and each rank's part of a sum over tp",
                "partial",
                source="the residual",
            ),
            TOP + BOTTOM,
            expecting(REPLICATE, parts={"the residual": TOP}),
        ),
        [TOP + BOTTOM] * 2,
        "replicate",
    ),
    "stale": (
        Example(
            [OTHER] * 2,
            is_a(
                "stale",
                "holds Replicate of the earlier tap 'a'",
                "replicate",
                ranks=(0, 1),
                source="a",
            ),
            options={"earlier": {"b": -X, "a": OTHER}},
        ),
        [X] * 2,
        "replicate",
    ),
    "stale partial sums": (
        Example(
            [OTHER / 4, OTHER * 3 / 4],
            is_a(
                "stale",
                "holds Partial(tp) of the earlier tap 'a'",
                "partial",
                ranks=(0, 1),
                source="a",
            ),
            options={"earlier": {"a": OTHER}},
        ),
        [X / 4, X * 3 / 4],
        "partial",
    ),
    "stale on one rank": (
        Example(
            [X, OTHER],
            is_a(
                "stale",
                "rows [0, 1, 2, 3] hold the values of the earlier tap 'a': they are stale",
                "replicate",
                rows=(0, 1, 2, 3),
                ranks=(1,),
                source="a",
            ),
            options={"earlier": {"a": OTHER}},
        ),
        [X, X],
        "replicate",
    ),
    "a stale row": (
        Example(
            [torch.cat([X[:3], OTHER[3:]])] * 2,
            is_a(
                "stale",
                "rows [3] hold the values of the earlier tap 'a': they are stale",
                "replicate",
                rows=(3,),
                ranks=(0, 1),
                source="a",
            ),
            options={"earlier": {"a": OTHER}},
        ),
        [X] * 2,
        "replicate",
    ),
    "another group's value": (
        Example(
            [OTHER] * 2,
            is_a(
                "wrong group", "holds Replicate of dp 1", "replicate", ranks=(0, 1), source="dp 1"
            ),
            options={"others": {"dp 1": OTHER}},
        ),
        [X] * 2,
        "replicate",
    ),
    "another group's value of another length": (
        Example(
            [full(6)] * 2,
            is_a(
                "wrong group", "holds Replicate of dp 1", "replicate", ranks=(0, 1), source="dp 1"
            ),
            options={"others": {"dp 1": full(6)}},
        ),
        [X] * 2,
        "replicate",
    ),
    "another group's rows": (
        Example(
            [TOP, OTHER[:2]],
            is_a(
                "wrong group",
                "rows [2, 3] hold the values of rows [0, 1] of dp 1: the wrong group",
                "shard",
                rows=(2, 3),
                origins=(0, 1),
                ranks=(1,),
                source="dp 1",
            ),
            options={"others": {"dp 1": OTHER}},
        ),
        [TOP, BOTTOM],
        "shard",
    ),
    "almost twice": (
        Example(
            [1.75 * X] * 2,
            is_a(
                "scaled",
                "is 1.75 x the full value",
                "replicate",
                factor=1.75,
                rows=(0, 1, 2, 3),
                ranks=(0, 1),
            ),
        ),
        [X] * 2,
        "replicate",
    ),
    "parts that almost add up": (
        Example(
            [X / 4, X * 5 / 8],
            is_a(
                "unknown",
                "no simple relation to the full value: nearest is Partial(tp), off by 1.5",
                "partial",
                rows=(0, 1, 2, 3),
                ranks=(0, 1),
            ),
        ),
        [X / 4, X * 6 / 8],
        "partial",
    ),
    "noise that adds up to zero": (
        Example(
            [ZERO + 1.5 * BOUND, ZERO - 1.5 * BOUND],
            is_a(
                "unknown",
                "no simple relation to the full value: nearest is Replicate, off by 1.5e-09",
                "replicate",
                rows=(0, 1, 2, 3),
                ranks=(0, 1),
            ),
            ZERO,
            expecting(REPLICATE),
        ),
        [ZERO + 0.5 * BOUND, ZERO - 0.5 * BOUND],
        "replicate",
    ),
    "one row, wrong on a rank": (
        Example(
            [X[:1], X[:1] * 5],
            is_a(
                "unknown",
                "no simple relation to the full value: nearest is Replicate, off by 12",
                "replicate",
                rows=(0,),
                ranks=(1,),
            ),
            X[:1],
            expecting(REPLICATE),
        ),
        [X[:1], X[:1]],
        "replicate",
    ),
    "several shapes": (
        Example(
            [X, full(5)],
            is_a("shapes", "the ranks' shapes differ: [[4, 3], [5, 3]]", ""),
        ),
        [X, X],
        "replicate",
    ),
    "features for tokens": (
        Example([X.T] * 2, is_a("shapes", "has shape [3, 4] instead of [4, 3]", "")),
        [X.T.T] * 2,
        "replicate",
    ),
}
