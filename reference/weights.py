"""Which weights the model reads, with their shapes, and their one conversion to float64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from reference.config import M3Config

Weights = Mapping[str, Tensor]


def expected_shapes(config: M3Config) -> dict[str, tuple[int, ...]]:
    """Every weight name (Hugging Face names without the "model." prefix) and its shape."""
    return dict(_shapes(config))


def as_float64(config: M3Config, weights: Weights) -> dict[str, Tensor]:
    """Check names and shapes and convert to float64 (exact; no copy if already float64).

    Call it once per checkpoint: `forward` and `bounds` then find nothing left to convert.
    Raises ValueError for a missing weight, a wrong shape, or a weight that nothing reads (a
    weight nobody reads is a weight nobody checks).
    """
    return converted(weights, expected_shapes(config))


def converted(weights: Weights, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """`as_float64` for weights of these names and shapes."""
    for name, shape in shapes.items():
        if name not in weights:
            raise ValueError(f"weight {name!r} is missing; it should have shape {shape}")
        if tuple(weights[name].shape) != shape:
            raise ValueError(
                f"weight {name!r} has shape {tuple(weights[name].shape)}; it should be {shape}"
            )
    if unread := [name for name in weights if name not in shapes]:
        raise ValueError(
            f"weight {unread[0]!r} is not part of this model"
            + ("; strip the prefix 'model.'" if unread[0].startswith("model.") else "")
        )
    return {name: weights[name].to(torch.float64) for name in shapes}


def _shapes(config: M3Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, head_dim = config.hidden_size, config.head_dim
    q_width = config.num_attention_heads * head_dim
    kv_width = config.num_key_value_heads * head_dim
    yield "embed_tokens.weight", (config.vocab_size, hidden)
    for i, is_moe in enumerate(config.moe_layer_freq):
        layer = f"layers.{i}."
        yield layer + "input_layernorm.weight", (hidden,)
        yield layer + "post_attention_layernorm.weight", (hidden,)
        yield layer + "self_attn.q_proj.weight", (q_width, hidden)
        yield layer + "self_attn.k_proj.weight", (kv_width, hidden)
        yield layer + "self_attn.v_proj.weight", (kv_width, hidden)
        yield layer + "self_attn.o_proj.weight", (hidden, q_width)
        yield layer + "self_attn.q_norm.weight", (head_dim,)
        yield layer + "self_attn.k_norm.weight", (head_dim,)
        if i in config.sparse_layers:
            yield layer + "self_attn.index_q_proj.weight", (kv_width, hidden)
            yield layer + "self_attn.index_k_proj.weight", (head_dim, hidden)
            yield layer + "self_attn.index_q_norm.weight", (head_dim,)
            yield layer + "self_attn.index_k_norm.weight", (head_dim,)
        if is_moe:
            yield from _moe_shapes(config, layer + "block_sparse_moe.")
        else:
            width = config.dense_intermediate_size
            yield from _ffn_shapes(layer + "mlp.", "gate_proj up_proj down_proj", hidden, width)
    yield "norm.weight", (hidden,)
    yield "lm_head.weight", (config.vocab_size, hidden)


def _moe_shapes(config: M3Config, moe: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, width = config.hidden_size, config.intermediate_size
    yield moe + "gate.weight", (config.num_local_experts, hidden)
    if config.use_routing_bias:
        yield moe + "e_score_correction_bias", (config.num_local_experts,)
    for e in range(config.num_local_experts):
        yield from _ffn_shapes(f"{moe}experts.{e}.", "w1 w3 w2", hidden, width)
    if config.n_shared_experts:
        shared = width * config.n_shared_experts
        names = "gate_proj up_proj down_proj"
        yield from _ffn_shapes(moe + "shared_experts.", names, hidden, shared)


def _ffn_shapes(
    prefix: str, gate_up_down: str, hidden: int, width: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    gate, up, down = gate_up_down.split()
    yield f"{prefix}{gate}.weight", (width, hidden)
    yield f"{prefix}{up}.weight", (width, hidden)
    yield f"{prefix}{down}.weight", (hidden, width)
