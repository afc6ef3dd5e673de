"""Routing by hand, and the rules for following a subject's choice."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from reference import EXACT, M3Config, Result, forward
from reference.moe import mixture, route
from tests.reference.subject import random_batch, random_weights, tiny_config

MOE = "layers.0.block_sparse_moe."


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def hand_made(bias: list[float]) -> tuple[M3Config, dict[str, Tensor]]:
    """Router logits are the first four hidden values; expert e returns (e + 1) * h(x) * ones.

    With beta 0 and all FFN weights constant, h is the same for every expert.
    """
    config = tiny_config(
        "m", hidden_size=4, intermediate_size=1, num_local_experts=4, swiglu_beta=0.0
    )
    weights = {k: torch.zeros_like(v) for k, v in random_weights(config).items()}
    weights[MOE + "gate.weight"] = torch.eye(4)
    weights[MOE + "e_score_correction_bias"] = torch.tensor(bias)
    for e in range(4):
        weights[f"{MOE}experts.{e}.w1.weight"] = torch.ones(1, 4)
        weights[f"{MOE}experts.{e}.w3.weight"] = torch.ones(1, 4)
        weights[f"{MOE}experts.{e}.w2.weight"] = torch.full((4, 1), e + 1.0)
    return config, {k: v.double() for k, v in weights.items()}


def test_routing_by_hand() -> None:
    # Scores: sigmoid of (2, 1, 0, -1). The bias lifts expert 3 above experts 1 and 2, but the
    # mixing weights are the scores without bias, renormalised and scaled by 2.
    config, weights = hand_made([0.0, 0.0, 0.0, 1.0])
    x = torch.tensor([[[2.0, 1.0, 0.0, -1.0]]], dtype=torch.float64)
    routing = route(config, weights, 0, x, None, lambda _: 0.0, EXACT)
    assert routing.chosen.tolist() == [[0, 3]]
    s0, s3 = sigmoid(2), sigmoid(-1)
    mix = [2 * s0 / (s0 + s3), 2 * s3 / (s0 + s3)]
    assert routing.mix.flatten().tolist() == pytest.approx(mix)
    assert float(routing.margin) == pytest.approx(s0 - sigmoid(1))

    h = 2 * sigmoid(1.702 * 2) * 2  # gate = up = 2
    y = mixture(config, weights, 0, x, routing, EXACT).out
    assert y.flatten().tolist() == pytest.approx([mix[0] * 1 * h + mix[1] * 4 * h] * 4)

    # The shared expert is added once, unscaled.
    shared = {f"{MOE}shared_experts.{n}_proj.weight": torch.ones(1, 4) for n in ("gate", "up")}
    shared[f"{MOE}shared_experts.down_proj.weight"] = torch.ones(4, 1)
    with_shared = weights | {k: v.double() for k, v in shared.items()}
    y = mixture(config, with_shared, 0, x, routing, EXACT).out - y
    assert y.flatten().tolist() == pytest.approx([h] * 4)


def test_without_bias_none_is_needed() -> None:
    config = tiny_config("m", use_routing_bias=False)
    weights = random_weights(config)
    assert MOE + "e_score_correction_bias" not in weights
    taps = forward(config, weights, random_batch(config, (5,))).taps
    best = taps["layers.0.router"].topk(2).indices.sort().values
    assert torch.equal(taps["layers.0.experts_chosen"], best)


def test_equal_scores_prefer_the_lowest_id_and_all_experts_have_infinite_margin() -> None:
    config, weights = hand_made([0.0] * 4)
    x = torch.zeros(1, 1, 4, dtype=torch.float64)
    assert route(config, weights, 0, x, None, lambda _: 0.0, EXACT).chosen.tolist() == [[0, 1]]
    everyone = tiny_config("m", num_experts_per_tok=8)
    result = forward(everyone, random_weights(everyone), random_batch(everyone, (2,)))
    assert result.routing_margin[0].tolist() == [math.inf, math.inf]


def run(proposed: Tensor | None, tie: dict[int, float] | float = 0.0) -> Result:
    config = tiny_config("dm")
    routing = None if proposed is None else {1: proposed}
    batch = random_batch(config, (4,))
    return forward(config, random_weights(config), batch, routing=routing, tie=tie)


def ranking(result: Result) -> tuple[Tensor, Tensor]:
    bias = random_weights(tiny_config("dm"))["layers.1.block_sparse_moe.e_score_correction_bias"]
    ranked = (result.taps["layers.1.router"].sigmoid() + bias).sort(descending=True)
    return ranked.values, ranked.indices


def test_own_choice_in_any_order_changes_nothing() -> None:
    own = run(None)
    same = run(own.taps["layers.1.experts_chosen"].flip(1).to(torch.int32))
    assert same.routing_rejected == ()
    for name, tap in own.taps.items():
        assert torch.equal(same.taps[name], tap), name


def test_a_legal_tie_is_followed_and_an_illegal_one_is_not() -> None:
    own = run(None)
    scores, order = ranking(own)
    gap = float(scores[2, 1] - scores[2, 2])
    assert float(own.routing_margin[1][2]) == pytest.approx(gap)
    proposed = order[:, :2].clone()
    proposed[2, 1] = order[2, 2]  # the third best instead of the second

    followed = run(proposed, tie=gap * 1.001)
    assert followed.routing_rejected == ()
    assert followed.taps["layers.1.experts_chosen"][2].tolist() == sorted(proposed[2].tolist())
    assert not torch.equal(followed.taps["layers.1.ffn"][2], own.taps["layers.1.ffn"][2])
    assert torch.equal(run(proposed, tie={1: gap * 1.001}).taps["norm"], followed.taps["norm"])

    too_small: list[dict[int, float] | float] = [gap * 0.999, 0.0, {}]
    for tie in too_small:
        refused = run(proposed, tie=tie)
        assert refused.routing_rejected == ((1, 2),)
        assert torch.equal(refused.taps["logprobs"], own.taps["logprobs"])


@pytest.mark.parametrize("row", [[0, 0], [-1, 0], [0, 8]])
def test_duplicate_and_unknown_experts_are_illegal_whatever_the_tolerance(row: list[int]) -> None:
    proposed = run(None).taps["layers.1.experts_chosen"].clone()
    proposed[1] = torch.tensor(row)
    assert run(proposed, tie=math.inf).routing_rejected == ((1, 1),)


def test_routing_of_the_wrong_form_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"layer 1 must be integer ids of shape \(4, 2\)"):
        run(torch.zeros(4, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="integer ids"):
        run(torch.zeros(4, 2))
    config = tiny_config("dm")
    with pytest.raises(ValueError, match=r"routing names layer 0; MoE layers are \(1,\)"):
        forward(
            config,
            random_weights(config),
            random_batch(config, (4,)),
            routing={0: torch.zeros(4, 2, dtype=torch.int64)},
        )
