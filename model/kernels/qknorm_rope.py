"""Fused QK-norm and rotary embedding: stands in for
`vllm._custom_ops.fused_minimax_m3_qknorm_rope_kv_insert` in its dense layout.

Per head: Gemma RMSNorm, then NeoX rotation of the first `rotary_dim` features (Su et al. 2021):
    [a, b] -> [a cos - b sin, b cos + a sin]
where a and b are the two halves of those features.
"""

from typing import Any

import torch

from model.kernels import accumulator
from model.kernels.norm import gemma_rmsnorm

# Arguments that only the sparse layout and the caches use, with their values in the dense layout.
_DENSE: dict[str, Any] = {
    "index_q_norm_weight": None,
    "index_k_norm_weight": None,
    "num_index_heads": 0,
    "slot_mapping": None,
    "index_slot_mapping": None,
    "kv_cache": None,
    "index_cache": None,
    "block_size": 0,
    "q_out": None,
    "index_q_out": None,
    "kv_cache_dtype": "auto",
    "skip_index_branch": False,
    "q_fp8_out": None,
    "q_fp8_scale": 1.0,
    "kv_k_scale": None,
    "kv_v_scale": None,
}


def fused_minimax_m3_qknorm_rope_kv_insert(
    qkv: torch.Tensor,
    q_norm_weight: torch.Tensor,
    k_norm_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    rotary_dim: int,
    eps: float,
    *further_positional: Any,
    **further: Any,
) -> None:
    """Normalise and rotate q and k inside `qkv`, in place; v is left as it is.

    qkv: [T, (num_heads + 2 * num_kv_heads) * D], laid out [q | k | v]; norm weights: [D];
    cos_sin_cache: [positions, rotary_dim], cosines then sines; positions: int64 [T].
    Computes in float32 and rounds once, when it stores to `qkv`.
    Raises NotImplementedError if an argument of the sparse layout or of a cache is given.
    """
    given = dict(zip(_DENSE, further_positional, strict=False)) | further
    for name, value in given.items():
        if name not in _DENSE:
            raise TypeError(f"fused_minimax_m3_qknorm_rope_kv_insert has no argument {name!r}")
        if value is not _DENSE[name] and value != _DENSE[name]:
            raise NotImplementedError(
                f"{name} is given, but only the dense layout [q | k | v] is implemented here; "
                "use a configuration whose layers all have dense attention"
            )
    head_dim = q_norm_weight.shape[0]
    compute = accumulator(qkv.dtype)
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
    cos, sin = cos_sin_cache[positions].to(compute).unsqueeze(1).chunk(2, dim=-1)
    # q and k lie side by side, so one pass does both, each head under its own weight.
    part = heads[:, : num_heads + num_kv_heads]
    weight = torch.cat(
        (q_norm_weight.expand(num_heads, -1), k_norm_weight.expand(num_kv_heads, -1))
    )
    normed = gemma_rmsnorm(part.to(compute), weight, eps)
    a, b = normed[..., :rotary_dim].chunk(2, dim=-1)
    part.copy_(torch.cat((a * cos - b * sin, b * cos + a * sin, normed[..., rotary_dim:]), dim=-1))
