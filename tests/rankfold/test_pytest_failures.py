"""What a user reads in a CI log when a layer is wrong: one wrong test of each kind, and its twin.

The user's file has its own folder, without this project's conftest.py or settings.
"""

from __future__ import annotations

import re

import pytest

from tests.rankfold.pytest_runs import PLUGIN, Run, run_pytest

FILE = """
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from rankfold import replicated
from rankfold.testing import assert_ledger, assert_placed, assert_same, axis_group
from rankfold.testing import assert_conserved
from rankfold.testing.strategies import token_counts, topologies

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
W = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
TRUTH = X.double() @ W.double().T @ W.double()


def partial(ctx):
    size = 8 // ctx.topology.tp
    tp = ctx.topology.coordinates(ctx.rank)["tp"]
    mine = W[tp * size : (tp + 1) * size]
    return X @ mine.T @ mine


def mlp(ctx, times):
    group, y = axis_group(ctx, "tp"), partial(ctx)
    for _ in range(times):
        dist.all_reduce(y, group=group)
    return y


def placed(y, placement, topology):
    assert_placed(y, TRUTH, placement, topology=topology, terms=32, name="mlp")


@pytest.mark.parametrize("topology", ["tp2", "tp4", "tp2pp2", "dp2tp2"])
def test_right(world, topology):
    folded = world(topology)
    y = folded.run(mlp, 1)
    placed(y, "Replicate", topology)
    assert_same(y, topology=topology)
    assert_ledger(folded, group="tp", all_reduce=1)


def test_twice(world):
    world("tp2").run(mlp, 2)


def test_twice_by_value(world):
    placed(world("tp2pp2", sanitizer=False).run(mlp, 2), "Replicate", "tp2pp2")


def test_twice_by_ledger(world):
    folded = world("tp2", sanitizer=False)
    folded.run(mlp, 2)
    assert_ledger(folded, group="tp", all_reduce=1)


def test_no_reduction(world):
    placed(world("tp4").run(mlp, 0), "Replicate", "tp4")


def test_no_gather(world):
    y = world("tp2").run(lambda ctx: mlp(ctx, 1).chunk(2)[ctx.rank])
    placed(y, "Replicate", "tp2")


def test_a_rank_differs(world):
    y = world("tp4").run(lambda ctx: mlp(ctx, 1) + (ctx.rank == 2))
    assert_same(y, name="mlp")


def test_hang(world):
    world("tp4").run(lambda ctx: mlp(ctx, 1) if ctx.rank == 0 else axis_group(ctx, "tp"))


def test_raises(world):
    def program(ctx):
        rows = len(mlp(ctx, 1))
        assert rows == 6 + ctx.rank
        dist.barrier()

    world("tp2").run(program)


def test_pending(world):
    def program(ctx):
        if ctx.rank == 0:
            dist.send(X, 1)

    world("tp2").run(program)


def declares(ctx, times):
    replicated(mlp(ctx, times), name="y")


def test_declared(world):
    world("tp2").run(declares, 1)


def test_declared_but_not_reduced(world):
    world("tp2").run(declares, 0)


def scattered(ctx):
    shard = torch.empty(3, 4)
    dist.reduce_scatter_tensor(shard, partial(ctx))
    return shard


def test_gathers_in_another_run(world):
    folded = world("tp2")
    shards = folded.run(scattered)
    folded.run(lambda ctx: gather(shards[ctx.rank]))


def test_skips(world):
    world("tp2").run(lambda ctx: pytest.skip("no such kernel"))


@given(topology=topologies(axes=("tp",)), data=st.data())
@settings(deadline=None, max_examples=40, database=None, derandomize=True)
def test_rows_are_lost(world, topology, data):
    tokens = data.draw(token_counts(topology), label="tokens")
    x = torch.randn(tokens, 3, generator=torch.Generator().manual_seed(tokens))
    size = tokens // topology.tp
    shards = world(topology).run(lambda ctx: x[ctx.rank * size : (ctx.rank + 1) * size])
    assert_conserved(x, shards, name="tokens")


@given(topology=topologies(axes=("tp",)), data=st.data())
@settings(deadline=None, max_examples=40, database=None, derandomize=True)
def test_rows_are_kept(world, topology, data):
    tokens = data.draw(token_counts(topology), label="tokens")
    x = torch.randn(tokens, 3, generator=torch.Generator().manual_seed(tokens))
    size = -(-tokens // topology.tp)
    shards = world(topology).run(lambda ctx: x[ctx.rank * size : (ctx.rank + 1) * size])
    assert_conserved(x, shards, name="tokens")


def gather(x):
    whole = torch.empty(2 * len(x), 4)
    dist.all_gather_into_tensor(whole, x.contiguous())
    return whole


def test_gathers_what_is_whole(world):
    world("tp2").run(lambda ctx: gather(X))


def test_gathers_shards_that_are_equal_once(world):
    world("tp2").run(lambda ctx: gather(X))
    world("tp2").run(lambda ctx: gather(X * (ctx.rank + 1)))


def test_means(world):
    world("tp2").run(mean)


@pytest.mark.rankfold_allow("equal addends", "test_user.py", "divided below")
def test_allowed_mean(world):
    placed_mean = world("tp2").run(mean)
    assert_placed(placed_mean, X, "Replicate")


def mean(ctx):
    y = X.clone()
    dist.all_reduce(y)
    return y * 0.5


@pytest.mark.rankfold_allow("no such rule", "test_user.py", "divided below")
def test_allows_what_is_no_rule(world):
    world("tp2")


@pytest.mark.rankfold_allow("equal addends", "test_user.py")
def test_allows_without_reason(world):
    world("tp2")


@pytest.fixture(scope="module")
def kept(world):
    return world("tp2")


def test_uses_a_world_of_its_own(kept):
    kept.run(partial)


def test_uses_the_world_of_another_test(kept):
    kept.run(partial)


def test_topology_that_is_none(world):
    world("tp0")
"""


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("user")
    (folder / "test_user.py").write_text(FILE)
    return run_pytest(folder, *PLUGIN, "--strict-markers", "test_user.py")


RIGHT = [
    *(f"test_right[{word}]" for word in ("tp2", "tp4", "tp2pp2", "dp2tp2")),
    "test_rows_are_kept",
    "test_gathers_shards_that_are_equal_once",
    "test_declared",
    "test_gathers_in_another_run",
    "test_allowed_mean",
    "test_uses_a_world_of_its_own",
]


@pytest.mark.parametrize("test", RIGHT)
def test_right_programs_pass(user: Run, test: str) -> None:
    assert user.outcome(test) == "PASSED"


WRONG = {
    "test_twice": (
        "AssertionError: reduced again: adds up, 2 times, what the all_reduce at test_user.py:",
        "where: all_reduce(sum) float32[6, 4] on tp[0, 1] at test_user.py:",
    ),
    "test_twice_by_value": (
        "mlp is not Replicate: is 2 x the full value: summed over tp once too often",
        "where: tp[0, 1], float32[6, 4] on each rank",
    ),
    "test_twice_by_ledger": (
        "the ledger of tp is not as expected on ranks 0, 1",
        "op          expected  ranks 0, 1\n  all_reduce         1           2",
        "all_reduce(sum) float32[6, 4] on tp [0, 1] at test_user.py:",
    ),
    "test_no_reduction": (
        "mlp is not Replicate: looks like Partial(tp): a reduction over tp is missing",
    ),
    "test_no_gather": ("mlp is not Replicate: looks like Shard(tokens, tp): a gather is missing",),
    "test_a_rank_differs": (
        "mlp is not the same on all ranks of tp[0, 1, 2, 3]: ranks [2] against ranks [0, 1, 3]",
        "rank 2 against rank 0: rows 0, 1, 2, 3, 4, 5 of 6 differ, largest difference 1",
    ),
    "test_hang": (
        "Deadlock: deadlock: rank 0 waits for calls that nobody can make any more",
        "rank 0 waits in all_reduce(sum) float32[6, 4] on tp[0, 1, 2, 3] (operation 0 of that "
        "group) at test_user.py:",
        "rank 3 has finished",
    ),
    "test_raises": (
        "assert 6 == (6 + 1)",
        "RankFailed: rank 1 raised AssertionError: assert 6 == (6 + 1)",
        "rank 0 waits in barrier",
    ),
    "test_pending": ("Undelivered: ", "test_user.py:"),
    "test_rows_are_lost": (
        "tokens are not conserved: 1 lost, 0 too many (1 before, 0 after)",
        "lost: row 0",
        "Draw 1 (tokens): 1",
    ),
    "test_declared_but_not_reduced": ("not replicated: ", "`y`", "at test_user.py:"),
    "test_means": ("equal addends: every rank adds the same tensor",),
    "test_allows_what_is_no_rule": ("allow 'no such rule': no such rule; use reduced again,",),
    "test_uses_the_world_of_another_test": (
        "Misuse: this world ended with the test (or example) that made it; make a new one",
    ),
    "test_topology_that_is_none": ("TopologyError: 'tp0': tp0 has no ranks",),
}


@pytest.mark.parametrize("test", WRONG)
def test_wrong_programs_fail_with_the_reason(user: Run, test: str) -> None:
    assert user.outcome(test) == "FAILED"
    for line in WRONG[test]:
        assert line in user.errors(test), user.failure(test)


@pytest.mark.parametrize("test", WRONG)
def test_failures_are_short_and_name_no_line_of_the_runtime(user: Run, test: str) -> None:
    said = user.failure(test)
    assert len(said.splitlines()) <= 60, said
    assert "sim/world.py" not in said
    assert not re.search(r"rankfold/testing/\w+\.py:\d+: ", said)
    assert not [line for line in said.splitlines() if len(line) > 300]


def test_a_gather_of_what_is_whole_is_told_at_the_end(user: Run) -> None:
    """The rule speaks only where no operation at the site differed in the whole test."""
    said = user.failure("test_gathers_what_is_whole")
    assert said.strip().startswith("gathers what is whole: every rank gives the same tensor")


def test_a_marker_without_reason_is_told(user: Run) -> None:
    said = user.failure("test_allows_without_reason")
    assert "rankfold_allow(rule, site, reason): not enough values" in said


def test_a_rank_that_skips_skips_the_test(user: Run) -> None:
    assert user.outcome("test_skips") == "SKIPPED"


def test_what_is_allowed_is_told(user: Run) -> None:
    lines = [line for line in user.output.splitlines() if line.startswith("rankfold allowed")]
    assert len(lines) == 1
    assert lines[0].startswith("rankfold allowed equal addends at test_user.py:")
    assert lines[0].endswith(": divided below")


def test_every_test_was_judged(user: Run) -> None:
    """The table above leaves none out."""
    told = [*RIGHT, *WRONG, "test_gathers_what_is_whole", "test_allows_without_reason"]
    assert f"{len(told) - len(RIGHT)} failed, {len(RIGHT)} passed, 1 skipped" in user.output
