"""Sparse attention: against loops over tokens, heads and blocks, and by its own identities."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from reference import EXACT, Batch, M3Config, forward
from reference.sparse import seen, select
from tests.reference.subject import Subject, random_batch, random_weights, tiny_config

INDEX = "layers.0.self_attn.index_"
LENGTHS = [(1,), (3, 4, 5), (0, 30, 1, 0, 17)]


@pytest.mark.parametrize("seq_lens", LENGTHS)
@pytest.mark.parametrize(
    ("block", "topk", "init", "local"),
    [(4, 3, 1, 1), (1, 5, 0, 2), (3, 4, 2, 0), (5, 1, 0, 0), (4, 2, 1, 1), (64, 3, 1, 1)],
)
def test_agrees_with_loops_in_float64(
    seq_lens: tuple[int, ...], block: int, topk: int, init: int, local: int
) -> None:
    config = tiny_config(
        "dm",
        "ss",
        sparse_block_size=block,
        sparse_topk_blocks=topk,
        sparse_init_block=init,
        sparse_local_block=local,
    )
    weights, batch = random_weights(config), random_batch(config, seq_lens)
    taps = forward(config, weights, batch).taps
    second = Subject(config=config, weights=weights, dtype=torch.float64, ranks=2)(batch)
    assert set(taps) == set(second)
    for name, value in second.items():
        torch.testing.assert_close(taps[name], value, rtol=0, atol=1e-12, msg=name)


def test_sparse_and_dense_layers_mix() -> None:
    config = tiny_config("dmm", ".s.")
    weights, batch = random_weights(config), random_batch(config, (21,))
    taps = forward(config, weights, batch).taps
    assert [name for name in taps if "blocks" in name] == ["layers.1.blocks_chosen"]
    assert taps["layers.1.blocks_chosen"].shape == (21, 4, 3)
    assert taps["layers.1.blocks_chosen"].dtype == torch.int64
    second = Subject(config=config, weights=weights, dtype=torch.float64)(batch)
    torch.testing.assert_close(taps["logprobs"], second["logprobs"], rtol=0, atol=1e-12)


def hand_made(scores: list[float], **changes: int) -> tuple[M3Config, dict[str, Tensor], Tensor]:
    """A layer of which index head 0 scores token s with a rising function of `scores[s]`, and
    head 1 with the opposite; positions must all be 0."""
    config = tiny_config(
        "d",
        "s",
        hidden_size=2,
        head_dim=2,
        partial_rotary_factor=1.0,
        num_key_value_heads=2,
        sparse_num_index_heads=2,
        sparse_index_dim=2,
        sparse_block_size=2,
        **changes,
    )
    weights = {k: torch.zeros_like(v) for k, v in random_weights(config).items()}
    # The query looks along feature 0 whatever the token: its second feature is what it reads.
    weights[INDEX + "q_proj.weight"] = torch.tensor([[0.0, 1.0], [0, 0], [0, -1.0], [0, 0]])
    weights[INDEX + "k_proj.weight"] = torch.eye(2)
    x = torch.stack([torch.tensor(scores), torch.ones(len(scores))], dim=-1)[None]
    return config, {k: v.double() for k, v in weights.items()}, x.double()


def test_selection_by_hand() -> None:
    # Blocks (9 0) (1 2) (8 0) (7 3) (0 0); key k of a score is k / sqrt(k^2 + 1), times sqrt 2.
    scores = [9.0, 0.0, 1.0, 2.0, 8.0, 0.0, 7.0, 3.0, 0.0, 0.0]
    config, weights, x = hand_made(scores, sparse_topk_blocks=3)
    zero = torch.zeros(10, dtype=torch.int64)
    found = select(config, weights, 0, x, zero, (10,), None, lambda _: 0.0, EXACT)
    assert found.chosen[:, 0].tolist() == [
        [0, -1, -1],
        [0, -1, -1],
        [0, 1, -1],
        [0, 1, -1],
        [0, 1, 2],
        [0, 1, 2],
        [0, 2, 3],  # block 1 scores least
        [0, 2, 3],
        [0, 2, 4],  # its own although it scores least of all, then 8 over 7 and 2
        [0, 2, 4],
    ]
    # Head 1 takes the least: 0s in blocks 0, 2, 4 (max -0), 1 in block 1 (-1), 3 in block 3.
    assert found.chosen[8, 1].tolist() == [0, 2, 4]
    assert found.chosen[6, 1].tolist() == [0, 2, 3]
    assert found.chosen[7, 1].tolist() == [0, 2, 3]


def test_forced_blocks_count_and_are_counted_from_the_querys_own() -> None:
    scores = [0.0, 0.0, 9.0, 9.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    settings = {"sparse_topk_blocks": 4, "sparse_init_block": 1, "sparse_local_block": 2}
    config, weights, x = hand_made(scores, **settings)
    zero = torch.zeros(10, dtype=torch.int64)
    found = select(config, weights, 0, x, zero, (10,), None, lambda _: 0.0, EXACT)
    assert found.chosen[9, 0].tolist() == [0, 1, 3, 4]
    assert found.chosen[7, 0].tolist() == [0, 1, 2, 3]
    unforced = dataclasses.replace(config, sparse_init_blocks=0, sparse_local_blocks=0)
    found = select(unforced, weights, 0, x, zero, (10,), None, lambda _: 0.0, EXACT)
    # All but block 1 are equal: the first ones come first.
    assert found.chosen[9, 0].tolist() == [0, 1, 2, 3]


def test_a_later_token_of_the_own_block_does_not_lift_it() -> None:
    scores = [5.0, 5.0, 0.0, 9.0]
    config, weights, x = hand_made(
        scores, sparse_topk_blocks=1, sparse_init_block=0, sparse_local_block=0
    )
    zero = torch.zeros(4, dtype=torch.int64)
    found = select(config, weights, 0, x, zero, (4,), None, lambda _: 0.0, EXACT)
    assert found.chosen[:, 0, 0].tolist() == [0, 0, 0, 1]


def test_seen_by_hand() -> None:
    chosen = torch.tensor([[[0, -1]], [[0, -1]], [[0, 1]], [[1, -1]], [[0, 2]]])  # one head
    assert seen(chosen, 2).int().tolist() == [
        [
            [1, 0, 0, 0, 0],
            [1, 1, 0, 0, 0],
            [1, 1, 1, 0, 0],
            [0, 0, 1, 1, 0],
            [1, 1, 0, 0, 1],
        ]
    ]


@pytest.mark.parametrize("seq_lens", [(12,), (5, 12, 1)])
def test_with_room_for_all_blocks_it_is_dense_attention_to_the_bit(
    seq_lens: tuple[int, ...],
) -> None:
    sparse = tiny_config("dm", "ss")
    dense = dataclasses.replace(sparse, sparse_layers=())
    weights = random_weights(sparse)
    plain = {name: value for name, value in weights.items() if "index" not in name}
    batch = random_batch(sparse, seq_lens)  # three blocks of 4 at most
    taps = forward(sparse, weights, batch).taps
    for name, tap in forward(dense, plain, batch).taps.items():
        assert torch.equal(taps[name], tap), name


def test_dropping_blocks_changes_just_the_rows_that_have_more() -> None:
    config = tiny_config("d", "s")
    dense = dataclasses.replace(config, sparse_layers=())
    weights, batch = random_weights(config), random_batch(config, (30,))
    plain = {name: value for name, value in weights.items() if "index" not in name}
    differs = (
        (
            forward(config, weights, batch).taps["layers.0.attn"]
            - forward(dense, plain, batch).taps["layers.0.attn"]
        )
        .abs()
        .amax(-1)
    )
    assert torch.equal(differs[:12], torch.zeros(12, dtype=torch.float64))
    assert float(differs[12:].min()) > 1e-3


@pytest.mark.parametrize("length", [1, 7, 12, 13, 22, 29])
def test_rows_do_not_depend_on_later_tokens(length: int) -> None:
    """So the rows of a whole run are those of its prefill in chunks and of its decode steps."""
    config = tiny_config("dmm", "s.s")
    weights, batch = random_weights(config), random_batch(config, (30,))
    whole = forward(config, weights, batch)
    part = forward(config, weights, prefix(batch, length))
    for name, tap in part.taps.items():
        torch.testing.assert_close(whole.taps[name][:length], tap, rtol=0, atol=1e-12, msg=name)


def prefix(batch: Batch, length: int) -> Batch:
    return Batch(
        token_ids=batch.token_ids[:length], positions=batch.positions[:length], seq_lens=(length,)
    )


def test_rows_do_not_depend_on_other_sequences() -> None:
    config = tiny_config("dm", "ss")
    weights, batch = random_weights(config), random_batch(config, (18, 26))
    tail = Batch(token_ids=batch.token_ids[18:], positions=batch.positions[18:], seq_lens=(26,))
    together, alone = (forward(config, weights, b).taps for b in (batch, tail))
    for name, tap in alone.items():
        torch.testing.assert_close(together[name][18:], tap, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("seq_lens", [(), (0,), (0, 0)])
def test_no_tokens(seq_lens: tuple[int, ...]) -> None:
    config = tiny_config("dm", "ss")
    empty = torch.zeros(0, dtype=torch.int64)
    batch = Batch(token_ids=empty, positions=empty, seq_lens=seq_lens)
    result = forward(config, random_weights(config), batch, selection={0: empty.reshape(0, 4, 3)})
    assert result.taps["layers.1.blocks_chosen"].shape == (0, 4, 3)
    assert result.selection_rejected == ()
