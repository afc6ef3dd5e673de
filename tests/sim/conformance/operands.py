"""Random operands from a seed, and their values as numpy sees them.

An operand depends on (seed, stream, rank) and its kind alone, so any process, and the reference,
can make the operand of every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[Any]

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FLOAT8 = torch.float8_e4m3fn
INTEGERS = (torch.int8, torch.int32, torch.int64, torch.uint8)
"""The integers that gloo takes too; it refuses int16."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What a program's operands are like."""

    dtype: torch.dtype = torch.float32
    values: Literal["bits", "whole", "real"] = "bits"
    """bits: any bit pattern, NaNs included; for what only moves. whole: any integers, and for
    floats +-0.5, 1, 2, with which sums and products of four ranks are exact in every dtype. real:
    floats of both signs and magnitude 0.5 to 2, so that neither overflow nor underflow occurs."""
    layout: Literal["packed", "transposed", "strided"] = "packed"

    def tensor(self, seed: int, rank: int, shape: tuple[int, ...], stream: int = 0) -> torch.Tensor:
        """The operand number `stream` of `rank`."""
        generator = torch.Generator().manual_seed((seed * 1009 + stream) * 1009 + rank)
        count = int(np.prod(shape, dtype=np.int64))
        return self._arranged(self._flat(count, generator).reshape(shape))

    def _flat(self, count: int, generator: torch.Generator) -> torch.Tensor:
        dtype = self.dtype
        if dtype is torch.bool:
            return torch.randint(0, 2, (count,), generator=generator).bool()
        if self.values == "bits":
            raw = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator)
            return raw.to(torch.uint8).view(dtype)
        if not dtype.is_floating_point:
            info = torch.iinfo(dtype)
            high = min(info.max, 2**62)
            low = max(info.min, -high)
            return torch.randint(low, high, (count,), generator=generator).to(dtype)
        sign = torch.randint(0, 2, (count,), generator=generator) * 2 - 1
        if self.values == "whole":
            size = 2.0 ** torch.randint(-1, 2, (count,), generator=generator)
        else:
            size = torch.rand(count, generator=generator, dtype=torch.float64) * 1.5 + 0.5
        return (sign * size).to(dtype)

    def _arranged(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values in this kind's memory layout; what lies between strides is not zero."""
        if self.layout == "packed" or tensor.dim() == 0:
            return tensor
        if self.layout == "transposed":
            return tensor.movedim(0, -1).contiguous().movedim(-1, 0)
        room = torch.ones(*tensor.shape[:-1], tensor.shape[-1] * 2 + 1, dtype=torch.uint8)
        return room.to(tensor.dtype)[..., 1::2].copy_(tensor)


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, as a new flat uint8 tensor."""
    # A copy, since a tensor of one element counts as contiguous whatever its strides.
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    return flat.copy_(tensor.detach().reshape(-1)).view(torch.uint8)


def bits(tensor: torch.Tensor) -> Array:
    """The tensor's bit patterns as unsigned integers of its item size; booleans as 0 or 1."""
    wide: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
    packed = raw_bytes(tensor).numpy()
    if tensor.dtype is torch.bool:  # gloo's sum of booleans leaves bytes above 1
        packed = (packed != 0).astype(np.uint8)
    found: Array = packed.view(wide[tensor.element_size()]).reshape(tuple(tensor.shape))
    return found


def numbers(tensor: torch.Tensor) -> Array:
    """The tensor's values: floats of any width as float64, the rest in its own dtype."""
    if tensor.dtype is torch.bool:
        return bits(tensor).astype(np.bool_)
    values = tensor.detach().double() if tensor.dtype.is_floating_point else tensor
    return values.contiguous().numpy()


def magnitudes(tensor: torch.Tensor) -> Array:
    """Absolute values of `numbers`, for rounding bounds."""
    return np.abs(numbers(tensor))
