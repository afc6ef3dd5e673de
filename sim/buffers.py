"""What the transport does to a caller's tensors: exact comparison, poison, writes, overlap."""

from __future__ import annotations

import ctypes
import math

import torch

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_A_FEW = 4096
"""Elements of a tensor that is compared by a copy of its bytes, at half of a comparison's cost."""

# Signalling NaNs: arithmetic turns them into quiet ones, so that even `x += 1` changes the bits.
_POISON = {
    torch.float16: 0x7D01,
    torch.bfloat16: 0x7FA1,
    torch.float32: 0x7FA00001,
    torch.float64: 0x7FF4000000000001,
}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the tensor's elements as integers of their size; any shape, strides and dtype.

    Compared as these, NaN equals itself, -0.0 is not 0.0, and a boolean's byte is what it is.
    """
    # A call that changes nothing costs as much as one that does.
    plain = tensor.detach() if tensor.requires_grad else tensor
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    if plain.is_neg():
        plain = plain.resolve_neg()
    return plain.view(_SAME_SIZE[plain.element_size()])


def memory(tensor: torch.Tensor) -> bytes | None:
    """The bytes of a tensor's elements in order, as a copy; None if they do not lie so in the
    host's memory."""
    if not (tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous()):
        return None
    if tensor.is_neg() or tensor.is_conj():
        return None
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.numel() else b""


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits; see `bits`."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.numel() <= _A_FEW:
        one, other = memory(a), memory(b)
        if one is not None and other is not None:
            return one == other
    return torch.equal(bits(a), bits(b))


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values in memory of their own."""
    return tensor.detach().clone()


def write(target: torch.Tensor, source: torch.Tensor) -> None:
    """Write as a transport does: no autograd sees it, and inference mode does not forbid it."""
    with torch.inference_mode() if target.is_inference() else torch.no_grad():
        target.copy_(source if source.shape == target.shape else source.reshape(target.shape))


def poison(tensor: torch.Tensor) -> None:
    """Fill with values that show when they are read: NaN, or for signed integers max - 2.

    Booleans and unsigned integers have no value that would be out of place, and are left alone.
    """
    dtype = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
    value: float
    if dtype in _POISON:
        tensor, value = bits(tensor), _POISON[dtype]
    elif dtype.is_floating_point:
        value = math.nan
    elif dtype.is_signed:
        value = torch.iinfo(dtype).max - 2
    else:
        return
    with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
        tensor.fill_(value)


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses [start, end) between which all elements of a non-empty tensor lie."""
    start = tensor.data_ptr()
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def may_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """False only if the tensors share no memory; interleaved views may share none either."""
    (a_start, a_end), (b_start, b_end) = extent(a), extent(b)
    return a_start < b_end and b_start < a_end


def surely_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True only if the tensors share memory; said of contiguous tensors only."""
    return a.is_contiguous() and b.is_contiguous() and may_overlap(a, b)
