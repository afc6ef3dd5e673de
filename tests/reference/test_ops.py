"""Each building block against another way of computing it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from reference import EXACT, Kind
from reference.attention import attention
from reference.ops import gemma_norm, linear, log_softmax, rope, row_parallel, swiglu_oai
from tests.reference.subject import random_weights, tiny_config


def randn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def test_norm_by_hand() -> None:
    x = torch.tensor([[[3.0, 4.0]]], dtype=torch.float64)  # mean square 12.5
    weight = torch.tensor([1.0, -0.5], dtype=torch.float64)
    expected = [3 / math.sqrt(16) * 2, 4 / math.sqrt(16) * 0.5]
    assert gemma_norm(x, weight, 3.5, EXACT).flatten().tolist() == pytest.approx(expected)


def test_rope_is_complex_multiplication() -> None:
    x, positions = randn(1, 5, 2, 16), torch.tensor([0, 1, 7, 2, 4000])
    angle = positions[:, None, None] * 500.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    z = torch.complex(x[..., :4], x[..., 4:8]) * torch.exp(1j * angle)
    y = rope(x, positions, 8, 500.0, EXACT)
    torch.testing.assert_close(y, torch.cat([z.real, z.imag, x[..., 8:]], -1))
    assert torch.equal(y[:, 0], x[:, 0])  # position 0 turns nothing


def test_rope_scores_depend_on_distance_only() -> None:
    q, k = randn(1, 1, 1, 16, seed=1), randn(1, 1, 1, 16, seed=2)

    def score(q_position: int, k_position: int) -> float:
        turned = [
            rope(x, torch.tensor([p]), 16, 1e4, EXACT)
            for x, p in ((q, q_position), (k, k_position))
        ]
        return float((turned[0] * turned[1]).sum())

    assert score(9, 4) == pytest.approx(score(105, 100))
    assert score(9, 4) != pytest.approx(score(4, 9))


@pytest.mark.parametrize(
    ("gate", "up", "expected"),
    [
        (0.5, 0.25, 0.5 / (1 + math.exp(-1.702 * 0.5)) * 1.25),
        (9.0, 0.0, 7 / (1 + math.exp(-1.702 * 7))),  # gate clamped from above
        (-9.0, 0.0, -9 / (1 + math.exp(1.702 * 9))),  # but not from below
        (1.0, 9.0, 8 / (1 + math.exp(-1.702))),
        (1.0, -9.0, -6 / (1 + math.exp(-1.702))),
    ],
)
def test_swiglu_by_hand(gate: float, up: float, expected: float) -> None:
    g, u = (torch.full((1, 1, 1), v, dtype=torch.float64) for v in (gate, up))
    assert float(swiglu_oai(g, u, 7.0, 1.702, 1.0, EXACT)) == pytest.approx(expected, rel=1e-14)


def test_log_softmax_is_torchs() -> None:
    x = 30 * randn(1, 3, 11)
    torch.testing.assert_close(log_softmax(x, EXACT), x.log_softmax(-1))


def test_row_parallel_squares_are_the_squared_terms() -> None:
    x, weight = randn(1, 2, 3), randn(4, 3, seed=1)
    y, squares = row_parallel(x, weight, EXACT)
    terms = x[0, :, None, :] * weight[None]
    torch.testing.assert_close(y[0], terms.sum(-1))
    torch.testing.assert_close(squares[0], (terms**2).sum(-1))
    torch.testing.assert_close(linear(x, weight, EXACT, Kind.STORED), F.linear(x, weight))


def run_attention(x: Tensor, seq_lens: tuple[int, ...], positions: Tensor | None = None) -> Tensor:
    config = tiny_config("d")
    weights = {k: v.double() for k, v in random_weights(config).items()}
    if positions is None:
        positions = torch.cat([torch.arange(n) for n in seq_lens])
    return attention(config, weights, 0, x[None], positions, seq_lens, None, EXACT)[0]


def test_attention_is_sdpa() -> None:
    config, x = tiny_config("d"), randn(7, 64)
    weights = {k: v.double() for k, v in random_weights(config).items()}
    prefix, positions = "layers.0.self_attn.", torch.arange(7)

    def heads(name: str) -> Tensor:
        y = F.linear(x, weights[f"{prefix}{name}_proj.weight"]).reshape(7, -1, 16)
        if name == "v":
            return y.transpose(0, 1)
        scale = 1 + weights[f"{prefix}{name}_norm.weight"]
        y = F.rms_norm(y, (16,), scale, config.rms_norm_eps)
        return rope(y[None], positions, 8, config.rope_theta, EXACT)[0].transpose(0, 1)

    y = F.scaled_dot_product_attention(
        heads("q"), heads("k"), heads("v"), is_causal=True, enable_gqa=True
    )
    expected = F.linear(y.transpose(0, 1).flatten(1), weights[prefix + "o_proj.weight"])
    torch.testing.assert_close(run_attention(x, (7,)), expected)


def test_attention_is_causal() -> None:
    x = randn(6, 64)
    before = run_attention(x, (6,))
    x[4] += 1.0
    after = run_attention(x, (6,))
    torch.testing.assert_close(after[:4], before[:4], rtol=0, atol=1e-14)
    assert (after[4:] - before[4:]).abs().amax(1).min() > 1e-3


def test_sequences_do_not_see_each_other() -> None:
    x = randn(6, 64)
    together = run_attention(x, (2, 0, 4))
    alone = torch.cat([run_attention(x[:2], (2,)), run_attention(x[2:], (4,))])
    torch.testing.assert_close(together, alone)
    assert (together - run_attention(x, (6,))).abs().max() > 1e-3


def test_positions_are_the_callers() -> None:
    x = randn(4, 64)
    shifted = run_attention(x, (4,), torch.arange(100, 104))
    torch.testing.assert_close(shifted, run_attention(x, (4,)))  # only distances matter
    assert (run_attention(x, (4,), torch.tensor([0, 5, 6, 9])) - shifted).abs().max() > 1e-3
