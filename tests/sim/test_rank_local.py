"""State that is global to a process is each rank's own, and the caller's is left alone."""

from __future__ import annotations

import collections
import functools
import os
import sys
import types
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from sim import RankCache, RankContext, RankFailed, RankLocal, RankSlot, World

MODULE = "a_library_with_globals"


class Base:
    inherited = "from the base"


@pytest.fixture
def library() -> Iterator[Any]:
    """A module with the sorts of global state that libraries keep."""
    module: Any = types.ModuleType(MODULE)
    module.number = 1
    module.table = {"of": "the caller"}
    module.by_default = collections.defaultdict(list, of=["the caller"])

    class Owner(Base):
        buffers: ClassVar[dict[str, int]] = {"of the caller": 1}
        current = "none"

    module.Owner = Owner
    sys.modules[MODULE] = module
    yield module
    del sys.modules[MODULE]


def local(*names: str, owner: str = "", **options: Any) -> RankLocal:
    """An entry of the table for the library, or for a class in it."""
    return RankLocal(MODULE + owner, names, "a test", **options)


def taking_turns(ctx: RankContext) -> None:
    """Hand the baton to every other rank."""
    dist.barrier()


def test_a_module_global_is_each_ranks_own(library: Any) -> None:
    def program(ctx: RankContext) -> int:
        assert library.number == 1
        library.number = 10 + ctx.rank
        taking_turns(ctx)
        return int(library.number)

    with World("tp3", rank_local=[local("number")]) as world:
        assert world.run(program) == [10, 11, 12]
        assert library.number == 1
        assert world.run(lambda ctx: library.number) == [10, 11, 12]
    assert library.number == 1


def test_a_global_that_is_not_declared_is_shared(library: Any) -> None:
    def program(ctx: RankContext) -> int:
        library.number = 10 + ctx.rank
        taking_turns(ctx)
        return int(library.number)

    with World("tp3") as world:
        assert world.run(program) == [12, 12, 12]


def test_a_rank_sees_what_the_caller_changes_only_if_it_is_not_its_own(library: Any) -> None:
    with World("tp2", rank_local=[local("number")]) as world:
        library.number = 5
        library.other = 6
        assert world.run(lambda ctx: (library.number, library.other)) == [(1, 6), (1, 6)]
        assert (library.number, library.other) == (5, 6)


def test_a_container_starts_empty_for_each_rank(library: Any) -> None:
    def program(ctx: RankContext) -> dict[str, int]:
        assert library.table == {}
        library.table["rank"] = ctx.rank
        taking_turns(ctx)
        return dict(library.table)

    with World("tp2", rank_local=[local("table")]) as world:
        assert world.run(program) == [{"rank": 0}, {"rank": 1}]
    assert library.table == {"of": "the caller"}


def test_a_defaultdict_keeps_its_default(library: Any) -> None:
    def program(ctx: RankContext) -> dict[str, list[int]]:
        library.by_default["ranks"].append(ctx.rank)
        taking_turns(ctx)
        return dict(library.by_default)

    with World("tp2", rank_local=[local("by_default")]) as world:
        assert world.run(program) == [{"ranks": [0]}, {"ranks": [1]}]


def test_fresh_makes_each_ranks_value(library: Any) -> None:
    made = iter(range(100))

    with World("tp2", rank_local=[local("number", fresh=lambda: next(made))]) as world:
        assert world.run(lambda ctx: library.number) == [0, 1]
    assert library.number == 1


def test_a_class_attribute_is_each_ranks_own(library: Any) -> None:
    def program(ctx: RankContext) -> tuple[str, dict[str, int]]:
        library.Owner.current = f"rank {ctx.rank}"
        library.Owner.buffers["rank"] = ctx.rank
        taking_turns(ctx)
        return library.Owner.current, dict(library.Owner.buffers)

    with World("tp2", rank_local=[local("current", "buffers", owner=":Owner")]) as world:
        assert world.run(program) == [("rank 0", {"rank": 0}), ("rank 1", {"rank": 1})]
    assert library.Owner.current == "none"
    assert library.Owner.buffers == {"of the caller": 1}


def test_an_inherited_attribute_is_still_inherited_afterwards(library: Any) -> None:
    def program(ctx: RankContext) -> str:
        library.Owner.inherited = f"rank {ctx.rank}"
        taking_turns(ctx)
        return str(library.Owner.inherited)

    with World("tp2", rank_local=[local("inherited", owner=":Owner")]) as world:
        assert world.run(program) == ["rank 0", "rank 1"]
    assert "inherited" not in vars(library.Owner)
    assert library.Owner.inherited == "from the base"


def test_a_name_that_a_rank_deletes_is_gone_for_that_rank_only(library: Any) -> None:
    def program(ctx: RankContext) -> tuple[bool, bool]:
        if ctx.rank == 0:
            del library.number, library.Owner.current
        taking_turns(ctx)
        return hasattr(library, "number"), "current" in vars(library.Owner)

    table = [local("number"), local("current", owner=":Owner")]
    with World("tp2", rank_local=table) as world:
        assert world.run(program) == [(False, False), (True, True)]
        assert (library.number, library.Owner.current) == (1, "none")
        assert world.run(lambda ctx: hasattr(library, "number")) == [False, True]


def test_a_name_that_the_library_lacks_is_passed_over(library: Any) -> None:
    with World("tp2", rank_local=[local("of_another_version", "number")]) as world:
        world.run(lambda ctx: setattr(library, "number", ctx.rank))
    assert library.number == 1
    assert not hasattr(library, "of_another_version")


def test_a_cache_is_cleared_when_the_baton_changes_hands(library: Any) -> None:
    @functools.lru_cache
    def rank_of_this_process() -> int:
        return dist.get_rank() if dist.is_initialized() else -1

    library.rank_of_this_process = rank_of_this_process

    def program(ctx: RankContext) -> list[int]:
        seen = []
        for _ in range(3):
            seen.append(rank_of_this_process())
            taking_turns(ctx)
        return seen

    assert rank_of_this_process() == -1
    with World("tp2", rank_local=[RankCache(MODULE, "rank_of_this_process", "a test")]) as world:
        assert world.run(program) == [[0, 0, 0], [1, 1, 1]]
        assert rank_of_this_process() == -1


def test_a_slot_is_swapped_through_its_getter_and_setter() -> None:
    state = ["the caller's"]
    slot = RankSlot("a slot", lambda: state[0], lambda v: state.__setitem__(0, v), "a test")

    def program(ctx: RankContext) -> str:
        state[0] = f"rank {ctx.rank}'s"
        taking_turns(ctx)
        return state[0]

    with World("tp2", rank_local=[slot]) as world:
        assert world.run(program) == ["rank 0's", "rank 1's"]
        assert state == ["the caller's"]


def test_the_callers_state_comes_back_also_when_a_run_breaks(library: Any) -> None:
    def program(ctx: RankContext) -> None:
        library.number = 77
        torch.set_default_dtype(torch.float64)
        taking_turns(ctx)
        raise ValueError

    with (
        World("tp2", rank_local=[local("number")]) as world,
        pytest.raises(RankFailed),
    ):
        world.run(program)
    assert library.number == 1
    assert torch.get_default_dtype() is torch.float32


# --- the environment ---


def environment(*names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def test_rank_and_local_rank_are_each_ranks_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "the caller's")
    monkeypatch.delenv("LOCAL_RANK", raising=False)

    def program(ctx: RankContext) -> list[str | None]:
        taking_turns(ctx)
        return environment("RANK", "LOCAL_RANK")

    with World("tp2") as world:
        assert environment("RANK", "LOCAL_RANK") == ["the caller's", None]
        assert world.run(program) == [["0", "0"], ["1", "1"]]
        assert environment("RANK", "LOCAL_RANK") == ["the caller's", None]
    assert environment("RANK", "LOCAL_RANK") == ["the caller's", None]


LAUNCHER = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher has set the variables that launchers set."""
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_launcher")
def test_ranks_see_what_a_launcher_sets_and_the_caller_does_not() -> None:
    with World("tp2") as world:
        assert world.run(lambda ctx: environment(*LAUNCHER)[:2]) == [["2", "2"]] * 2
        assert None not in world.run(lambda ctx: environment(*LAUNCHER))[0]
        assert environment(*LAUNCHER) == [None] * 4
    assert environment(*LAUNCHER) == [None] * 4


@pytest.mark.usefixtures("no_launcher")
def test_each_of_two_worlds_tells_its_ranks_its_own_size() -> None:
    with World("tp2") as two, World("tp3") as three:
        for _ in range(2):
            assert two.run(lambda ctx: os.environ["WORLD_SIZE"]) == ["2"] * 2
            assert three.run(lambda ctx: os.environ["WORLD_SIZE"]) == ["3"] * 3


def test_what_the_caller_sets_between_runs_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "before")
    with World("tp2") as world:
        monkeypatch.setenv("RANK", "between")
        world.run(taking_turns)
        assert os.environ["RANK"] == "between"


# --- torch's own state ---


@settings(max_examples=10)
@given(seed=st.none() | st.integers(0, 99))
def test_each_rank_draws_its_own_random_numbers(seed: int | None) -> None:
    def program(ctx: RankContext) -> list[float]:
        torch.manual_seed(ctx.rank)
        drawn = []
        for _ in range(3):
            drawn.append(float(torch.rand(())))
            taking_turns(ctx)
        return drawn

    def alone(rank: int) -> list[float]:
        generator = torch.Generator().manual_seed(rank)
        return [float(torch.rand((), generator=generator)) for _ in range(3)]

    torch.manual_seed(1234)
    before = torch.get_rng_state()
    with World("tp3", seed=seed) as world:
        assert world.run(program) == [alone(rank) for rank in range(3)]
    assert torch.equal(torch.get_rng_state(), before)


def test_each_rank_has_its_own_default_dtype() -> None:
    dtypes = [torch.float32, torch.float64, torch.bfloat16]

    def program(ctx: RankContext) -> torch.dtype:
        torch.set_default_dtype(dtypes[ctx.rank])
        taking_turns(ctx)
        return torch.ones(1).dtype

    with World("tp3") as world:
        assert world.run(program) == dtypes
        assert torch.get_default_dtype() is torch.float32
        assert world.run(lambda ctx: torch.get_default_dtype()) == dtypes
    assert torch.get_default_dtype() is torch.float32


def test_grad_mode_and_default_device_are_each_ranks_own() -> None:
    def program(ctx: RankContext) -> tuple[bool, str]:
        torch.set_grad_enabled(ctx.rank == 0)
        with torch.device("meta" if ctx.rank else "cpu"):
            taking_turns(ctx)
            return torch.is_grad_enabled(), torch.empty(1).device.type

    with World("tp2") as world:
        assert world.run(program) == [(True, "cpu"), (False, "meta")]
    assert torch.is_grad_enabled()


def test_the_caller_has_no_process_group() -> None:
    with World("tp2") as world:
        assert not dist.is_initialized()
        assert world.run(lambda ctx: dist.is_initialized()) == [True, True]
        assert not dist.is_initialized()
