"""What a program is told about its groups, and the store and ledger beside them.

That collectives compute what real ones do is the business of the conformance tests.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from sim import Deadlock, Entry, RankContext, World, label_group
from tests.sim.programs import Program, broken_run, ones, place


def test_ranks_know_who_they_are() -> None:
    def program(ctx: RankContext) -> tuple[int, int, int]:
        assert dist.get_backend() == "gloo"
        return dist.get_rank(), dist.get_world_size(), ctx.rank

    with World("tp3") as world:
        assert world.run(program) == [(r, 3, r) for r in range(3)]


@pytest.mark.parametrize("backend", [None, "gloo", "nccl", "cpu:gloo,cuda:nccl"])
def test_a_group_of_any_backend_works_and_says_it_is_what_was_asked_for(
    backend: str | None,
) -> None:
    def program(ctx: RankContext) -> tuple[str, float]:
        group = dist.new_group([0, 1], backend=backend)
        x = ones()
        dist.all_reduce(x, group=group)
        return str(dist.get_backend(group)), float(x[0])

    with World("tp2") as world:
        names = world.run(program)
    assert [value for _, value in names] == [2.0, 2.0]
    assert all(name == (backend or "gloo") for name, _ in names)


def test_ranks_within_a_group() -> None:
    def program(ctx: RankContext) -> Any:
        group = dist.new_group([3, 1])
        if ctx.rank not in (1, 3):
            assert dist.get_rank(group) == -1
            return None
        size, ranks = dist.get_world_size(group), dist.get_process_group_ranks(group)
        return dist.get_rank(group), size, ranks, dist.get_global_rank(group, 0)

    with World("tp4") as world:
        results = world.run(program)
    assert results[0] is results[2] is None
    assert results[1][1:] == results[3][1:] == (2, [1, 3], 1)
    assert (results[1][0], results[3][0]) == (0, 1)


def test_a_device_mesh_gives_working_groups() -> None:
    def program(ctx: RankContext) -> list[float]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
        sums = []
        for axis in ("pp", "tp"):
            x = torch.tensor([float(ctx.rank)])
            dist.all_reduce(x, group=mesh.get_group(axis))
            sums.append(float(x))
        return sums

    with World("tp2pp2") as world:
        assert world.run(program) == [[2.0, 1.0], [4.0, 1.0], [2.0, 5.0], [4.0, 5.0]]


def test_object_collectives_carry_objects() -> None:
    def program(ctx: RankContext) -> list[object]:
        everything: list[object] = [None] * ctx.world_size
        dist.all_gather_object(everything, {"rank": ctx.rank})
        box: list[object] = [("from", ctx.rank)]
        dist.broadcast_object_list(box, 1)
        return [*everything, *box]

    with World("tp2") as world:
        assert world.run(program) == [[{"rank": 0}, {"rank": 1}, ("from", 1)]] * 2


def test_labels_name_groups_in_reports_and_in_the_ledger() -> None:
    def program(ctx: RankContext, broken: bool) -> None:
        group = dist.new_group([0, 1])
        label_group(group, "mine")
        dist.all_reduce(ones(), group=group)
        if broken and ctx.rank == 0:
            dist.barrier(group=group)

    with World("tp2") as world:
        world.run(program, False)
        assert world.ledger.totals() == {("mine", "all_reduce"): (1, 16)}
    error = broken_run(Deadlock, lambda ctx: program(ctx, True))
    assert error.ranks[0].group == "mine[0, 1]"


def test_the_store_lets_other_ranks_run_while_one_waits() -> None:
    def program(ctx: RankContext) -> tuple[bytes, int]:
        store = dist.distributed_c10d._get_default_store()
        if ctx.rank == 0:
            value = store.get("set by rank 1")
        else:
            store.set("set by rank 1", "here")
            value = b"-"
        count = store.add("count", 1)
        dist.barrier()
        return value, count + store.add("count", 0)

    with World("tp2") as world:
        results = world.run(program)
    assert [value for value, _ in results] == [b"here", b"-"]
    assert sum(count for _, count in results) == 1 + 2 + 2 * 2


def test_a_key_that_nobody_sets_is_a_deadlock() -> None:
    def program(ctx: RankContext) -> None:
        if ctx.rank == 1:
            dist.distributed_c10d._get_default_store().get("never set")

    error = broken_run(Deadlock, program)
    assert "never set" in str(error.ranks[1])


def entries(program: Program, topology: str = "tp2") -> list[Entry]:
    """What the ledger holds after a run."""
    with World(topology) as world:
        world.run(program)
        return world.ledger.entries


def test_the_ledger_says_what_was_done_by_whom_and_where() -> None:
    def program(ctx: RankContext) -> None:
        dist.all_reduce(ones(6).view(2, 3).double(), dist.ReduceOp.MAX)  # the place

    [entry] = entries(program, "tp4")
    assert (entry.op, entry.group, entry.ranks) == ("all_reduce", "default_pg", (0, 1, 2, 3))
    assert (entry.sequence, entry.dtype, entry.detail) == (0, "float64", "max")
    assert entry.shapes == (((2, 3),),) * 4
    assert entry.bytes == 2 * 3 * 6 * 8
    assert all(str(site).endswith(place(program, "# the place")) for site in entry.sites)
    data = entry.to_json()
    assert data["shapes"] == [[[2, 3]]]
    assert len(data["sites"]) == 1


def test_calls_through_deprecated_names_have_the_callers_line_too() -> None:
    def program(ctx: RankContext) -> None:
        dist.all_gather_into_tensor(torch.empty(4), ones())  # gather
        dist.reduce_scatter_tensor(torch.empty(1), ones())  # scatter

    gather, scatter = entries(program)
    assert str(gather.sites[0]).endswith(place(program, "# gather"))
    assert str(scatter.sites[0]).endswith(place(program, "# scatter"))


def test_a_message_in_the_ledger_has_its_ends_and_its_tag() -> None:
    def program(ctx: RankContext) -> None:
        if ctx.rank == 1:
            dist.send(ones(3), 0, tag=9)  # from
        if ctx.rank == 0:
            dist.recv(ones(3), 1, tag=9)  # to

    [entry] = entries(program)
    assert (entry.op, entry.ranks, entry.bytes, entry.detail) == ("send", (1, 0), 12, "tag 9")
    assert [str(site) for site in entry.sites] == [
        f"tests/sim/{place(program, '# from')}",
        f"tests/sim/{place(program, '# to')}",
    ]


def test_roots_in_the_ledger_are_global_ranks() -> None:
    def program(ctx: RankContext) -> None:
        pair = dist.new_group([1, 2])
        if ctx.rank in (1, 2):
            dist.broadcast(ones(), 2, group=pair)

    [entry] = entries(program, "tp3")
    assert (entry.ranks, entry.detail) == ((1, 2), "root 2")


def test_the_ledger_in_json_is_a_line_for_each_entry() -> None:
    def program(ctx: RankContext) -> None:
        dist.barrier()
        dist.all_reduce(ones())

    with World("tp2") as world:
        world.run(program)
        lines = world.ledger.to_json().splitlines()
        assert [json.loads(line)["op"] for line in lines] == ["barrier", "all_reduce"]
        assert len(world.ledger) == 2
        world.ledger.clear()
        assert world.ledger.to_json() == ""
        assert world.ledger.totals() == {}


def test_observers_see_all_operands_before_anything_is_written() -> None:
    seen: list[str] = []

    class Watch:
        def collective(self, group: Any, calls: Any) -> None:
            values = [float(call.inputs[0][0]) for call in calls]
            seen.append(f"{calls[0].op} {group.ranks} {values}")

        def message(self, group: Any, send: Any, recv: Any) -> None:
            seen.append(f"{send.rank} to {recv.rank}: {float(send.tensor)} {float(recv.tensor)}")

    def program(ctx: RankContext) -> None:
        x = torch.tensor(float(ctx.rank + 1))
        dist.all_reduce(x)
        if ctx.rank == 0:
            dist.send(x, 1)
        else:
            dist.recv(torch.tensor(-1.0), 0)

    with World("tp2", observers=[Watch()]) as world:
        world.run(program)
    assert seen == ["all_reduce (0, 1) [1.0, 2.0]", "0 to 1: 3.0 -1.0"]
