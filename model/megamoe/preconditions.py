"""What a MegaMoE launch asks of its arguments; each breach is one line that says what is right.

The checks are those of the kernels that vLLM 0.33 brings (vllm.third_party.deep_gemm: the host
assertions of csrc/apis/mega_moe.hpp, and include/deep_gemm/scheduler/mega_moe.cuh), in words. The
kernels do not look at the expert ids: a wrong one writes into a peer's memory there, so it is
refused here.
"""

from typing import TYPE_CHECKING

import torch

from model.megamoe.layout import Weights

if TYPE_CHECKING:
    from model.megamoe.deep_gemm import SymmBuffer

HIDDEN_MULTIPLE = 256
"""Of the hidden size: two thread blocks of a cluster take 128 columns each."""
INTERMEDIATE_MULTIPLE = 128
"""Of an expert's width, likewise, over gate and up."""
MAX_TOPK = 32
"""Experts of a token: one lane of a warp each."""
_SCALED_VALUES = 128
"""Weights of a row whose scales share an int32."""


class PreconditionError(ValueError):
    """A launch that the real kernel would refuse, or that would damage it."""


def check_buffer(
    *, ranks: int, experts: int, tokens: int, top_k: int, hidden: int, intermediate: int
) -> None:
    """Sizes of a symmetric buffer: for `tokens` rows a rank, and a group of `ranks`."""
    if hidden <= 0 or hidden % HIDDEN_MULTIPLE:
        raise PreconditionError(
            f"hidden size {hidden}: MegaMoE takes multiples of {HIDDEN_MULTIPLE}"
        )
    if intermediate <= 0 or intermediate % INTERMEDIATE_MULTIPLE:
        raise PreconditionError(
            f"expert width {intermediate}: MegaMoE takes multiples of {INTERMEDIATE_MULTIPLE}"
        )
    if experts <= 0 or experts % ranks:
        raise PreconditionError(
            f"{experts} experts do not divide over the {ranks} ranks of the buffer's group"
        )
    if not 0 < top_k <= min(MAX_TOPK, experts):
        raise PreconditionError(
            f"top-k {top_k}: MegaMoE takes 1 to {min(MAX_TOPK, experts)} experts a token here"
        )
    if tokens <= 0:
        raise PreconditionError(f"a buffer for {tokens} tokens a rank; it needs room for one")


def check_launch(
    y: torch.Tensor,
    l1: Weights,
    l2: Weights,
    buffer: "SymmBuffer",
    stats: torch.Tensor | None,
) -> None:
    """The arguments of a launch on a buffer that `check_buffer` has passed."""
    for name, weights in (("l1", l1), ("l2", l2)):
        _check_weights(name, weights, buffer)
    _check_output(y, buffer)
    _check_routing(buffer.topk_idx[: y.shape[0]], buffer.num_experts)
    local = buffer.num_experts // buffer.ranks
    if stats is not None and (stats.dtype != torch.int32 or list(stats.shape) != [local]):
        raise PreconditionError(
            f"statistics are {_name(stats.dtype)} {list(stats.shape)}; they must be int32 [{local}]"
        )


def _check_output(y: torch.Tensor, buffer: "SymmBuffer") -> None:
    if y.dim() != 2 or y.shape[1] != buffer.hidden:
        raise PreconditionError(
            f"y is {list(y.shape)}; it must be [tokens, hidden size {buffer.hidden}]"
        )
    if y.dtype != torch.bfloat16:
        raise PreconditionError(f"y is {_name(y.dtype)}; it must be bfloat16")
    if not y.is_contiguous():
        raise PreconditionError(f"y has strides {y.stride()}; it must be contiguous")
    if y.shape[0] > buffer.num_max_tokens_per_rank:
        raise PreconditionError(
            f"{y.shape[0]} tokens on this rank; the symmetric buffer has room for "
            f"{buffer.num_max_tokens_per_rank}"
        )


def _check_weights(name: str, given: Weights, buffer: "SymmBuffer") -> None:
    scaled = buffer.scaled
    if isinstance(given, torch.Tensor) == scaled:
        raise PreconditionError(
            f"{name} weights come {'without' if scaled else 'with'} scales; a buffer for "
            f"{buffer.mma_type} takes them {'with' if scaled else 'without'}"
        )
    weights = given if isinstance(given, torch.Tensor) else given[0]
    dtype = torch.float8_e4m3fn if scaled else torch.bfloat16
    if weights.dtype != dtype:
        raise PreconditionError(
            f"{name} weights are {_name(weights.dtype)}; a buffer for {buffer.mma_type} goes "
            f"with {_name(dtype)}"
        )
    shape = buffer.weight_shape(name)
    if list(weights.shape) != shape:
        raise PreconditionError(
            f"{name} weights are {list(weights.shape)}; a buffer for {buffer.num_experts} experts "
            f"over {buffer.ranks} ranks goes with {shape}"
        )
    if not weights.is_contiguous():
        raise PreconditionError(
            f"{name} weights have strides {weights.stride()}; they must be contiguous"
        )
    if not isinstance(given, torch.Tensor):
        _check_scales(name, given[1], shape)


def _check_scales(name: str, scales: torch.Tensor, shape: list[int]) -> None:
    experts, rows, columns = shape
    wanted = [experts, rows, columns // _SCALED_VALUES]
    if scales.dtype != torch.int32 or list(scales.shape) != wanted:
        raise PreconditionError(
            f"{name} scales are {_name(scales.dtype)} {list(scales.shape)}; they must be int32 "
            f"{wanted}, four scale codes in each"
        )
    strides = (rows * wanted[2], 1, rows)
    if scales.stride() != strides:
        raise PreconditionError(
            f"{name} scales have strides {scales.stride()}; rows must be innermost: {strides}"
        )


def _check_routing(ids: torch.Tensor, num_experts: int) -> None:
    wrong = (ids < -1) | (ids >= num_experts)
    if wrong.any():
        token, slot = wrong.nonzero()[0].tolist()
        raise PreconditionError(
            f"token {token}, slot {slot}: expert id {int(ids[token, slot])}; ids are 0 to "
            f"{num_experts - 1}, or -1 for none"
        )
    in_order = ids.sort(dim=-1).values
    twice = (in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] >= 0)
    if twice.any():
        token, at = twice.nonzero()[0].tolist()
        raise PreconditionError(
            f"token {token} chooses expert {int(in_order[token, at])} twice; "
            "its experts must differ"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
