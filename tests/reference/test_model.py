"""The whole model: against a second implementation, and by its own identities."""

from __future__ import annotations

import pytest
import torch

from reference import Batch, forward
from tests.reference.subject import Subject, random_batch, random_weights, tiny_config


@pytest.mark.parametrize("layers", ["d", "m", "dmmm"])
@pytest.mark.parametrize("seq_lens", [(1,), (5, 3), (0, 7, 1, 0)])
@pytest.mark.parametrize("n_shared_experts", [1, 2])
def test_agrees_with_a_second_implementation_in_float64(
    layers: str, seq_lens: tuple[int, ...], n_shared_experts: int
) -> None:
    config = tiny_config(layers, n_shared_experts=n_shared_experts)
    weights, batch = random_weights(config), random_batch(config, seq_lens)
    taps = forward(config, weights, batch).taps
    second = Subject(config=config, weights=weights, dtype=torch.float64, ranks=2)(batch)
    assert set(taps) == set(second)
    for name, value in second.items():
        torch.testing.assert_close(taps[name], value, rtol=0, atol=1e-12, msg=name)


def test_tap_names_shapes_and_dtypes() -> None:
    config = tiny_config("dm")
    taps = forward(config, random_weights(config), random_batch(config, (3,))).taps
    hidden, vocab = (3, 64), (3, 256)
    expected = {"embed": hidden, "norm": hidden, "logits": vocab, "logprobs": vocab}
    for i in range(2):
        expected |= {f"layers.{i}.{tap}": hidden for tap in ("attn", "residual", "ffn", "stream")}
    expected |= {"layers.1.router": (3, 8), "layers.1.experts_chosen": (3, 2)}
    assert {name: tuple(tap.shape) for name, tap in taps.items()} == expected
    assert taps["layers.1.experts_chosen"].dtype == torch.int64
    assert {t.dtype for n, t in taps.items() if "chosen" not in n} == {torch.float64}


def test_residual_stream_identities() -> None:
    config = tiny_config("dm")
    taps = forward(config, random_weights(config), random_batch(config, (4,))).taps
    stream = taps["embed"]
    for i in range(2):
        assert torch.equal(taps[f"layers.{i}.residual"], stream + taps[f"layers.{i}.attn"])
        stream = taps[f"layers.{i}.residual"] + taps[f"layers.{i}.ffn"]
        assert torch.equal(taps[f"layers.{i}.stream"], stream)
    torch.testing.assert_close(taps["logprobs"].exp().sum(-1), torch.ones(4, dtype=torch.float64))


@pytest.mark.parametrize("seq_lens", [(), (0,), (0, 0)])
def test_no_tokens(seq_lens: tuple[int, ...]) -> None:
    config = tiny_config("dm")
    empty = torch.zeros(0, dtype=torch.int64)
    batch = Batch(token_ids=empty, positions=empty, seq_lens=seq_lens)
    result = forward(config, random_weights(config), batch)
    assert {tap.shape[0] for tap in result.taps.values()} == {0}
    assert result.taps["logprobs"].shape == (0, 256)
    assert result.routing_margin[1].shape == (0,)


def test_rows_of_a_batch_do_not_depend_on_other_sequences() -> None:
    config = tiny_config()
    weights, batch = random_weights(config), random_batch(config, (5, 3))
    tail = Batch(token_ids=batch.token_ids[5:], positions=batch.positions[5:], seq_lens=(3,))
    together = forward(config, weights, batch).taps["logprobs"][5:]
    alone = forward(config, weights, tail).taps["logprobs"]
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-12)


def test_bad_batches_are_one_clear_line() -> None:
    ids = torch.arange(4)
    with pytest.raises(ValueError, match=r"seq_lens \(3,\) must be .* sum to .* \(4\)"):
        Batch(token_ids=ids, positions=ids, seq_lens=(3,))
    with pytest.raises(ValueError, match="must be non-negative"):
        Batch(token_ids=ids, positions=ids, seq_lens=(5, -1))
    with pytest.raises(ValueError, match="positions must be a 1-d int64 tensor, not"):
        Batch(token_ids=ids, positions=ids.int(), seq_lens=(4,))
    config = tiny_config("d")
    batch = Batch(token_ids=ids + 253, positions=ids, seq_lens=(4,))
    with pytest.raises(ValueError, match=r"token_ids must lie in 0\.\.255"):
        forward(config, random_weights(config), batch)
