"""Examples for the recogniser: sums whose parts are known, each with a right twin."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.properties.recogniser_examples import (
    BOTTOM,
    PARTIAL,
    REPLICATE,
    SHARD,
    TOP,
    Example,
    X,
    expecting,
    is_a,
)

EXPERTS = torch.tensor([3.0, -1.0, 2.0], dtype=torch.float64) * (X * X % 5 + 1)
"""A part of X, in no simple relation to it."""

WIDE = torch.cat([X, EXPERTS[:, :1]], -1)

WRONG_SUMS: dict[str, tuple[Example, Sequence[Tensor], str]] = {
    "a part twice": (
        Example(
            [X + EXPERTS] * 2,
            is_a(
                "counted",
                "has the experts' output 2 times",
                "replicate",
                times=2,
                factor=2.0,
                rows=(0, 1, 2, 3),
                ranks=(0, 1),
                source="the experts' output",
            ),
            options=expecting(REPLICATE, parts={"the experts' output": EXPERTS}),
        ),
        [X] * 2,
        "replicate",
    ),
    "a part missing from two rows": (
        Example(
            [torch.cat([X[:2], X[2:] - EXPERTS[2:]])] * 2,
            is_a(
                "counted",
                "lacks the experts' output",
                "replicate",
                times=0,
                factor=0.0,
                rows=(2, 3),
                ranks=(0, 1),
                source="the experts' output",
            ),
            options=expecting(REPLICATE, parts={"the experts' output": EXPERTS}),
        ),
        [X] * 2,
        "replicate",
    ),
    "a part of other rows": (
        Example(
            [X[:2], X[2:] - EXPERTS[2:] + EXPERTS[:2]],
            is_a(
                "mixed",
                "rows [2, 3] have the experts' output of rows [0, 1]",
                "shard",
                rows=(2, 3),
                origins=(0, 1),
                ranks=(1,),
                source="the experts' output",
            ),
            options=expecting(SHARD, parts={"the experts' output": EXPERTS}),
        ),
        [TOP, BOTTOM],
        "shard",
    ),
    "a rank's own addend": (
        Example(
            [X[:2] - EXPERTS[:2] * 3 / 4, X[2:] - EXPERTS[2:] / 4],
            is_a(
                "unreduced",
                "the experts' output and each rank's part of a sum over tp",
                "partial",
                source="the experts' output",
            ),
            options=expecting(
                SHARD,
                parts={"the experts' output": EXPERTS},
                addends={"the experts' output": [EXPERTS / 4, EXPERTS * 3 / 4]},
            ),
        ),
        [TOP, BOTTOM],
        "shard",
    ),
    "shards added up": (
        Example(
            [TOP + BOTTOM] * 2,
            is_a(
                "shards summed",
                "the shards of the full value were added up over tp, though they are of different "
                "tokens",
                "shard",
                ranks=(0, 1),
            ),
            options=expecting(SHARD),
        ),
        [TOP, BOTTOM],
        "shard",
    ),
    "what does not belong there": (
        Example(
            [X + EXPERTS] * 2,
            is_a(
                "counted",
                "has the residual added",
                "replicate",
                factor=1.0,
                foreign=True,
                rows=(0, 1, 2, 3),
                ranks=(0, 1),
                source="the residual",
            ),
            options=expecting(REPLICATE, parts={"+the residual": EXPERTS}),
        ),
        [X] * 2,
        "replicate",
    ),
    "features in another order": (
        Example(
            [WIDE[:, [2, 3, 0, 1]]] * 2,
            is_a(
                "features swapped",
                "its features come in blocks in the order [1, 0]",
                "replicate",
                rows=(0, 1, 2, 3),
                ranks=(0, 1),
            ),
            WIDE,
        ),
        [WIDE] * 2,
        "replicate",
    ),
    "a part of a sum divided": (
        Example(
            [X / 2 - EXPERTS / 4] * 2,
            is_a(
                "counted",
                "has 0.5 x the experts' output",
                "partial",
                factor=0.5,
                rows=(0, 1, 2, 3),
                ranks=(0, 1),
                source="the experts' output",
            ),
            options=expecting(PARTIAL, parts={"the experts' output": EXPERTS}),
        ),
        [X / 2] * 2,
        "partial",
    ),
}
