"""Topology words, their errors, and the groups they stand for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim import Topology, TopologyError, World

degrees = st.integers(1, 6)
topologies = st.builds(Topology, tp=degrees, pp=degrees, dp=degrees, ep=st.booleans())


@pytest.mark.parametrize(
    ("word", "topology"),
    [
        ("tp1", Topology()),
        ("tp2pp2", Topology(tp=2, pp=2)),
        ("pp2tp2", Topology(tp=2, pp=2)),
        ("tep4pp2", Topology(tp=4, pp=2, ep=True)),
        ("dep16", Topology(dp=16, ep=True)),
        ("dp2tp4", Topology(dp=2, tp=4)),
        ("dp2tep4", Topology(dp=2, tp=4, ep=True)),
        ("dep2pp2", Topology(dp=2, pp=2, ep=True)),
        ("TP2", Topology(tp=2)),
    ],
)
def test_a_word_is_a_layout(word: str, topology: Topology) -> None:
    assert Topology.parse(word) == topology


@given(topologies)
def test_the_canonical_word_means_the_topology(topology: Topology) -> None:
    assert Topology.parse(topology.word) == topology
    assert str(topology) == topology.word


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("banana", "tp2pp2"),
        ("", "tp2pp2"),
        ("tp", "tp2pp2"),
        ("tp2 pp2", "tp2pp2"),
        ("tp-2", "tp2pp2"),
        ("tp2x", "tp2pp2"),
        ("tp0", "1 or more"),
        ("dep0", "1 or more"),
        ("tp2tp4", "twice"),
        ("tp2tep4", "twice"),
        ("ep4", "tep4 or dep4"),
        ("tp99999", "1024"),
        ("tp32dp64", "1024"),
        ("tp" + "9" * 5000, "1024"),
    ],
)
def test_a_word_that_means_nothing_is_refused_in_one_line(word: str, hint: str) -> None:
    with pytest.raises(TopologyError) as caught:
        Topology.parse(word)
    assert hint in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.text(alphabet="tpde0123456789 x", max_size=9))
def test_any_text_is_a_layout_or_refused_in_one_line(text: str) -> None:
    try:
        topology = Topology.parse(text)
    except TopologyError as error:
        assert "\n" not in str(error)
    else:
        assert Topology.parse(topology.word) == topology


def test_a_world_refuses_the_same_words() -> None:
    with pytest.raises(TopologyError):
        World("tp0")
    with pytest.raises(TopologyError):
        World(0)


def vllm_groups(topology: Topology) -> dict[str, list[list[int]]]:
    """The layout of vLLM's initialize_model_parallel, said again in numpy.

    Ranks lie in a grid ExternalDP x DP x PP x PCP x TP, the last axis fastest; the groups of some
    axes are the lines, or the blocks, of the grid along them.
    """
    external, pcp = 1, 1
    shape = (external, topology.dp, topology.pp, pcp, topology.tp)
    grid = np.arange(topology.world_size).reshape(shape)

    def along(*axes: int) -> list[list[int]]:
        size = int(np.prod([shape[axis] for axis in axes]))
        last = range(grid.ndim - len(axes), grid.ndim)
        return sorted(np.moveaxis(grid, axes, tuple(last)).reshape(-1, size).tolist())

    return {"tp": along(4), "pp": along(2), "dp": along(1), "ep": along(1, 3, 4)}


@given(topologies)
def test_groups_are_vllms(topology: Topology) -> None:
    ours = {axis: sorted(map(list, groups)) for axis, groups in topology.groups.items()}
    assert ours == vllm_groups(topology)


@given(topologies)
def test_each_axis_divides_the_ranks_among_its_groups(topology: Topology) -> None:
    for axis, groups in topology.groups.items():
        assert sorted(rank for group in groups for rank in group) == list(
            range(topology.world_size)
        )
        for group in groups:
            assert list(group) == sorted(group)
            assert all(topology.group_of(rank, axis) == group for rank in group)


@given(topologies)
def test_coordinates_and_ranks_are_inverse(topology: Topology) -> None:
    for rank in range(topology.world_size):
        at = topology.coordinates(rank)
        assert topology.rank(at["dp"], at["pp"], at["tp"]) == rank
        for axis in ("tp", "pp", "dp"):
            assert topology.group_of(rank, axis)[at[axis]] == rank


def test_a_rank_that_is_not_there_has_no_coordinates() -> None:
    with pytest.raises(TopologyError, match="ranks 0 to 3, not 4"):
        Topology.parse("tp2pp2").coordinates(4)


def test_the_known_layout_of_tp2pp2() -> None:
    groups = Topology.parse("tep2pp2").groups
    assert groups["tp"] == ((0, 1), (2, 3))
    assert groups["pp"] == ((0, 2), (1, 3))
    assert groups["ep"] == ((0, 1), (2, 3))
    assert groups["dp"] == ((0,), (1,), (2,), (3,))


@pytest.mark.parametrize("topology", ["tp2pp2", 4, Topology(tp=2, pp=2)])
def test_a_world_takes_a_word_a_number_or_a_topology(topology: Topology | str | int) -> None:
    with World(topology) as world:
        assert world.size == 4
        assert world.run(lambda ctx: (ctx.rank, ctx.world_size, ctx.topology)) == [
            (rank, 4, world.topology) for rank in range(4)
        ]
