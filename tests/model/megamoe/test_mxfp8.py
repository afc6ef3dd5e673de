"""The MXFP8 format, bit by bit from its definition, and vLLM's choice of scale."""

import bisect
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model.megamoe import mxfp8

LARGEST_FLOAT32 = 3.4028234663852886e38


def e4m3(code: int) -> float:
    """OCP MX v1.0, 5.3.1: sign, 4 exponent bits of bias 7, 3 mantissa bits; S.1111.111 is NaN."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 0xF, code & 0x7
    if exponent == 0xF and mantissa == 0x7:
        return math.nan
    if exponent == 0:
        return math.copysign(mantissa / 8 * 2.0**-6, sign)
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def e8m0(code: int) -> float:
    """OCP MX v1.0, 5.4.1: 2^(code - 127), and 255 is NaN."""
    return math.nan if code == 255 else 2.0 ** (code - 127)


def same(a: float, b: float) -> bool:
    both_nan = math.isnan(a) and math.isnan(b)
    return both_nan or (a == b and math.copysign(1, a) == math.copysign(1, b))


ELEMENTS = [e4m3(code) for code in range(256)]
FINITE = sorted({value for value in ELEMENTS if not math.isnan(value)})


def elements(codes: list[int]) -> torch.Tensor:
    return torch.tensor(codes, dtype=torch.uint8).view(torch.float8_e4m3fn)


def test_every_pair_of_element_and_scale_has_its_value() -> None:
    every = elements(list(range(256))).expand(256, 256)
    scales = torch.arange(256, dtype=torch.uint8).unsqueeze(-1).expand(256, 8).contiguous()
    values = mxfp8.dequantise(every.contiguous(), scales, torch.float64)
    for scale in range(256):
        for code, value in enumerate(values[scale].tolist()):
            assert same(value, ELEMENTS[code] * e8m0(scale)), (scale, code, value)


def test_the_elements_have_the_extremes_that_the_format_states() -> None:
    assert max(FINITE) == 448.0 == mxfp8.ELEMENT_MAX and min(FINITE) == -448.0
    assert sum(math.isnan(value) for value in ELEMENTS) == 2
    positive = [value for value in FINITE if value > 0]
    assert positive[0] == 2.0**-9 and len(positive) == 126


def test_float32_holds_every_value_up_to_scale_246() -> None:
    every = elements(list(range(256)))
    for scale in (0, 127, 246, 247, 255):
        exact = mxfp8.dequantise(every, torch.full((8,), scale, dtype=torch.uint8), torch.float64)
        narrow = mxfp8.dequantise(every, torch.full((8,), scale, dtype=torch.uint8))
        fits = torch.equal(narrow.to(torch.float64).nan_to_num(), exact.nan_to_num())
        assert fits == (scale != 247), scale


def rounded(value: Fraction) -> float:
    """The E4M3 value nearest to `value`; on a tie, the one whose last mantissa bit is 0."""
    above = min(bisect.bisect_left(FINITE, value), len(FINITE) - 1)
    pair = [Fraction(v) for v in FINITE[max(above - 1, 0) : above + 1]]
    distances = [abs(v - value) for v in pair]
    if distances.count(min(distances)) == 2:
        return next(float(v) for v in pair if not ELEMENTS.index(float(abs(v))) & 1)
    return float(pair[distances.index(min(distances))])


def scale_by_definition(block: list[float]) -> int:
    """The smallest power of two s, as a code, with max(1e-4, amax) <= 448 s."""
    floor = float(torch.tensor(1e-4))
    amax = max([floor, *(abs(v) for v in block)])
    return next(c for c in range(1, 255) if Fraction(amax) <= 448 * Fraction(2) ** (c - 127))


def check_block(block: list[float]) -> None:
    x = torch.tensor(block, dtype=torch.float32)
    quantised, scales = mxfp8.quantise(x)
    code = scale_by_definition(x.tolist())
    assert scales.tolist() == [code]
    scale = Fraction(2) ** (code - 127)
    for value, element in zip(x.tolist(), quantised.view(torch.uint8).tolist(), strict=True):
        assert ELEMENTS[element] == rounded(Fraction(value) / scale), value
    moved = (mxfp8.dequantise(quantised, scales, torch.float64) - x.to(torch.float64)).abs()
    limit = mxfp8.error_bound(x)
    assert (moved <= limit).all()
    largest = max(float(torch.tensor(1e-4)), float(x.abs().max()))
    stated = torch.maximum(x.abs().to(torch.float64) / 16, torch.tensor(largest / 224 / 1024))
    assert (limit <= stated * (1 + 1e-6)).all()


@given(
    st.lists(
        st.floats(-LARGEST_FLOAT32 / 2, LARGEST_FLOAT32 / 2, width=32), min_size=32, max_size=32
    )
)
def test_blocks_of_any_numbers_round_to_nearest_even(block: list[float]) -> None:
    check_block(block)


@given(st.lists(st.floats(-4, 4, width=32), min_size=32, max_size=32), st.integers(-30, 30))
def test_blocks_of_activations_round_to_nearest_even(block: list[float], power: int) -> None:
    check_block([math.ldexp(value, power) for value in block])


@pytest.mark.parametrize("power", [-20, 0, 17])
@pytest.mark.parametrize("step", [-1, 0, 1])
def test_the_scale_changes_exactly_at_448(power: int, step: int) -> None:
    edge = torch.tensor(448.0 * 2.0**power)
    toward = torch.tensor(math.inf if step > 0 else 0.0)
    amax = torch.nextafter(edge, toward) if step else edge
    x = torch.zeros(32)
    x[5] = -amax
    quantised, scales = mxfp8.quantise(x)
    assert scales.tolist() == [127 + power + (step > 0)]
    assert float(quantised[5].to(torch.float32)) == (-224.0 if step > 0 else -448.0)


def test_zeros_infinities_and_nan() -> None:
    x = torch.zeros(4, 32)
    x[1, 3], x[1, 4] = math.inf, 1.0
    x[2, 7], x[2, 8] = math.nan, 2.0
    x[3] = -0.0
    quantised, scales = mxfp8.quantise(x)
    # 1e-4 / 448 = 2^-22.1, and the largest scale; a NaN has no part in the scale.
    assert scales.flatten().tolist() == [105, 254, 127 - 7, 105]
    assert not quantised[0].view(torch.uint8).any()
    assert float(quantised[1, 3].to(torch.float32)) == 448.0
    assert math.isnan(float(quantised[2, 7].to(torch.float32)))
    assert float(quantised[2, 8].to(torch.float32)) == 256.0
    assert (quantised[3].view(torch.uint8) == 0x80).all()


def test_scales_pack_in_fours_lowest_byte_first() -> None:
    scales = torch.tensor([[1, 2, 3, 4, 250, 251, 252, 253]], dtype=torch.uint8)
    packed = mxfp8.pack_scales(scales)
    assert [word & 0xFFFFFFFF for word in packed.flatten().tolist()] == [0x04030201, 0xFDFCFBFA]
    assert torch.equal(mxfp8.unpack_scales(packed), scales)
    transposed = packed.T.contiguous().T
    assert torch.equal(mxfp8.unpack_scales(transposed), scales)
