"""The two GEMMs and the activation of this rank's experts, as the MegaMoE kernels compute them.

Sums run in float32 from the stored weights. Results are rounded where the kernels store or round
(vLLM 0.33's deep_gemm, sm100_bf16_mega_moe.cuh and sm100_fp8_fp4_mega_moe.cuh): gate and up to
bfloat16 before the activation; the activation, times the routing weight, to bfloat16 or MXFP8; and
each expert's result to bfloat16.
"""

from dataclasses import dataclass

import torch

from model.megamoe import layout, mxfp8


@dataclass(frozen=True, kw_only=True)
class Activation:
    """SwiGLU: min(g, clamp) * sigmoid(alpha * min(g, clamp)) * (clip(u, -clamp, clamp) + beta)."""

    clamp: float
    """Infinite for none."""
    alpha: float
    beta: float

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """gate, up: float32 [N, I] -> float32 [N, I]."""
        gate = gate.clamp(max=self.clamp)
        up = up.clamp(-self.clamp, self.clamp)
        return gate * torch.sigmoid(self.alpha * gate) * (up + self.beta)


def run_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    local_ids: torch.Tensor,
    l1: layout.Weights,
    l2: layout.Weights,
    activation: Activation,
) -> torch.Tensor:
    """What each row's expert makes of it, times its routing weight: bfloat16 [N, H].

    x: float32 [N, H], one row for each chosen (token, expert); weights: float32 [N]; local_ids:
    int64 [N], below the number of local experts; l1, l2: in the kernel's layout, `layout.Weights`.
    """
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    quantised = not isinstance(l1, torch.Tensor)
    for expert in local_ids.unique().tolist():
        rows = (local_ids == expert).nonzero().squeeze(-1)
        (w1,), (w3,) = layout.gate_and_up(layout.of_expert(l1, expert))
        (w2,) = layout.down(layout.of_expert(l2, expert))
        gate, up = (_bfloat16(x[rows] @ matrix.T) for matrix in (w1, w3))
        # The weight goes in before the second GEMM, which is linear.
        hidden = activation(gate, up) * weights[rows].unsqueeze(-1)
        stored = mxfp8.dequantise(*mxfp8.quantise(hidden)) if quantised else _bfloat16(hidden)
        out[rows] = (stored @ w2.T).to(torch.bfloat16)
    return out


def _bfloat16(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).to(torch.float32)
