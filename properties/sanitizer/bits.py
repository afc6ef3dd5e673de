"""Exact comparisons of tensors: by their bits, never within a tolerance."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch

from sim.buffers import bits, memory, same_bits

Parts = Sequence[torch.Tensor]
"""One rank's operand: a tensor, or the tensors that it is made of, one after the other."""


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements as bytes, [numel * itemsize] uint8."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def equal(one: Parts, other: Parts) -> bool:
    """Whether two operands have the same shapes, dtypes and bits (-0.0 is not 0.0)."""
    return len(one) == len(other) and all(same_bits(a, b) for a, b in zip(one, other, strict=True))


def digest(parts: Parts) -> bytes:
    """A fingerprint of dtype and bits; shapes do not count, so that views have the same one."""
    found = hashlib.blake2b(str(parts[0].dtype).encode(), digest_size=16)
    for part in parts:
        content = memory(part)
        found.update(_bytes(part).numpy().data if content is None else content)
    return found.digest()


def telling(parts: Parts) -> bool:
    """Whether equal bits on all ranks say that the tensors *are* the same.

    They say nothing where ranks may well come to equal values on their own: integers and sizes,
    one element, whole numbers (counts, masks, a barrier made of ones), and what is the same all
    along a dim (constants; a warm-up on one repeated token).
    """
    if not all(part.is_floating_point() for part in parts):
        return False
    return any(_telling(part.detach() if part.requires_grad else part) for part in parts)


_A_FEW = 32
"""Elements that are looked at first: one that is no whole number is enough."""


def _telling(tensor: torch.Tensor) -> bool:
    if tensor.numel() < 2:
        return False
    if tensor.dtype.itemsize > 1 and tensor.is_contiguous() and _plainly_telling(tensor):
        return True
    if tensor.dtype.itemsize == 1:  # float8 lacks comparisons
        tensor = tensor.to(torch.float32)
    flat = tensor.reshape(-1)
    if not _fractional(flat[:_A_FEW]) and not _fractional(flat[_A_FEW:]):
        return False
    whole = bits(tensor)
    return not any(
        size > 1 and _constant_along(whole, dim) for dim, size in enumerate(tensor.shape)
    )


def _plainly_telling(tensor: torch.Tensor) -> bool:
    """Whether a few elements show it already, as they do in almost all tensors: one is no whole
    number, and along each dim the first two differ."""
    flat = tensor.reshape(-1)
    few = flat[:_A_FEW].tolist()
    if not any(number % 1 for number in few if math.isfinite(number)):
        return False
    first = few[0]
    if first != first:
        return False
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        if size > 1:
            second = few[step] if step < len(few) else flat[step].item()
            if second == first or second != second:
                return False
    return True


def _fractional(flat: torch.Tensor) -> bool:
    """Whether an element is no whole number."""
    return not torch.equal(flat, flat.trunc())


def _constant_along(whole: torch.Tensor, dim: int) -> bool:
    """Whether all slices of a dim are equal. The first two differ in almost all tensors."""
    first = whole.narrow(dim, 0, 1)
    return torch.equal(first, whole.narrow(dim, 1, 1)) and torch.equal(
        whole, first.expand(whole.shape)
    )
