"""Which element of the checkpoint each element of a rank's parameters was loaded from.

The elements of the checkpoint are numbered. The model's own loaders are given checkpoints whose
values spell these numbers, one digit a load, so that what arrives in a parameter says where it
comes from, whichever way the loader took. Before each load every parameter is filled with a
value that is no digit: where it is still there afterwards, nothing was loaded.

A digit is the bit pattern of a finite value of the narrowest format that occurs, so it passes
unchanged through every loader that copies values.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

ZERO_FILLED, UNWRITTEN, NO_ELEMENT = 0, -1, -2
"""Instead of an element's number: filled with zero, left as it was, none of the checkpoint's."""

# The integer view of a float format, and its finite values from zero up, whose patterns count up.
_PATTERNS = {
    torch.float8_e4m3fn: (torch.uint8, 0x7F),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
    torch.float32: (torch.int32, 0x7F800000),
}
_UNWRITTEN_BYTE = 255


@dataclass(frozen=True, kw_only=True, eq=False)
class Numbering:
    """Numbers of a checkpoint's elements, from 1, tensor after tensor, and their spelling.

    Make one for a checkpoint and give it to all ranks: the digits are worked out once.
    """

    first: dict[str, int]
    """The number of each tensor's first element, in the checkpoint's order."""
    shapes: dict[str, torch.Size]
    dtypes: dict[str, torch.dtype]

    @classmethod
    def of(cls, weights: Mapping[str, torch.Tensor]) -> "Numbering":
        """The numbering of a full checkpoint, of which only shapes and dtypes matter.

        Raises ValueError for a dtype that cannot spell digits.
        """
        first, number = {}, 1
        for name, weight in weights.items():
            floating = weight.dtype in _PATTERNS or weight.dtype == torch.float64
            if not floating and weight.dtype != torch.uint8:
                raise ValueError(f"{name} is {weight.dtype}; use a float format or uint8")
            first[name] = number
            number += weight.numel()
        return cls(
            first=first,
            shapes={name: weight.shape for name, weight in weights.items()},
            dtypes={name: weight.dtype for name, weight in weights.items()},
        )

    @cached_property
    def total(self) -> int:
        """Elements of the checkpoint."""
        return sum(shape.numel() for shape in self.shapes.values())

    def numbers(self, name: str) -> torch.Tensor:
        """The numbers of a tensor's elements, int64, of its shape."""
        shape, first = self.shapes[name], self.first[name]
        return torch.arange(first, first + shape.numel()).view(shape)

    @cached_property
    def narrowest(self) -> torch.dtype:
        """The float format whose patterns are the digits."""
        used = set(self.dtypes.values())
        return next((dtype for dtype in _PATTERNS if dtype in used), torch.float32)

    @cached_property
    def base(self) -> int:
        """How many digits there are."""
        patterns = _PATTERNS[self.narrowest][1]
        return min(patterns, _UNWRITTEN_BYTE) if torch.uint8 in self.dtypes.values() else patterns

    @cached_property
    def checkpoints(self) -> list[dict[str, torch.Tensor]]:
        """The checkpoints to load one after the other, lowest digit first."""
        made, scale = [], 1
        while scale <= self.total:
            made.append({name: self._spelt(name, scale) for name in self.first})
            scale *= self.base
        return made

    def _spelt(self, name: str, scale: int) -> torch.Tensor:
        digits, dtype = self.numbers(name) // scale % self.base, self.dtypes[name]
        if dtype == torch.uint8:
            return digits.to(dtype)
        integers, _ = _PATTERNS[self.narrowest]
        return digits.to(integers).view(self.narrowest).to(dtype)

    def read(self, value: torch.Tensor) -> torch.Tensor:
        """The digits in a parameter, int64, or `UNWRITTEN` or `NO_ELEMENT`.

        Integers of several bytes hold a digit in each, side by side in the last dim.
        """
        if not value.is_floating_point():
            # Not `contiguous`: it keeps a stride that no view can take where the last dim is 1.
            packed = value.new_empty(value.shape).copy_(value)
            digits = packed.view(torch.uint8).to(torch.int64)
            unwritten, wrong = digits == _UNWRITTEN_BYTE, digits >= self.base
        else:
            integers, patterns = _PATTERNS[self.narrowest]
            narrow = value.to(self.narrowest)
            digits = narrow.view(integers).to(torch.int64)
            unwritten = value.isnan()
            wrong = (digits < 0) | (digits >= min(patterns, self.base))
            if value.dtype != self.narrowest:
                wrong |= narrow.to(torch.float64) != value.to(torch.float64)
        return digits.masked_fill(wrong, NO_ELEMENT).masked_fill(unwritten, UNWRITTEN)


@dataclass(frozen=True, kw_only=True, eq=False)
class Loaded:
    """What one rank's model has loaded."""

    parameters: dict[str, torch.Tensor]
    """For each parameter the numbers of its elements in plain order: int64 of the parameter's
    shape, scale codes one by one; `ZERO_FILLED`, `UNWRITTEN` or `NO_ELEMENT` where there is no
    number."""
    slots: dict[str, tuple[int, ...]]
    """For each parameter of routed experts the expert that the model expects in each slot."""


@torch.no_grad()
def trace(model: nn.Module, numbering: Numbering) -> Loaded:
    """Load the numbers into a model that has not processed its weights yet.

    The model is left as it was; load its real weights afterwards. Call it within the rank.
    """
    own = dict(model.named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in own.items()}
    numbers: dict[str, torch.Tensor] = {}
    scale = 1
    for checkpoint in numbering.checkpoints:
        for parameter in own.values():
            _unwrite(parameter)
        model.load_weights(checkpoint.items())  # type: ignore[operator]
        for name, parameter in own.items():
            digits = numbering.read(parameter.detach())
            known = numbers.get(name, torch.zeros_like(digits))
            # A digit that is missing once spoils the number for good.
            spoilt = torch.minimum(digits, known)
            numbers[name] = torch.where(spoilt < 0, spoilt, known + digits * scale)
        scale *= numbering.base
    for name, parameter in own.items():
        parameter.copy_(before[name])
    slots = {}
    for name, module in model.named_modules():
        experts = _slots(module)
        for leaf, parameter in module.named_parameters(recurse=False) if experts else ():
            full = f"{name}.{leaf}"
            if parameter.dim() == 1:
                continue  # the router's bias, which is of all experts
            slots[full] = tuple(experts)
            if hasattr(module, "get_symm_buffer"):
                numbers[full] = _plain_order(leaf, numbers[full])
    return Loaded(parameters=numbers, slots=slots)


def _unwrite(parameter: torch.Tensor) -> None:
    if parameter.is_floating_point():
        parameter.fill_(torch.nan)
    else:
        parameter.fill_(-1 if parameter.dtype.is_signed else _UNWRITTEN_BYTE)


def _slots(module: Any) -> list[int]:
    """The expert of each slot of a module of routed experts, by its own map; else nothing."""
    if hasattr(module, "experts_start_idx"):
        start, slots = int(module.experts_start_idx), int(module.num_local_experts)
        # vLLM numbers copies of experts on from the experts themselves.
        return [slot % int(module.num_logical_experts) for slot in range(start, start + slots)]
    if not hasattr(module, "_expert_map"):
        return []
    if module._expert_map is None:
        return list(range(int(module.local_num_experts)))
    return list(_inverse(module._expert_map))


def _inverse(expert_map: torch.Tensor) -> Iterator[int]:
    """expert_map: int [E], an expert's slot or below 0. Yields each slot's expert."""
    experts = {slot: expert for expert, slot in enumerate(expert_map.tolist()) if slot >= 0}
    for slot in sorted(experts):
        yield experts[slot]


def _plain_order(leaf: str, numbers: torch.Tensor) -> torch.Tensor:
    """MegaMoE's kernel layout undone, which `model.megamoe.layout` describes: [E, N, ...]."""
    if leaf.endswith("_scale"):
        numbers = numbers.unflatten(1, (-1, 32, 4)).transpose(2, 3).flatten(1, 3)
    if leaf.startswith("w13"):
        numbers = numbers.unflatten(1, (-1, 2, 8)).transpose(1, 2).flatten(1, 3)
    return numbers
