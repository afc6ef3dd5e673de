"""The synthetic load: mixed, the same for the same seed, within its limits."""

from __future__ import annotations

import pytest

from model.tiny import TinyM3
from rankfold.deployment.load import mixed_load
from rankfold.errors import UsageError

TINY = TinyM3(attention="model")


def test_lengths_are_mixed_and_tell() -> None:
    load = mixed_load(32, 8, TINY, 0)
    lengths = [len(request.prompt) for request in load]
    kept = TINY.sparse_topk_blocks * TINY.sparse_block_size
    assert len(load) == 32 and len(set(lengths)) > 10
    # One token, a block not full, and more blocks than sparse attention keeps.
    assert 1 in lengths and any(n % TINY.sparse_block_size for n in lengths)
    assert sum(n > kept for n in lengths) >= 4
    assert {request.decode for request in load} >= {1, 8}
    assert all(0 <= token < TINY.vocab_size for request in load for token in request.prompt)


def test_the_seed_decides() -> None:
    assert mixed_load(9, 4, TINY, 1) == mixed_load(9, 4, TINY, 1)
    assert mixed_load(9, 4, TINY, 1) != mixed_load(9, 4, TINY, 2)


def test_all_may_decode_alike() -> None:
    assert {request.decode for request in mixed_load(9, 4, TINY, 0, even=True)} == {4}
    assert {request.decode for request in mixed_load(9, 0, TINY, 0)} == {0}


@pytest.mark.parametrize(("count", "decode"), [(0, 1), (257, 1), (1, -1), (1, 65)])
def test_limits_are_said(count: int, decode: int) -> None:
    with pytest.raises(UsageError, match="use"):
        mixed_load(count, decode, TINY, 0)
