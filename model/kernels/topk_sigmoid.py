"""Sigmoid routing with a selection bias: stands in for `vllm._custom_ops.topk_sigmoid`."""

import functools

import torch

from model.kernels import as_dtype, constant


def topk_sigmoid(
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    token_expert_indices: torch.Tensor,
    gating_output: torch.Tensor,
    renormalize: bool = False,
    e_score_correction_bias: torch.Tensor | None = None,
    routed_scaling_factor: float = 1.0,
    is_padding: torch.Tensor | None = None,
) -> None:
    """Choose K experts for each token, in place on the first three tensors.

    With s = sigmoid(gating_output) [T, E] in float32: the ids are the K largest of
    s + e_score_correction_bias, best first and the lower id first on a tie; the weights are s of
    those (without the bias), divided by their sum if `renormalize`, times
    `routed_scaling_factor`.

    topk_weights: float32 [T, K]; topk_ids: int [T, K]; token_expert_indices: int [T, K], where
    slot k of token t becomes k * T + t. Rows where `is_padding` [T] is true get id -1, weight 0.
    """
    scores_TE = as_dtype(gating_output, torch.float32).sigmoid()
    selection_TE = scores_TE
    if e_score_correction_bias is not None:
        selection_TE = scores_TE + as_dtype(e_score_correction_bias, torch.float32)
    tokens, top_k = topk_ids.shape
    # A stable sort, because torch.topk leaves the order of ties open.
    order_TE = selection_TE.sort(dim=-1, descending=True, stable=True).indices
    ids_TK = order_TE[:, :top_k]
    weights_TK = scores_TE.gather(1, ids_TK)
    if renormalize:
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    if routed_scaling_factor != 1:
        factor = constant(routed_scaling_factor, torch.float32, weights_TK.device)
        weights_TK = weights_TK * factor
    if is_padding is not None:
        ids_TK = ids_TK.masked_fill(is_padding.unsqueeze(-1), -1)
        weights_TK = weights_TK.masked_fill(is_padding.unsqueeze(-1), 0.0)
    topk_weights.copy_(weights_TK)
    topk_ids.copy_(ids_TK)
    token_expert_indices.copy_(_slots(tokens, top_k, topk_ids.device))


@functools.lru_cache(maxsize=64)
def _slots(tokens: int, top_k: int, device: torch.device) -> torch.Tensor:
    """int64 [T, K]: k * T + t."""
    rows, slots = (torch.arange(n, device=device) for n in (tokens, top_k))
    return slots * tokens + rows.unsqueeze(-1)
