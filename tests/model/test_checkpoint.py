"""Every term of the model matters: measured on vLLM's own modules, at TP 1, for several seeds."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from model.batch import Batch
from model.checkpoint import checkpoint
from model.rank_state import RANK_LOCAL
from model.subject import Subject
from model.tiny import TinyM3
from sim import RankContext, World

TINY = TinyM3()
TOKENS = 64
SEEDS = [0, 1, 2]


def observe(subject: Subject, seed: int) -> dict[str, torch.Tensor]:
    """The taps of one step, and beside them what only hooks on the parts can see."""
    seen: dict[str, torch.Tensor] = {}

    def keep(name: str, of_input: bool = False) -> Callable[..., None]:
        def hook(_module: Any, inputs: Any, output: Any) -> None:
            seen[name] = (inputs[0] if of_input else output).clone()

        return hook

    for i, layer in enumerate(subject.model.model.layers):
        if layer.is_moe_layer:
            shared = layer.block_sparse_moe.shared_experts
            shared.register_forward_hook(keep(f"{i}.shared"))
            shared.act_fn.register_forward_hook(keep(f"{i}.shared.gate_up", of_input=True))
            layer.block_sparse_moe.gate.register_forward_hook(keep(f"{i}.moe_in", of_input=True))
        else:
            layer.mlp.act_fn.register_forward_hook(keep(f"{i}.dense.gate_up", of_input=True))
    result = subject.step(Batch.random(TOKENS, TINY.vocab_size, seed, sequences=4))
    return seen | {name: tap.value for name, tap in result.taps.items()}


@pytest.fixture(scope="module", params=SEEDS)
def run(request: pytest.FixtureRequest, vllm_ready: None) -> dict[str, Any]:
    weights = checkpoint(TINY, request.param, torch.float32)

    def program(ctx: RankContext) -> dict[str, torch.Tensor]:
        return observe(Subject(ctx, TINY, weights), request.param)

    with World("tp1", rank_local=RANK_LOCAL) as world:
        return {"weights": weights, "seen": world.run(program)[0]}


def rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())


def test_the_residual_stream_stays_of_order_one(run: dict[str, Any]) -> None:
    seen = run["seen"]
    streams = [rms(seen["embed"])]
    for i in range(len(TINY.layers)):
        residual = seen[f"layers.{i}.residual"]
        streams += [rms(residual), rms(residual + seen[f"layers.{i}.ffn"])]
    assert all(0.8 < stream < 5 for stream in streams), streams


def test_attention_ffn_shared_and_routed_all_contribute(run: dict[str, Any]) -> None:
    seen = run["seen"]
    for i, letter in enumerate(TINY.layers):
        parts = {"attn": rms(seen[f"layers.{i}.attn"]), "ffn": rms(seen[f"layers.{i}.ffn"])}
        if letter == "m":
            parts["shared"] = rms(seen[f"{i}.shared"])
            parts["routed"] = rms(seen[f"layers.{i}.ffn"] - seen[f"{i}.shared"])
        parts["stream"] = rms(seen[f"layers.{i}.residual"])
        assert max(parts.values()) < 10 * min(parts.values()), (i, parts)


def test_routing_reaches_every_expert_and_the_bias_changes_it(run: dict[str, Any]) -> None:
    for i in TINY.moe_layers:
        chosen = run["seen"][f"layers.{i}.experts_chosen"]
        counts = torch.bincount(chosen.flatten(), minlength=TINY.num_local_experts)
        assert (counts > 0).all(), counts
        # No expert takes more than half of the tokens' four slots each.
        assert counts.max() < TOKENS * 0.75, counts
        unbiased = run["seen"][f"layers.{i}.router"].topk(TINY.num_experts_per_tok).indices
        moved = (unbiased.sort(dim=-1).values != chosen).any(dim=-1).float().mean()
        assert 0.05 < moved < 0.95, moved


def test_no_activation_is_saturated(run: dict[str, Any]) -> None:
    seen, weights = run["seen"], run["weights"]
    gate_ups = [value for name, value in seen.items() if name.endswith(".gate_up")]
    for i in TINY.moe_layers:
        prefix = f"model.layers.{i}.block_sparse_moe.experts"
        for e in range(TINY.num_local_experts):
            w13 = torch.cat([weights[f"{prefix}.{e}.{w}.weight"] for w in ("w1", "w3")])
            gate_ups.append(seen[f"{i}.moe_in"] @ w13.T)
    for gate_up in gate_ups:
        gate, up = gate_up.chunk(2, dim=-1)
        clamped = torch.cat((gate > TINY.swiglu_limit, up.abs() > TINY.swiglu_limit))
        assert clamped.float().mean() < 0.01
        slope = torch.sigmoid(TINY.swiglu_alpha * gate)
        assert ((slope > 0.05) & (slope < 0.95)).float().mean() > 0.5
    for i in TINY.moe_layers:
        scores = seen[f"layers.{i}.router"].sigmoid()
        assert ((scores > 0.05) & (scores < 0.95)).float().mean() > 0.9


def test_logits_have_a_sensible_spread(run: dict[str, Any]) -> None:
    assert 1 < float(run["seen"]["logits"].std()) < 3


def test_norms_and_biases_are_not_zero(run: dict[str, Any]) -> None:
    for name, weight in run["weights"].items():
        assert weight.isfinite().all(), name
        if "norm" in name:
            assert 0.05 < rms(weight) < 0.5, name
        if name.endswith("e_score_correction_bias"):
            assert (weight != 0).all() and weight.unique().numel() == TINY.num_local_experts


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dtypes_and_names(dtype: torch.dtype) -> None:
    weights = checkpoint(TinyM3(layers="dm"), 0, dtype)
    router = {
        "model.layers.1.block_sparse_moe.gate.weight",
        "model.layers.1.block_sparse_moe.e_score_correction_bias",
    }
    assert {name for name, weight in weights.items() if weight.dtype != dtype} == (
        set() if dtype == torch.float32 else router
    )
    assert all(weights[name].dtype == torch.float32 for name in router)
    assert set(weights) >= {
        "model.embed_tokens.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.0.self_attn.k_norm.weight",
        "model.layers.1.block_sparse_moe.experts.15.w2.weight",
        "model.layers.1.block_sparse_moe.shared_experts.up_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    }


def test_the_seed_decides_and_the_dtype_only_rounds() -> None:
    wide, narrow = (checkpoint(TINY, 0, d) for d in (torch.float64, torch.bfloat16))
    other = checkpoint(TINY, 1, torch.float64)
    for name, weight in wide.items():
        assert torch.equal(weight.to(narrow[name].dtype), narrow[name]), name
        assert not torch.equal(weight, other[name]), name
