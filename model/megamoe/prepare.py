"""Input staging of MegaMoE: stands in for the Triton kernel `_prepare_megamoe_inputs_kernel`.

vLLM's `prepare_megamoe_inputs` around it, with its checks, stays vLLM's.
"""

import types
from collections.abc import Callable
from typing import Any

import torch

from model.megamoe import mxfp8


class StagingKernel:
    """Launched as Triton kernels are: `kernel[grid](...)`."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """The kernel for a grid; one call does the work of all its programs."""
        return stage


def stage(
    hidden_states: torch.Tensor,
    x_out: torch.Tensor,
    x_sf: torch.Tensor | None,
    shared_x_sf: torch.Tensor | None,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    is_padding: torch.Tensor | None,
    topk_idx_out: torch.Tensor,
    topk_weights_out: torch.Tensor,
    *_strides_and_sizes: int,
    GROUP_K: int,
    QUANTIZE: bool,
    USE_UE8M0: bool,
    **_launch: Any,
) -> None:
    """Write one launch's inputs into the symmetric buffer's rows.

    hidden_states: [n, H]; topk_ids: int [n, K]; topk_weights: float [n, K]; is_padding: bool [n]
    or None. Of the outputs, x_out is [n, H], in float8_e4m3fn if QUANTIZE; x_sf is int32
    [n, H / 128] then, four E8M0 scale codes of blocks of 32 in each, the first in the lowest byte;
    topk_idx_out is int64 [n, K] and topk_weights_out float32 [n, K]. Rows of padding get id -1 and
    weight 0, and are quantised like all others. Strides are those of the tensors.

    Raises NotImplementedError for what MiniMax-M3 does not use: float32 scales, and scales for a
    shared expert inside the launch.
    """
    if shared_x_sf is not None:
        raise NotImplementedError(
            "the MegaMoE stand-in stages no shared expert; run it beside the launch"
        )
    if not QUANTIZE:
        x_out.copy_(hidden_states)
    elif USE_UE8M0 and GROUP_K == mxfp8.BLOCK and x_sf is not None:
        elements, scales = mxfp8.quantise(hidden_states)
        x_out.copy_(elements)
        x_sf.copy_(mxfp8.pack_scales(scales))
    else:
        raise NotImplementedError(
            f"the MegaMoE stand-in stages mxfp8 (E8M0 scales of blocks of {mxfp8.BLOCK}) and "
            f"bf16, not fp8 with {'E8M0' if USE_UE8M0 else 'float32'} scales of blocks of {GROUP_K}"
        )
    topk_idx_out.copy_(topk_ids)
    topk_weights_out.copy_(topk_weights)
    if is_padding is not None:
        topk_idx_out.masked_fill_(is_padding.unsqueeze(-1), -1)
        topk_weights_out.masked_fill_(is_padding.unsqueeze(-1), 0.0)


def _next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


GRID_FUNCTIONS = types.SimpleNamespace(
    cdiv=lambda a, b: -(-a // b), next_power_of_2=_next_power_of_2
)
"""What the kernel's launcher uses of `triton`."""
