"""Routed expert FFNs: stands in for the fused grouped GEMMs of a MoE backend."""

import torch

from model.kernels import accumulator


def swiglu_oai(gate_up: torch.Tensor, limit: float, alpha: float, beta: float) -> torch.Tensor:
    """The clamped SwiGLU of gpt-oss, uninterleaved: [..., 2 I] laid out [gate | up] -> [..., I].

    g = min(gate, limit); u = clamp(up, -limit, limit); y = g * sigmoid(alpha * g) * (u + beta).
    """
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


def fused_experts(
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    *,
    limit: float,
    alpha: float,
    beta: float,
) -> None:
    """output[t] = sum over slots k of topk_weights[t, k] * FFN of expert topk_ids[t, k].

    output, hidden_states: [T, H], not overlapping; w13: [local E, 2 I, H], laid out [gate | up];
    w2: [local E, H, I]; topk_weights: float [T, K]; topk_ids: int [T, K], global expert ids, or
    below 0 for a slot to skip; expert_map: int [E], global id to local id or -1 for an expert that
    lives on another rank (its slots add nothing here), or None when all experts are local.

    Each GEMM and the activation round to the storage dtype; the weighted sum runs in float32.
    Every local expert sees every token, and a slot's weight selects: at tiny sizes a few batched
    GEMMs are faster than many small ones. What an expert makes of a token that did not choose it
    is dropped, not multiplied by zero.
    """
    compute = accumulator(hidden_states.dtype)
    experts = w13.shape[0]
    local_TK = topk_ids.to(torch.int64)
    if expert_map is not None:
        mapped = expert_map.to(torch.int64)[local_TK.clamp(min=0)]
        local_TK = torch.where(local_TK < 0, local_TK, mapped)
    # Slots without a local expert go to one column more, which is cut off.
    column_TK = torch.where(local_TK < 0, experts, local_TK)
    shape = (topk_ids.shape[0], experts + 1)
    device = hidden_states.device
    weights_TE = torch.zeros(shape, dtype=compute, device=device)
    weights_TE = weights_TE.scatter_add_(1, column_TK, topk_weights.to(compute))[:, :experts]
    chosen_TE = torch.zeros(shape, dtype=torch.bool, device=device)
    chosen_TE = chosen_TE.scatter_(1, column_TK, True)[:, :experts]

    gate_up = torch.matmul(hidden_states, w13.transpose(1, 2))
    act = swiglu_oai(gate_up.to(compute), limit, alpha, beta).to(hidden_states.dtype)
    down = torch.bmm(act, w2.transpose(1, 2)).to(compute).transpose(0, 1)
    down = torch.where(chosen_TE.unsqueeze(-1), down, 0.0)
    output.copy_(torch.bmm(weights_TE.unsqueeze(1), down).squeeze(1))
