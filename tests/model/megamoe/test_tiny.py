"""Tiny models for MegaMoE: sizes, the MXFP8 checkpoint, and that every term still matters."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from model.checkpoint import checkpoint
from model.megamoe import mxfp8
from model.megamoe.tiny import MegaTinyM3, dequantise_experts, quantise_experts
from model.rank_state import RANK_LOCAL
from model.subject import Subject
from model.tiny import ShapeError, TinyM3
from sim import RankContext, Topology, World
from tests.model import test_checkpoint

SEEDS = [0, 1]


def test_only_the_two_sizes_differ_from_the_tiny_model() -> None:
    mega, tiny = MegaTinyM3().text_config(), TinyM3().text_config()
    changed = {key for key in mega if mega[key] != tiny.get(key)}
    assert changed == {
        "hidden_size",
        "intermediate_size",
        "shared_intermediate_size",
        "expert_dtype",
    }
    assert (mega["hidden_size"], mega["intermediate_size"]) == (256, 128)
    assert MegaTinyM3(expert_dtype="mxfp8").text_config()["expert_dtype"] == "mxfp8"


@pytest.mark.parametrize("word", ["tep2", "tep4pp2", "tep2pp4", "tep8"])
def test_the_sizes_divide(word: str) -> None:
    MegaTinyM3().validate(Topology.parse(word))
    with pytest.raises(ShapeError):
        MegaTinyM3(num_local_experts=12).validate(Topology.parse("tep8"))


def test_a_quantised_checkpoint_differs_in_the_routed_experts_alone() -> None:
    tiny = MegaTinyM3(layers="dm")
    plain = checkpoint(tiny, 0, torch.bfloat16)
    quantised = quantise_experts(plain)
    routed = {name for name in plain if ".experts." in name}
    assert len(routed) == 3 * tiny.num_local_experts
    scales = {name.removesuffix("weight") + "weight_scale_inv" for name in routed}
    assert set(quantised) == set(plain) | scales
    for name in set(plain) - routed:
        assert quantised[name] is plain[name]
    back = dequantise_experts(quantised, torch.float64)
    assert set(back) == set(plain)
    for name in routed:
        assert quantised[name].dtype == torch.float8_e4m3fn
        scale = quantised[name.removesuffix("weight") + "weight_scale_inv"]
        assert scale.dtype == torch.uint8
        assert scale.shape == (plain[name].shape[0], plain[name].shape[1] // mxfp8.BLOCK)
        moved = (back[name] - plain[name].double()).abs()
        assert (moved <= mxfp8.error_bound(plain[name])).all() and moved.any()


@pytest.fixture(scope="module", params=SEEDS)
def run(request: pytest.FixtureRequest, vllm_ready: None) -> dict[str, Any]:
    """One step of a model of these sizes in bfloat16, on vLLM's ordinary MoE path."""
    tiny = MegaTinyM3()
    weights = checkpoint(tiny, request.param, torch.bfloat16)

    def program(ctx: RankContext) -> dict[str, torch.Tensor]:
        subject = Subject(ctx, tiny, weights, torch.bfloat16)
        return test_checkpoint.observe(subject, request.param)

    with World("tp1", rank_local=RANK_LOCAL) as world:
        seen = world.run(program)[0]
    return {
        "weights": {name: w.float() for name, w in weights.items()},
        "seen": {
            name: value.float() if value.is_floating_point() else value
            for name, value in seen.items()
        },
    }


MEASURES = [
    test_checkpoint.test_the_residual_stream_stays_of_order_one,
    test_checkpoint.test_attention_ffn_shared_and_routed_all_contribute,
    test_checkpoint.test_routing_reaches_every_expert_and_the_bias_changes_it,
    test_checkpoint.test_no_activation_is_saturated,
    test_checkpoint.test_logits_have_a_sensible_spread,
    test_checkpoint.test_norms_and_biases_are_not_zero,
]


@pytest.mark.parametrize("measure", MEASURES)
def test_every_term_matters(run: dict[str, Any], measure: Callable[[dict[str, Any]], None]) -> None:
    """The measurements of the tiny model's checkpoint, at these sizes."""
    measure(run)
