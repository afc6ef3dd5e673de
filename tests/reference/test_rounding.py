"""The local bound: its constants, its formula, and that real rounding stays inside it."""

from __future__ import annotations

import math

import pytest
import torch

from reference import EXACT, Kind, Perturbed, gamma, unit_roundoff

LOW = [torch.float32, torch.bfloat16, torch.float16]


def perturbed(ranks: int = 1, probes: int = 3, u_store: float = 0.25) -> Perturbed:
    return Perturbed(
        u_store=u_store,
        u_acc=0.0625,
        ranks=ranks,
        generator=torch.Generator().manual_seed(0),
        probes=probes,
    )


@pytest.mark.parametrize("dtype", [*LOW, torch.float64])
def test_unit_roundoff_is_half_of_eps(dtype: torch.dtype) -> None:
    assert unit_roundoff(dtype) == torch.finfo(dtype).eps / 2


def test_unit_roundoff_of_an_unknown_dtype_lists_the_known() -> None:
    with pytest.raises(ValueError, match="int8; use one of float64, float32"):
        unit_roundoff(torch.int8)


def test_gamma() -> None:
    u = 2.0**-24
    assert gamma(0, u) == 0.0
    assert gamma(1, u) == pytest.approx(u, rel=1e-6)
    assert gamma(400, u) == pytest.approx(20 * u, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "ranks", "expected"),
    [
        (Kind.ACCUMULATOR, 4, gamma(9, 0.0625) * 5),
        (Kind.STORED, 4, gamma(9, 0.0625) * 5 + 0.25 * 2),
        (Kind.REDUCED, 1, 0.25 * 2),
        (Kind.REDUCED, 3, 0.25 * 2 * 5),
        (Kind.INDEXED, 4, 2.0**-8 * 2),  # bfloat16's, whatever the storage dtype is
    ],
)
def test_amplitude_is_the_formula(kind: Kind, ranks: int, expected: float) -> None:
    y, magnitude = torch.full((4, 50), -2.0), torch.full((4, 50), 5.0)
    moved = perturbed(ranks)(y, magnitude, 9, kind) - y
    assert torch.equal(moved[0], torch.zeros(50))  # probe 0 is exact
    torch.testing.assert_close(moved[1:].abs(), torch.full((3, 50), expected))
    signs = moved[1:].sign().sum()
    assert abs(float(signs)) < 50  # both signs occur, about equally often


def test_a_reduced_sum_is_never_counted_smaller_than_its_result() -> None:
    y, magnitude = torch.full((2, 1), 8.0), torch.full((2, 1), 1.0)
    moved = perturbed(ranks=3)(y, magnitude, 1, Kind.REDUCED) - y
    assert float(moved[1].abs()) == pytest.approx(0.25 * math.sqrt(4) * 8.0)


def test_exact_changes_nothing_and_has_one_probe() -> None:
    y = torch.randn(1, 3)
    assert EXACT(y, y, 10**9, Kind.REDUCED) is y
    assert EXACT.probes == 1


@pytest.mark.parametrize(("ranks", "probes"), [(0, 1), (1, 0)])
def test_bad_numbers_are_refused(ranks: int, probes: int) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        perturbed(ranks, probes)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_a_real_all_reduce_stays_inside_the_local_bound(dtype: torch.dtype, ranks: int) -> None:
    generator = torch.Generator().manual_seed(ranks)
    x = torch.randn(64, 64, generator=generator).to(dtype)
    weight = torch.randn(64, 64, generator=generator).to(dtype)
    total = sum(a @ b.mT for a, b in zip(x.chunk(ranks, 1), weight.chunk(ranks, 1), strict=True))
    x64, w64 = x.double(), weight.double()
    y = x64 @ w64.mT
    local = Perturbed(
        u_store=unit_roundoff(dtype),
        u_acc=unit_roundoff(torch.float32),
        ranks=ranks,
        generator=generator,
    )
    bound = local.amplitude(y, x64.abs() @ w64.abs().mT, 64, Kind.ACCUMULATOR)
    bound += local.amplitude(y, (x64**2 @ (w64**2).mT).sqrt(), 1, Kind.REDUCED)
    share = ((torch.as_tensor(total).double() - y).abs() / bound).max()
    assert 0.02 < float(share) < 2.0  # `safety` = 4 is twice what the worst element needs
