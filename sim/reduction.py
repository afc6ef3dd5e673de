"""Reductions over ranks, as pure functions of the ranks' tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

NAMES = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
"""torch's reduce ops."""

_PAIRWISE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "premul_sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
# The usual case, found without further questions.
_WITH_ARITHMETIC = frozenset(
    {torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32}
)
# NCCL sums booleans as "any" and multiplies them as "all"; torch has no arithmetic on them.
_BOOLEAN = {"sum": "bor", "max": "bor", "product": "band", "min": "band"}


@dataclass(frozen=True)
class Reduction:
    """A reduce op by its name, with the factor of a premultiplied sum."""

    name: str
    factor: float | None = None

    @classmethod
    def of(cls, op: Any) -> Reduction:
        """From torch's `ReduceOp` or `ReduceOp.RedOpType`.

        Raises:
            ValueError: an op that is none of torch's.
        """
        plain = _PLAIN.get(getattr(op, "op", op))
        if plain is None:
            raise ValueError(f"{op!r} is no reduce op; use one of torch.distributed.ReduceOp")
        if plain.name != "premul_sum":
            return plain
        return cls(plain.name, float(op.__getstate__()[1]))

    def __str__(self) -> str:
        return self.name if self.factor is None else f"{self.name}({self.factor:g})"


_PLAIN = {getattr(dist.ReduceOp.RedOpType, name.upper()): Reduction(name) for name in NAMES}


def reduce_tensors(tensors: Sequence[torch.Tensor], reduction: Reduction) -> torch.Tensor:
    """The reduction of R tensors of one shape and dtype; a new tensor.

    Summation goes in rank order, in the tensors' own dtype, as one ring would: deterministic,
    and each addition rounds. float8 has no arithmetic in torch and is reduced in float32.

    Raises:
        ValueError: the reduction does not exist for the dtype (avg or arithmetic on booleans).
    """
    dtype = tensors[0].dtype
    if reduction.name == "sum" and dtype in _WITH_ARITHMETIC:
        return _folded(torch.add, tensors)
    name = reduction.name
    if dtype is torch.bool and name in ("sum", "max", "product", "min"):
        name = _BOOLEAN[name]
    elif dtype is torch.bool and name in ("avg", "premul_sum"):
        raise ValueError(f"{name} of boolean tensors is not defined; reduce them as max or min")
    if dtype.is_floating_point and name in ("band", "bor", "bxor"):
        raise ValueError(f"{name} of {dtype} is not defined; bitwise reductions take integers")
    narrow = dtype.is_floating_point and dtype.itemsize == 1
    parts = [t.to(torch.float32) for t in tensors] if narrow else list(tensors)
    if reduction.factor is not None:
        parts = [t * reduction.factor for t in parts]
    total = _folded(_PAIRWISE[name], parts)
    if name == "avg":
        rounding = None if dtype.is_floating_point or dtype.is_complex else "trunc"
        total = torch.div(total, len(parts), rounding_mode=rounding)
    return total.to(dtype)


def _folded(combine: Callable[..., torch.Tensor], parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = combine(parts[0], parts[1]) if len(parts) > 1 else parts[0].clone()
    for part in parts[2:]:
        combine(total, part, out=total)
    return total
