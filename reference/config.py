"""The numbers that define one MiniMax-M3 text model, read from a Hugging Face text_config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# up + 1 is part of the SwiGLU-OAI definition; published checkpoints leave the key out.
_DEFAULT_SWIGLU_BETA = 1.0


@dataclass(frozen=True, kw_only=True)
class M3Config:
    """Sizes and constants of the model. Field names are the Hugging Face keys."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """FFN width of one routed expert; the shared expert is n_shared_experts times as wide."""
    dense_intermediate_size: int
    """FFN width of a dense layer."""
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int
    """Leading dims of each head that are rotated (head_dim * partial_rotary_factor)."""
    rope_theta: float
    rms_norm_eps: float
    num_local_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    routed_scaling_factor: float
    use_routing_bias: bool
    moe_layer_freq: tuple[int, ...]
    """Per layer: 0 dense FFN, 1 mixture of experts."""
    swiglu_limit: float
    swiglu_alpha: float
    swiglu_beta: float
    sparse_layers: tuple[int, ...] = ()
    """Ascending indices of the layers that attend to chosen blocks only; they have as many index
    heads as key/value heads, of head_dim. The fields below mean nothing where there are none."""
    sparse_block_size: int = 1
    """Tokens of a block."""
    sparse_topk_blocks: int = 1
    """Blocks that a query attends to at most, the forced ones included."""
    sparse_init_blocks: int = 0
    """First blocks of a sequence that are always chosen."""
    sparse_local_blocks: int = 0
    """Last blocks, the query's own included, that are always chosen."""

    def __post_init__(self) -> None:
        if len(self.moe_layer_freq) != self.num_hidden_layers:
            raise ValueError(
                f"moe_layer_freq has {len(self.moe_layer_freq)} entries; "
                f"num_hidden_layers wants {self.num_hidden_layers}"
            )
        if set(self.moe_layer_freq) - {0, 1}:
            raise ValueError(f"moe_layer_freq holds 0s and 1s only, not {self.moe_layer_freq}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.rotary_dim % 2 or not 0 <= self.rotary_dim <= self.head_dim:
            raise ValueError(
                f"rotary_dim {self.rotary_dim} must be even and at most head_dim {self.head_dim}"
            )
        if not 1 <= self.num_experts_per_tok <= self.num_local_experts:
            raise ValueError(
                f"num_experts_per_tok {self.num_experts_per_tok} must be between 1 and "
                f"num_local_experts {self.num_local_experts}"
            )
        _check_sparse(self)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the mixture-of-experts layers."""
        return tuple(i for i, flag in enumerate(self.moe_layer_freq) if flag)

    @classmethod
    def from_hf(cls, text_config: Mapping[str, Any]) -> M3Config:
        """Read a Hugging Face `text_config`.

        `rotary_dim` or `partial_rotary_factor` may be given; if both are they must agree.
        Raises ValueError naming the key that is missing or contradicted.
        """

        def need(key: str) -> Any:
            if text_config.get(key) is None:
                raise ValueError(f"text_config lacks the key {key!r}")
            return text_config[key]

        head_dim = int(need("head_dim"))
        return cls(
            vocab_size=int(need("vocab_size")),
            hidden_size=int(need("hidden_size")),
            intermediate_size=int(need("intermediate_size")),
            dense_intermediate_size=int(need("dense_intermediate_size")),
            num_hidden_layers=int(need("num_hidden_layers")),
            num_attention_heads=int(need("num_attention_heads")),
            num_key_value_heads=int(need("num_key_value_heads")),
            head_dim=head_dim,
            rotary_dim=_rotary_dim(text_config, head_dim),
            rope_theta=float(need("rope_theta")),
            rms_norm_eps=float(need("rms_norm_eps")),
            num_local_experts=int(need("num_local_experts")),
            num_experts_per_tok=int(need("num_experts_per_tok")),
            n_shared_experts=int(need("n_shared_experts")),
            routed_scaling_factor=float(need("routed_scaling_factor")),
            use_routing_bias=bool(need("use_routing_bias")),
            moe_layer_freq=tuple(int(flag) for flag in need("moe_layer_freq")),
            swiglu_limit=float(need("swiglu_limit")),
            swiglu_alpha=float(need("swiglu_alpha")),
            swiglu_beta=float(text_config.get("swiglu_beta", _DEFAULT_SWIGLU_BETA)),
            **_sparse(text_config, head_dim),
        )


def _rotary_dim(text_config: Mapping[str, Any], head_dim: int) -> int:
    given, factor = text_config.get("rotary_dim"), text_config.get("partial_rotary_factor")
    if given is None and factor is None:
        raise ValueError("text_config lacks the key 'rotary_dim' or 'partial_rotary_factor'")
    if factor is None:
        return int(given)  # type: ignore[arg-type]
    if given is not None and int(given) != int(head_dim * factor):
        raise ValueError(
            f"rotary_dim {given} contradicts head_dim * partial_rotary_factor = "
            f"{int(head_dim * factor)}"
        )
    return int(head_dim * factor)


def _sparse(text_config: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """The sparse_* fields, from `sparse_attention_config`.

    Where no layer is sparse the sizes are read if they are there: a predictor layer is sparse in
    any model (see mtp.py).
    """
    sparse = text_config.get("sparse_attention_config") or {}
    layers = _sparse_layers(sparse, int(text_config["num_hidden_layers"]))
    needed = ("sparse_block_size", "sparse_topk_blocks")
    lacking = [key for key in needed if sparse.get(key) is None]
    if not layers and lacking:
        return {}
    if lacking:
        raise ValueError(f"sparse_attention_config lacks the key {lacking[0]!r}")
    same = {
        "sparse_num_index_heads": ("num_key_value_heads", int(text_config["num_key_value_heads"])),
        "sparse_index_dim": ("head_dim", head_dim),
    }
    for key, (other, value) in same.items():
        if layers and sparse.get(key) != value:
            raise ValueError(f"{key} {sparse.get(key)} must be {other} {value}")
    if (kind := sparse.get("sparse_score_type", "max")) != "max":
        raise ValueError(f"sparse_score_type {kind!r} is not known; use 'max'")
    return {
        "sparse_layers": layers,
        **{key: int(sparse[key]) for key in needed},
        "sparse_init_blocks": int(sparse.get("sparse_init_block", 0)),
        "sparse_local_blocks": int(sparse.get("sparse_local_block", 0)),
    }


def _sparse_layers(sparse: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    if not sparse.get("use_sparse_attention"):
        return ()
    if sparse.get("sparse_attention_freq") is None:
        raise ValueError("sparse_attention_config lacks the key 'sparse_attention_freq'")
    freq = [int(flag) for flag in sparse["sparse_attention_freq"]]
    if len(freq) != layers or set(freq) - {0, 1}:
        raise ValueError(
            f"sparse_attention_freq must be {layers} (num_hidden_layers) 0s and 1s, not {freq}"
        )
    return tuple(i for i, flag in enumerate(freq) if flag)


def _check_sparse(config: M3Config) -> None:
    layers = config.sparse_layers
    if list(layers) != sorted(set(layers) & set(range(config.num_hidden_layers))):
        raise ValueError(
            f"sparse_layers {layers} must ascend within 0..{config.num_hidden_layers - 1}"
        )
    if config.sparse_block_size < 1:
        raise ValueError(f"sparse_block_size {config.sparse_block_size} must be at least 1")
    init, local = config.sparse_init_blocks, config.sparse_local_blocks
    if min(init, local) < 0 or not max(1, init + local) <= config.sparse_topk_blocks:
        raise ValueError(
            f"sparse_topk_blocks {config.sparse_topk_blocks} must be at least 1, and hold the "
            f"{init} init and {local} local blocks"
        )
