"""Fused QK-norm, rotary embedding and cache insert: stands in for
`vllm._custom_ops.fused_minimax_m3_qknorm_rope_kv_insert`.

Per head: Gemma RMSNorm, then NeoX rotation of the first `rotary_dim` features (Su et al. 2021):
    [a, b] -> [a cos - b sin, b cos + a sin]
where a and b are the two halves of those features.
"""

from __future__ import annotations

import torch

from model.kernels import accumulator, as_dtype
from model.kernels.norm import gemma_rmsnorm
from model.kernels.paged_attention import insert_kv, with_slots


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
    index_q_norm_weight: torch.Tensor | None = None,
    index_k_norm_weight: torch.Tensor | None = None,
    num_index_heads: int = 0,
    slot_mapping: torch.Tensor | None = None,
    index_slot_mapping: torch.Tensor | None = None,
    kv_cache: torch.Tensor | None = None,
    index_cache: torch.Tensor | None = None,
    block_size: int = 0,
    q_out: torch.Tensor | None = None,
    index_q_out: torch.Tensor | None = None,
    kv_cache_dtype: str = "auto",
    skip_index_branch: bool = False,
    q_fp8_out: torch.Tensor | None = None,
    q_fp8_scale: float = 1.0,
    kv_k_scale: torch.Tensor | None = None,
    kv_v_scale: torch.Tensor | None = None,
) -> None:
    """Normalise and rotate the heads inside `qkv`, in place, and store what attention will read.

    qkv: [T, heads * D], laid out [q | k | v] in a dense layer and [q | k | v | index_q | index_k]
    in a sparse one, which has `num_index_heads` index queries and one index key; v is left as it
    is. Norm weights: [D]; cos_sin_cache: [positions, rotary_dim], cosines then sines; positions:
    int64 [T]. With `q_out` [T, num_heads * D] or `index_q_out` [T, num_index_heads * D] these
    heads go there instead, and stay as they are in `qkv`.

    With `kv_cache` [pages, num_kv_heads, block_size, 2 D], k and v are written to it by
    `slot_mapping` [T], and the index key to `index_cache` [pages, block_size, D] by
    `index_slot_mapping`, or else `slot_mapping`; a token whose slot is below 0 is not written.

    Computes in float32 and rounds once, to the dtype of what it stores to.
    Raises NotImplementedError for a quantised query or cache and for `skip_index_branch`, and
    ValueError if `qkv` is not of this width or the caches lack what they need.
    """
    _refuse_quantised(kv_cache_dtype, q_fp8_out, kv_k_scale, kv_v_scale, skip_index_branch)
    tokens, head_dim = qkv.shape[0], q_norm_weight.shape[0]
    index_heads = num_index_heads + 1 if num_index_heads else 0
    main = num_heads + 2 * num_kv_heads
    if qkv.shape[1] != (main + index_heads) * head_dim:
        raise ValueError(
            f"qkv is {qkv.shape[1]} wide; {main} heads and {index_heads} of the indexer make "
            f"{(main + index_heads) * head_dim}"
        )
    heads = qkv.view(tokens, main + index_heads, head_dim)
    compute = accumulator(qkv.dtype)
    rows = as_dtype(cos_sin_cache.index_select(0, positions), compute)
    cos, sin = rows.unsqueeze(1).chunk(2, dim=-1)

    def rotated(part: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        normed = gemma_rmsnorm(as_dtype(part, compute), weight, eps)
        half = rotary_dim // 2
        a, b, others = normed.split_with_sizes((half, half, head_dim - rotary_dim), dim=-1)
        turned = (a * cos).addcmul_(b, sin, value=-1), (b * cos).addcmul_(a, sin), others
        return torch.cat(turned, dim=-1)

    # q and k lie side by side, so one pass does both, each head under its own weight.
    queries, keys = slice(0, num_heads), slice(num_heads, num_heads + num_kv_heads)
    weight = torch.cat(
        (q_norm_weight.expand(num_heads, -1), k_norm_weight.expand(num_kv_heads, -1))
    )
    both = heads[:, : num_heads + num_kv_heads]
    turned = rotated(both, weight)
    if q_out is None:
        both.copy_(turned)
    else:
        _store(turned[:, queries], both[:, queries], q_out)
        both[:, keys].copy_(turned[:, keys])
    index_key = None
    if num_index_heads:
        if index_q_norm_weight is None or index_k_norm_weight is None:
            raise ValueError("the sparse layout needs the index branch's norm weights")
        index_q, index_k = slice(main, main + num_index_heads), slice(main + num_index_heads, None)
        _store(rotated(heads[:, index_q], index_q_norm_weight), heads[:, index_q], index_q_out)
        heads[:, index_k].copy_(rotated(heads[:, index_k], index_k_norm_weight))
        index_key = heads[:, index_k]
    if kv_cache is None:
        return
    if slot_mapping is None or (index_key is not None and index_cache is None):
        raise ValueError("the caches are filled by a slot mapping, and both or neither of them")
    if kv_cache.shape[2] != block_size:
        raise ValueError(f"the cache has pages of {kv_cache.shape[2]} tokens, not {block_size}")
    values = heads[:, num_heads + num_kv_heads : main]
    insert_kv(heads[:, keys], values, kv_cache, slot_mapping)
    if index_key is not None and index_cache is not None:
        slots = slot_mapping if index_slot_mapping is None else index_slot_mapping
        _insert_index(index_key.squeeze(1), index_cache, slots)


def _store(heads: torch.Tensor, place: torch.Tensor, out: torch.Tensor | None) -> None:
    """Write heads [T, n, D] to `out` [T, n * D], or to their place in `qkv`."""
    if out is None:
        place.copy_(heads)
    else:
        out.view(heads.shape).copy_(heads)


def _insert_index(key: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write each token's index key [T, D] to its slot of the cache [pages, B, D]."""
    slots, key = with_slots(slot_mapping, key)
    block = cache.shape[1]
    cache[slots // block, slots % block] = as_dtype(key, cache.dtype)


def _refuse_quantised(
    kv_cache_dtype: str,
    q_fp8_out: torch.Tensor | None,
    kv_k_scale: torch.Tensor | None,
    kv_v_scale: torch.Tensor | None,
    skip_index_branch: bool,
) -> None:
    asked = {
        f"kv_cache_dtype {kv_cache_dtype!r}": "fp" in kv_cache_dtype.replace("bfloat16", ""),
        "q_fp8_out": q_fp8_out is not None,
        "kv_k_scale": kv_k_scale is not None,
        "kv_v_scale": kv_v_scale is not None,
        "skip_index_branch": skip_index_branch,
    }
    for name, given in asked.items():
        if given:
            raise NotImplementedError(f"the QK-norm stand-in has no {name}")
