"""Tiny MiniMax-M3 models that MegaMoE can run, and their checkpoints in MXFP8."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from model.megamoe import mxfp8
from model.megamoe.preconditions import HIDDEN_MULTIPLE, INTERMEDIATE_MULTIPLE
from model.tiny import TinyM3

_SCALE = ".weight_scale_inv"


@dataclass(frozen=True, kw_only=True)
class MegaTinyM3(TinyM3):
    """A `TinyM3` of the smallest sizes that MegaMoE's kernel takes."""

    hidden_size: int = HIDDEN_MULTIPLE
    intermediate_size: int = INTERMEDIATE_MULTIPLE
    expert_dtype: str = "bf16"
    """Format of the checkpoint's routed experts, bf16 or mxfp8; nothing else is quantised."""

    def text_config(self) -> dict[str, Any]:
        """As `TinyM3`'s, with the experts' format."""
        return super().text_config() | {"expert_dtype": self.expert_dtype}


def quantise_experts(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A checkpoint whose routed experts are MXFP8, from one whose are not.

    Each "...experts.{e}.w{1,2,3}.weight" [N, K] becomes float8_e4m3fn [N, K], followed by its
    scale codes "...weight_scale_inv", uint8 [N, K / 32].
    """
    quantised: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if not _is_routed(name):
            quantised[name] = weight
            continue
        elements, scales = mxfp8.quantise(weight)
        quantised[name] = elements
        quantised[name.removesuffix(".weight") + _SCALE] = scales
    return quantised


def dequantise_experts(
    weights: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """The plain checkpoint that a quantised one stands for: what a reference computes with."""
    plain: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if name.endswith(_SCALE):
            continue
        scales = weights.get(name.removesuffix(".weight") + _SCALE)
        plain[name] = weight if scales is None else mxfp8.dequantise(weight, scales, dtype)
    return plain


def _is_routed(name: str) -> bool:
    return ".block_sparse_moe.experts." in name
