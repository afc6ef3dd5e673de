"""Batches: positions start anew in each sequence, and a seed says everything."""

import pytest
import torch

from model.batch import Batch


def test_random_batch_is_cut_evenly_with_positions_from_zero() -> None:
    batch = Batch.random(7, 50, seed=3, sequences=3)
    assert batch.tokens == 7
    assert batch.seq_lens == (3, 2, 2)
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 0, 1]
    assert batch.token_ids.dtype == torch.int64
    assert batch.token_ids.min() >= 0 and batch.token_ids.max() < 50


def test_the_seed_decides() -> None:
    first, again = Batch.random(33, 256, seed=1), Batch.random(33, 256, seed=1)
    assert torch.equal(first.token_ids, again.token_ids)
    assert not torch.equal(first.token_ids, Batch.random(33, 256, seed=2).token_ids)


def test_no_tokens_and_more_sequences_than_tokens() -> None:
    assert Batch.random(0, 256, seed=0, sequences=2).seq_lens == (0, 0)
    assert Batch.random(1, 256, seed=0, sequences=3).seq_lens == (1, 0, 0)


def test_bad_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="tokens must be 0 or more"):
        Batch.random(-1, 256, seed=0)
    with pytest.raises(ValueError, match="sequences 1 or more"):
        Batch.random(4, 256, seed=0, sequences=0)
    ids = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"seq_lens \(2,\) must sum to the 3 tokens"):
        Batch(token_ids=ids, positions=ids, seq_lens=(2,))
    with pytest.raises(ValueError, match="must sum to the 3 tokens"):
        Batch(token_ids=ids, positions=ids, seq_lens=(4, -1))
    with pytest.raises(ValueError, match="3 token ids need 3 positions, not 2"):
        Batch(token_ids=ids, positions=ids[:2], seq_lens=(3,))


def test_tokens_go_on_after_their_context() -> None:
    batch = Batch.of([1, 2, 3, 4], (1, 3), (5, 0), (2, 0))
    assert batch.positions.tolist() == [5, 0, 1, 2]
    assert (batch.context_lens, batch.requests) == ((5, 0), (2, 0))
    anew = Batch.of([1, 2, 3, 4], (1, 3))
    assert (anew.context_lens, anew.requests) == ((0, 0), (0, 1))


def test_contexts_and_requests_that_make_no_sense_are_refused() -> None:
    ids = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="1 context_lens for 2 sequences: give one each"):
        Batch(token_ids=ids, positions=ids, seq_lens=(1, 1), context_lens=(3,))
    with pytest.raises(ValueError, match="3 requests for 2 sequences: give one each"):
        Batch.of([0, 0], (1, 1), requests=(0, 1, 2))
    with pytest.raises(ValueError, match=r"context_lens \(-1, 0\): no number may be below 0"):
        Batch(token_ids=ids, positions=ids, seq_lens=(1, 1), context_lens=(-1, 0))
    with pytest.raises(ValueError, match=r"requests \(3, 3\): each may be there once"):
        Batch.of([0, 0], (1, 1), requests=(3, 3))
