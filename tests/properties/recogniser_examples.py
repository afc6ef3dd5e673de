"""Examples for the recogniser: what is asked, and the answer; right and ambiguous ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from properties import Placement, Recognised
from tests.properties.captures import full, with_rows

BOUND = 1e-9
NAN = float("nan")
X = full()  # [4, 3]
ZERO = X * 0
TOP, BOTTOM = X[:2], X[2:]
PAD = torch.zeros(1, 3, dtype=torch.float64)
OTHER = full(4) + 100
ROWS_OF_ZERO = with_rows(X, [0, 2], 0.0)
HALVES = torch.cat([TOP, TOP])
REPLICATE, PARTIAL, SHARD = Placement(), Placement("partial"), Placement("shard")
TEXTS = {
    "replicate": "Replicate",
    "shard": "Shard(tokens, tp)",
    "features": "Shard(features, tp)",
    "partial": "Partial(tp)",
}


def is_a(kind: str, text: str = "", placement: str | None = None, **fields: Any) -> Recognised:
    """A finding, `off` left out; a placement's own text and placement may be left out."""
    placement = kind if placement is None else placement
    return Recognised(kind=kind, axis="tp", text=text or TEXTS[kind], placement=placement, **fields)


@dataclass(frozen=True)
class Example:
    """What is asked about a full value, and what the answer should be."""

    local: Sequence[Tensor]
    want: Recognised
    truth: Tensor = field(default_factory=lambda: X)
    options: Mapping[str, Any] = field(default_factory=dict)


def expecting(placement: Placement, **options: Any) -> dict[str, Any]:
    return {"expected": placement, **options}


PLACED = {
    "one rank": Example([X], is_a("replicate")),
    "every rank has it": Example([X, X], is_a("replicate")),
    "shards": Example([TOP, BOTTOM], is_a("shard")),
    "shards in an uneven split": Example([X[:3], X[3:]], is_a("shard")),
    "a rank without rows": Example([X, X[:0]], is_a("shard")),
    "shards with padding": Example([X[:2], torch.cat([X[2:3], PAD])], is_a("shard"), truth=X[:3]),
    "shards with padding that is NaN": Example(
        [X[:2], torch.cat([X[2:3], PAD * NAN])], is_a("shard"), truth=X[:3]
    ),
    "features": Example([X[:, :2], X[:, 2:]], is_a("features")),
    "partial sums": Example([X / 4, X * 3 / 4], is_a("partial")),
    "partial sums, one of zeros": Example([ZERO, X], is_a("partial")),
    "partial sums that cancel": Example([X, -X], is_a("partial"), truth=ZERO),
    "fewer tokens than ranks": Example([X[:1], X[1:2], PAD, PAD], is_a("shard"), truth=X[:2]),
    "fewer tokens than ranks, no padding": Example(
        [X[:1], X[1:2], X[:0], X[:0]], is_a("shard"), truth=X[:2]
    ),
    "a reference with padding rows": Example([X] * 2, is_a("replicate"), options={"tokens": 3}),
    "a reference and values with padding rows": Example(
        [with_rows(X, [3], NAN)] * 2, is_a("replicate"), options={"tokens": 3}
    ),
    "shards of a reference with padding rows": Example(
        [TOP, with_rows(BOTTOM, [0, 1], NAN)], is_a("shard"), options={"tokens": 2}
    ),
}

AMBIGUOUS = {
    "no tokens": Example([X[:0]] * 2, is_a("replicate"), X[:0]),
    "no tokens, partial": Example([X[:0]] * 2, is_a("partial"), X[:0], expecting(PARTIAL)),
    "no tokens, shards": Example([X[:0]] * 2, is_a("shard"), X[:0], expecting(SHARD)),
    "zeros": Example([ZERO] * 2, is_a("replicate"), ZERO),
    "zeros, replicated": Example([ZERO] * 2, is_a("replicate"), ZERO, expecting(REPLICATE)),
    "zeros, partial": Example([ZERO] * 2, is_a("partial"), ZERO, expecting(PARTIAL)),
    "zeros, shards": Example([ZERO[:2]] * 2, is_a("shard"), ZERO, expecting(SHARD)),
    "zeros by feature": Example([ZERO[:, :1], ZERO[:, 1:]], is_a("features"), ZERO),
    "equal halves": Example([TOP, TOP], is_a("shard"), HALVES),
    "equal halves, replicated": Example([HALVES] * 2, is_a("replicate"), HALVES),
    "one row": Example([X[:1]] * 2, is_a("replicate"), X[:1]),
    "one row, a shard": Example([X[:1], PAD], is_a("shard"), X[:1]),
    "one row, partial": Example([X[:1], PAD], is_a("partial"), X[:1], expecting(PARTIAL)),
    "one row, partial sums": Example([X[:1] / 4, X[:1] * 3 / 4], is_a("partial"), X[:1]),
    "one column": Example([X[:, :1]] * 2, is_a("replicate"), X[:, :1]),
    "one column, shards": Example([TOP[:, :1], BOTTOM[:, :1]], is_a("shard"), X[:, :1]),
    "one column, features": Example([X[:, :1], X[:, :0]], is_a("features"), X[:, :1]),
    "zero rows in the truth": Example([ROWS_OF_ZERO] * 2, is_a("replicate"), ROWS_OF_ZERO),
    "a shard of zeros": Example([TOP, TOP * 0], is_a("shard"), torch.cat([TOP, TOP * 0])),
    "padding at the end": Example(
        [torch.cat([X[:3], PAD])] * 2, is_a("replicate"), options={"tokens": 3}
    ),
    "one rank, partial": Example([X], is_a("partial"), X, expecting(PARTIAL)),
    "one rank, a shard": Example([X], is_a("shard"), X, expecting(SHARD)),
    "one dim": Example([X[:2, 0], X[2:, 0]], is_a("shard"), X[:, 0]),
    "rounded to bfloat16": Example(
        [(X / 3).bfloat16()] * 2, is_a("replicate"), X / 3, {"bound": 4 * 2**-8}
    ),
    "rounded partial sums": Example(
        [(X / 3).bfloat16(), (X / 7).bfloat16()], is_a("partial"), X * 10 / 21, {"bound": 0.02}
    ),
}
