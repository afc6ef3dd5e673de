"""Random full checkpoints in which every term of the model matters.

A term that is zero, or drowned by another, hides a bug in it. So norms and biases are not zero,
each block adds about as much to the residual stream as the others, the routing reaches all
experts, and no activation sits in its clamp. The tests measure all of that.
"""

from collections.abc import Callable

import torch

from model.tiny import TinyM3

# Spread of the logits; 1 would leave the softmax nearly flat.
_LOGIT_STD = 2.0
# Norm weights and routing biases: felt, but no feature or expert wins by them.
_NORM_STD = 0.2
_ROUTING_BIAS = 0.1


def checkpoint(tiny: TinyM3, seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All weights of a model by Hugging Face name ("model.layers.0...", "lm_head.weight").

    Values are drawn in float64 and rounded to `dtype`, except the router's weight and bias, which
    the model keeps in float32. The same arguments give the same weights on every machine; ranks
    may share the tensors, since loading copies.

    Scales: a linear layer of fan-in n has entries of standard deviation n^-1/2, so that an input
    of order 1 gives an output of order 1.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * std

    def linear(out_features: int, in_features: int, gain: float = 1.0) -> torch.Tensor:
        return normal(out_features, in_features, std=gain * in_features**-0.5)

    weights: dict[str, torch.Tensor] = {
        "model.embed_tokens.weight": normal(tiny.vocab_size, tiny.hidden_size, std=1.0),
    }
    for i, letter in enumerate(tiny.layers):
        layer = _attention(tiny, linear, normal)
        if i in tiny.sparse_layers:
            layer |= _indexer(tiny, linear, normal)
        layer |= _moe(tiny, linear, generator) if letter == "m" else _dense(tiny, linear)
        weights |= {f"model.layers.{i}.{name}": value for name, value in layer.items()}
    weights["model.norm.weight"] = normal(tiny.hidden_size, std=_NORM_STD)
    weights["lm_head.weight"] = linear(tiny.vocab_size, tiny.hidden_size, _LOGIT_STD)
    return {
        name: value.to(torch.float32 if _is_router(name) else dtype)
        for name, value in weights.items()
    }


def _is_router(name: str) -> bool:
    return name.endswith((".block_sparse_moe.gate.weight", ".e_score_correction_bias"))


def _attention(
    tiny: TinyM3, linear: Callable[..., torch.Tensor], normal: Callable[..., torch.Tensor]
) -> dict[str, torch.Tensor]:
    hidden, head_dim = tiny.hidden_size, tiny.head_dim
    q_size = tiny.num_attention_heads * head_dim
    kv_size = tiny.num_key_value_heads * head_dim
    return {
        "input_layernorm.weight": normal(hidden, std=_NORM_STD),
        "post_attention_layernorm.weight": normal(hidden, std=_NORM_STD),
        "self_attn.q_proj.weight": linear(q_size, hidden),
        "self_attn.k_proj.weight": linear(kv_size, hidden),
        "self_attn.v_proj.weight": linear(kv_size, hidden),
        "self_attn.o_proj.weight": linear(hidden, q_size),
        "self_attn.q_norm.weight": normal(head_dim, std=_NORM_STD),
        "self_attn.k_norm.weight": normal(head_dim, std=_NORM_STD),
    }


def _indexer(
    tiny: TinyM3, linear: Callable[..., torch.Tensor], normal: Callable[..., torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What chooses the blocks of a sparse layer: a query for each KV head, and one key."""
    hidden, head_dim = tiny.hidden_size, tiny.head_dim
    return {
        "self_attn.index_q_proj.weight": linear(tiny.num_key_value_heads * head_dim, hidden),
        "self_attn.index_k_proj.weight": linear(head_dim, hidden),
        "self_attn.index_q_norm.weight": normal(head_dim, std=_NORM_STD),
        "self_attn.index_k_norm.weight": normal(head_dim, std=_NORM_STD),
    }


def _ffn(
    prefix: str,
    names: tuple[str, str, str],
    hidden: int,
    width: int,
    linear: Callable[..., torch.Tensor],
) -> dict[str, torch.Tensor]:
    """A gated FFN; `names` are those of its gate, up and down projections."""
    gate, up, down = names
    return {
        f"{prefix}.{gate}.weight": linear(width, hidden),
        f"{prefix}.{up}.weight": linear(width, hidden),
        f"{prefix}.{down}.weight": linear(hidden, width),
    }


def _dense(tiny: TinyM3, linear: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
    names = ("gate_proj", "up_proj", "down_proj")
    return _ffn("mlp", names, tiny.hidden_size, tiny.dense_intermediate_size, linear)


def _moe(
    tiny: TinyM3, linear: Callable[..., torch.Tensor], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    hidden, width, experts = tiny.hidden_size, tiny.intermediate_size, tiny.num_local_experts
    moe = "block_sparse_moe"
    weights = {f"{moe}.gate.weight": linear(experts, hidden)}
    if tiny.use_routing_bias:
        # Evenly spaced and shuffled rather than normal: none is zero, and none is an outlier.
        steps = (torch.arange(experts, dtype=torch.float64) + 0.5) / experts * 2 - 1
        order = torch.randperm(experts, generator=generator)
        weights[f"{moe}.e_score_correction_bias"] = steps[order] * _ROUTING_BIAS
    for expert in range(experts):
        prefix = f"{moe}.experts.{expert}"
        weights |= _ffn(prefix, ("w1", "w3", "w2"), hidden, width, linear)
    if tiny.n_shared_experts:
        names = ("gate_proj", "up_proj", "down_proj")
        shared_width = width * tiny.n_shared_experts
        weights |= _ffn(f"{moe}.shared_experts", names, hidden, shared_width, linear)
    return weights
