"""The gloo side itself: what the suite says gloo cannot do, and how the pool tells of failures."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.sim.conformance.cases import CASES, IN_SILENCE
from tests.sim.conformance.compare import difference, expected
from tests.sim.conformance.gloo_pool import GlooFailure, GlooPool, Invocation
from tests.sim.conformance.test_conformance import batch_of

pytestmark = pytest.mark.gloo

REFUSED = [name for name, case in CASES.items() if case.error]
SILENT = [name for name, case in CASES.items() if case.why == IN_SILENCE]


@pytest.mark.parametrize("name", REFUSED)
@settings(max_examples=1, phases=[Phase.generate])
@given(data=st.data())
def test_gloo_refuses(name: str, gloo: Callable[[int], GlooPool], data: st.DataObject) -> None:
    """A case without gloo is one that gloo refuses, with the error that the case says."""
    batch = batch_of(CASES[name], data)
    for invocation in (batch[0], batch[-1]):  # of different dtypes
        with pytest.raises(GlooFailure, match=CASES[name].error):
            gloo(2).run(invocation)


@pytest.mark.parametrize("name", SILENT)
def test_gloo_goes_wrong_in_silence(name: str, gloo: Callable[[int], GlooPool]) -> None:
    """A case that gloo gets wrong: it returns, with other values than the reference."""
    case, pinned = CASES[name], {"shape": (3, 2), "root": 0}
    for variant in case.variants:
        options = {**variant, **{k: v for k, v in pinned.items() if k in case.draws}}
        invocation = Invocation(program=case.program, seed=1, options=options)
        [results] = gloo(2).run(invocation)
        assert difference(results, *expected(case, invocation, 2)), invocation


@pytest.fixture
def pool() -> Iterator[GlooPool]:
    """A pool of its own for a test that breaks it."""
    pool = GlooPool(2)
    yield pool
    pool.close()


def fine(rank: int, world_size: int, seed: int) -> list[torch.Tensor]:
    x = torch.tensor([rank + seed])
    dist.all_reduce(x)
    return [x]


def raises_on_one(rank: int, world_size: int, seed: int) -> list[torch.Tensor]:
    if rank == 1:
        raise ValueError("one is enough")
    return fine(rank, world_size, seed)


def dies_on_one(rank: int, world_size: int, seed: int) -> list[torch.Tensor]:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return fine(rank, world_size, seed)


def hangs_on_one(rank: int, world_size: int, seed: int) -> list[torch.Tensor]:
    if rank == 1:
        time.sleep(3600)
    return fine(rank, world_size, seed)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (raises_on_one, "rank 1: ValueError in raises_on_one.*one is enough"),
        (dies_on_one, "rank 1: died, exit code -9"),
        (hangs_on_one, "rank 1: did not come back"),
    ],
)
def test_a_failure_names_rank_and_program(
    pool: GlooPool, program: Callable[..., list[torch.Tensor]], says: str
) -> None:
    """The failure comes in time; the next program runs; nobody of the broken pool is left."""
    pool.run(Invocation(program=fine))
    before = pool.pids()
    pool.limit = 2.0 if program is hangs_on_one else pool.limit
    with pytest.raises(GlooFailure, match=f"(?s){program.__name__}.*{says}"):
        pool.run(Invocation(program=program))
    assert not any(map(alive, before))
    pool.limit = 60.0
    assert [x.item() for [x] in pool.run(Invocation(program=fine, seed=1))[0]] == [3, 3]


def test_processes_stay_and_end(pool: GlooPool) -> None:
    """One set of processes serves many programs, and close leaves none."""
    pool.run(Invocation(program=fine))
    before = pool.pids()
    results = pool.run(*(Invocation(program=fine, seed=s) for s in range(3)))
    assert [[x.item() for [x] in of_program] for of_program in results] == [
        [1, 1],
        [3, 3],
        [5, 5],
    ]
    assert pool.pids() == before
    pool.close()
    assert not any(map(alive, before))


def test_results_keep_dtype_and_bits(pool: GlooPool) -> None:
    """Any dtype comes back over the pipe as it was, empty tensors too."""
    [[mine, _]] = pool.run(Invocation(program=of_every_dtype))
    for got, sent in zip(mine, of_every_dtype(0, 2, 0), strict=True):
        assert got.dtype is sent.dtype
        assert got.shape == sent.shape
        assert torch.equal(got.contiguous().view(torch.uint8), sent.contiguous().view(torch.uint8))


def of_every_dtype(rank: int, world_size: int, seed: int) -> list[torch.Tensor]:
    dtypes = (torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int16, torch.bool)
    whole = [torch.tensor([[1, 0, 1]]).to(dtype) for dtype in dtypes]
    return [*whole, *(t[:0] for t in whole), torch.arange(6.0).reshape(2, 3).T]
