"""The layout in which MegaMoE keeps expert weights, read back into plain matrices.

vLLM's weight loaders write that layout (`DeepGemmMegaMoEExperts._kernel_layout_shard`); the kernel
reads it. Reading it back here shows that what was loaded is what the kernel would multiply with.

L1 rows come in turns of 8: 8 rows of the gate projection (w1), then the same 8 of the up
projection (w3). Scales of MX formats have their rows permuted in addition, within every 128: row
32 j + i is stored at 4 i + j (the order in which tensor memory is copied, "UTCCP").
"""

import torch

from model.megamoe import mxfp8

Weights = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""bfloat16 [local E, N, K], or (float8_e4m3fn [local E, N, K], int32 [local E, N, K / 128])."""

_TURN = 8


def of_expert(weights: Weights, expert: int) -> Weights:
    """The weights of one local expert, in the same form."""
    if isinstance(weights, torch.Tensor):
        return weights[expert : expert + 1]
    elements, scales = weights
    return elements[expert : expert + 1], scales[expert : expert + 1]


def gate_and_up(l1: Weights) -> tuple[torch.Tensor, torch.Tensor]:
    """The gate and the up projections, each float32 [local E, I, H]."""
    values = _values(l1).unflatten(1, (-1, 2, _TURN))
    return values[:, :, 0].flatten(1, 2), values[:, :, 1].flatten(1, 2)


def down(l2: Weights) -> torch.Tensor:
    """The down projections, float32 [local E, H, I]."""
    return _values(l2)


def _values(weights: Weights) -> torch.Tensor:
    """As stored, rows in stored order, without the scales' own permutation: float32 [.., N, K]."""
    if isinstance(weights, torch.Tensor):
        return weights.to(torch.float32)
    elements, packed = weights
    # Stored row 4 i + j of 128 -> row 32 j + i.
    in_order = packed.unflatten(1, (-1, 32, 4)).transpose(2, 3).flatten(1, 3)
    return mxfp8.dequantise(elements, mxfp8.unpack_scales(in_order))
