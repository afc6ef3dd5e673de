"""Where rounding happens: a stated local bound at every operation of the model.

The reference calls `rounding(y, magnitude, terms, kind)` after every operation. With `EXACT`
nothing happens. With `Perturbed` the result is moved by as much as a subject of a given
precision could have moved it *in that one operation*; how far this reaches in later taps is
then measured, not derived (the method of TTrace: local bounds stated, propagation measured by
perturbation).
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

_UNIT_ROUNDOFF = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
}


class Kind(Enum):
    """Which roundings a subject makes in an operation."""

    ACCUMULATOR = "arithmetic in the accumulator's precision, result kept in it"
    STORED = "as ACCUMULATOR, then rounded once to the storage dtype"
    REDUCED = "an all-reduce of partial sums that each rank holds in the storage dtype"
    QUANTISED = "rounded to MXFP8 before a product, where a subject's experts do so"
    INDEXED = "rounded to bfloat16, in which the indexer of sparse attention keeps queries and keys"


class Rounding(Protocol):
    """What happens to the result of each operation.

    `probes` is the size of the leading dim P of every activation. Probe 0 is never changed.
    """

    @property
    def probes(self) -> int: ...

    @property
    def quantises(self) -> bool:
        """Whether the routed experts round their operands to MXFP8."""
        ...

    def __call__(self, y: Tensor, magnitude: Tensor, terms: int, kind: Kind) -> Tensor:
        """Return y [P, ...] as a subject might have rounded it.

        magnitude, shaped as y: the sum of the absolute values of the terms of a reduction (for
        a linear layer |x| @ |W|^T); |y| if nothing is reduced; for REDUCED the size of the
        ranks' partial sums, see `Perturbed`; for QUANTISED the largest |y| of each element's
        block. terms: length of the reduction, or number of
        elementary roundings.
        """
        ...


class _Exact:
    probes = 1
    quantises = False

    def __call__(self, y: Tensor, magnitude: Tensor, terms: int, kind: Kind) -> Tensor:
        return y


EXACT: Rounding = _Exact()
"""No rounding beyond float64's own; one probe."""


def unit_roundoff(dtype: torch.dtype) -> float:
    """u = 2^-p for a format with p significant bits, rounding to nearest."""
    if dtype not in _UNIT_ROUNDOFF:
        known = ", ".join(str(d).removeprefix("torch.") for d in _UNIT_ROUNDOFF)
        raise ValueError(f"no unit roundoff known for {dtype}; use one of {known}")
    return _UNIT_ROUNDOFF[dtype]


def gamma(terms: int, u: float) -> float:
    """Size of the relative error of n roundings: exp(sqrt(n) u + n u^2 / (1 - u)) - 1.

    Source: N. J. Higham and T. Mary, A New Approach to Probabilistic Rounding Error Analysis,
    SIAM J. Sci. Comput. 41 (2019), section 2, with lambda = 1 (`safety` of `bounds` is the
    lambda). It stands where the worst case has n u / (1 - n u) (Higham, Accuracy and Stability
    of Numerical Algorithms, Lemma 3.1). That one is never met: it made bounds hundreds of
    times the error in float32, and larger than the tap itself in bfloat16.
    """
    return math.expm1(math.sqrt(terms) * u + terms * u * u / (1 - u))


class Perturbed:
    """Noise of random sign and the full local error as amplitude, on all probes but probe 0.

    amplitude, with gamma as above:
      ACCUMULATOR  gamma(terms, u_acc) * magnitude
      STORED       gamma(terms, u_acc) * magnitude + u_store * |y|
      REDUCED      u_store * |y| for one rank; for R ranks u_store * sqrt(R + 1) * m, with
                   m = max(|y|, magnitude) and magnitude the root of the sum of the squared
                   terms. The terms spread over R partial sums p_r in a way that the reference
                   need not know: sum p_r^2 is about the sum of the squared terms, so storing
                   the partials costs u_store * m together (independent errors add in squares),
                   R - 1 additions of running sums no larger than m cost u_store * sqrt(R - 1)
                   * m, and one is to spare for sums that are stored before they are reduced.
      QUANTISED    max(2^-4 |y|, 2^-10 / 224 * magnitude): E4M3 has 4 significant bits, and below
                   2^-6 of the block's scale it is fixed-point with spacing 2^-9; the scale is
                   less than 1/224 of the block's largest magnitude (OCP MX v1.0, with the scale
                   rounded up, as vLLM's staging kernel does).
      INDEXED      2^-8 * |y|, whatever u_store is: vLLM's indexer cache is bfloat16 in a model
                   of any dtype (its `indexer_kv_dtype`, left as it is).
    """

    def __init__(
        self,
        *,
        u_store: float,
        u_acc: float,
        ranks: int,
        generator: torch.Generator,
        probes: int = 1,
        quantises: bool = False,
    ) -> None:
        """probes: number of perturbed runs; the leading dim has one more (probe 0, exact)."""
        if ranks < 1 or probes < 1:
            raise ValueError(f"ranks {ranks} and probes {probes} must be at least 1")
        self._u_store = u_store
        self._u_acc = u_acc
        self._ranks = ranks
        self._generator = generator
        self._probes = probes + 1
        self._quantises = quantises

    @property
    def probes(self) -> int:
        return self._probes

    @property
    def quantises(self) -> bool:
        return self._quantises

    def amplitude(self, y: Tensor, magnitude: Tensor, terms: int, kind: Kind) -> Tensor:
        """The local bound on the error of this one operation, elementwise, shaped as y."""
        if kind is Kind.QUANTISED:
            return torch.maximum(2.0**-4 * y.abs(), 2.0**-10 / 224 * magnitude)
        if kind is Kind.INDEXED:
            return _UNIT_ROUNDOFF[torch.bfloat16] * y.abs()
        if kind is Kind.REDUCED and self._ranks > 1:
            return self._u_store * math.sqrt(self._ranks + 1) * torch.maximum(y.abs(), magnitude)
        if kind is Kind.REDUCED:
            return self._u_store * y.abs()
        local = gamma(terms, self._u_acc) * magnitude
        return local + self._u_store * y.abs() if kind is Kind.STORED else local

    def __call__(self, y: Tensor, magnitude: Tensor, terms: int, kind: Kind) -> Tensor:
        coin = torch.empty_like(y).uniform_(-1.0, 1.0, generator=self._generator)
        noise = self.amplitude(y, magnitude, terms, kind).copysign(coin)
        noise[0] = 0.0
        return y + noise
