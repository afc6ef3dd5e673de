"""MXFP8: blocks of 32 E4M3 elements that share one power-of-two scale (OCP MX v1.0, 5.2 and 6.3).

An element is 8 bits, sign, 4 exponent bits (bias 7), 3 mantissa bits, without infinities; a scale
is 8 bits, E8M0: 2^(code - 127), with code 255 for NaN. The value of element p in a block of scale
code c is p * 2^(c - 127).
"""

import torch

BLOCK = 32
"""Elements that share a scale, along the last dim."""
ELEMENT_MAX = 448.0
"""Largest E4M3 value, 1.75 * 2^8."""
AMAX_FLOOR = 1e-4
"""A block's largest magnitude counts as at least this, so that a block of zeros has a scale."""

_BIAS = 127
_MANTISSA_BITS = 23
_NAN_SCALE = 255
_SCALES = torch.tensor(
    [2.0 ** (code - _BIAS) for code in range(_NAN_SCALE)] + [torch.nan], dtype=torch.float64
)


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Nearest elements under the scale that vLLM's MegaMoE staging kernel chooses.

    x: [..., K], K a multiple of 32, values of at most float32's precision. Returns elements,
    float8_e4m3fn [..., K], and scale codes, uint8 [..., K / 32].

    With a = max(AMAX_FLOOR, largest |x| of the block), NaN left out, the scale is the smallest
    power of two s with a / s <= 448: the exponent is rounded *up*, so that no finite element
    saturates. (OCP MX's own recipe, floor(log2 a) - 8, is not used: it saturates what lies
    between 448 s and 512 s.) Infinities saturate at 448 s for the largest s; NaN stays NaN.

    Error, for finite x with s < 2^127: |dequantise(quantise(x)) - x| <= `error_bound`, that is
    max(2^-4 |x|, 2^-10 s) <= max(2^-4 |x|, 2^-10 a / 224).

    Proof. The float32 quotient q = a / 448 is correctly rounded, and rounding is monotone, so q
    and a / 448 lie in the same interval (2^(k-1), 2^k], unless a / 448 > 2^k rounds to 2^k. The
    float32 value next above 448 * 2^k is 2^(k-15) away, which makes a / 448 at least
    2^k (1 + 2^-15 / 448) = 2^k (1 + 0.57 * 2^-23); that is nearer to 2^k (1 + 2^-23) than to 2^k.
    So s = 2^k with 224 s < a <= 448 s, whenever q is a normal number, which AMAX_FLOOR sees to.
    Dividing by a power of two is exact here, |x| / s <= 448, and E4M3 rounds to nearest: with 4
    significant bits the relative error is at most 2^-4 where |x| / s >= 2^-6, the smallest normal
    number; below it numbers are 2^-9 apart, so the error is at most 2^-10, times s. And s < a/224.
    """
    blocks = x.to(torch.float32).unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(dim=-1).clamp(min=AMAX_FLOOR)
    quotient_bits = (amax / ELEMENT_MAX).view(torch.int32)
    rounds_up = (quotient_bits & ((1 << _MANTISSA_BITS) - 1)) != 0
    codes = ((quotient_bits >> _MANTISSA_BITS) + rounds_up).clamp(1, _NAN_SCALE - 1)
    inverse = (codes << _MANTISSA_BITS).view(torch.float32).reciprocal()
    scaled = (blocks * inverse.unsqueeze(-1)).clamp(-ELEMENT_MAX, ELEMENT_MAX)
    return scaled.flatten(-2).to(torch.float8_e4m3fn), codes.to(torch.uint8)


def dequantise(
    elements: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The values that elements and scales stand for.

    elements: float8_e4m3fn [..., K]; scales: uint8 [..., K / 32]. float64 holds every value;
    float32 does too for scale codes up to 246, beyond which large elements become infinite.
    """
    scale = _SCALES.to(elements.device, dtype)[scales.to(torch.int64)]
    return (elements.to(dtype).unflatten(-1, (-1, BLOCK)) * scale.unsqueeze(-1)).flatten(-2)


def error_bound(x: torch.Tensor) -> torch.Tensor:
    """Largest |dequantise(quantise(x)) - x|, elementwise, float64 [..., K]; see `quantise`."""
    exact = x.to(torch.float64)
    _, scales = quantise(x)
    half_step = (
        _SCALES.to(x.device)[scales.to(torch.int64)].repeat_interleave(BLOCK, dim=-1) * 2.0**-10
    )
    return torch.maximum(exact.abs() * 2.0**-4, half_step)


def pack_scales(scales: torch.Tensor) -> torch.Tensor:
    """Four scale codes in an int32, the first lowest: uint8 [..., 4 k] -> int32 [..., k]."""
    return scales.contiguous().view(torch.int32)


def unpack_scales(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_scales`: int32 [..., k], of any strides -> uint8 [..., 4 k]."""
    return packed.contiguous().view(torch.uint8)
