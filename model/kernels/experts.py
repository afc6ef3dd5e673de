"""Routed expert FFNs: stands in for the fused grouped GEMMs of a MoE backend."""

import torch

from model.kernels import accumulator, as_dtype, constant


def swiglu_oai(gate_up: torch.Tensor, limit: float, alpha: float, beta: float) -> torch.Tensor:
    """The clamped SwiGLU of gpt-oss, uninterleaved: [..., 2 I] laid out [gate | up] -> [..., I].

    g = min(gate, limit); u = clamp(up, -limit, limit); y = g * sigmoid(alpha * g) * (u + beta).
    """
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp_max(limit), up.clamp(-limit, limit)
    alpha_, beta_ = (constant(number, gate.dtype, gate.device) for number in (alpha, beta))
    return gate * torch.sigmoid(gate * alpha_) * (up + beta_)


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
    tokens, experts, device = topk_ids.shape[0], w13.shape[0], hidden_states.device
    # A column for each local expert, after one for the slots without, which is cut off.
    one = constant(1, torch.int64, device)
    column_TK = (as_dtype(topk_ids, torch.int64) + one).clamp_(min=0)
    if expert_map is not None:
        columns = torch.cat((one[None] - one, as_dtype(expert_map, torch.int64) + one))
        column_TK = columns.take(column_TK)
    weights_TE = torch.zeros((tokens, experts + 1), dtype=compute, device=device)
    weights_TE.scatter_add_(1, column_TK, as_dtype(topk_weights, compute))
    others_TE = torch.ones((tokens, experts + 1), dtype=torch.bool, device=device)
    others_TE.scatter_(1, column_TK, False)

    gate_up = torch.nn.functional.linear(hidden_states, w13.flatten(0, 1))
    gate_up = as_dtype(gate_up, compute).view(tokens, experts, w13.shape[1])
    act = as_dtype(swiglu_oai(gate_up, limit, alpha, beta), hidden_states.dtype)
    down = torch.bmm(act.transpose(0, 1), w2.transpose(1, 2))
    down = as_dtype(down, compute).transpose(0, 1)
    down.masked_fill_(others_TE[:, 1:].unsqueeze(-1), 0.0)
    output.copy_(torch.bmm(weights_TE[:, 1:].unsqueeze(1), down).squeeze(1))
