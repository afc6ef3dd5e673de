"""`rankfold bench`: steps of data-parallel ranks, measured and said."""

from __future__ import annotations

from rankfold.bench_deployments import deployment_rounds, said


def test_each_topology_is_measured() -> None:
    figures = deployment_rounds(("dep2", "dep4"))
    assert [of["ranks"] for of in figures.values()] == [2, 4]
    assert all(of["step_ms"] > 0 for of in figures.values())
    # Attention is whole on every rank, and the experts are spread: more ranks hold more in all,
    # and less each.
    held = [of["megabytes"] for of in figures.values()]
    assert held[0] < held[1] < 2 * held[0]


def test_growth_is_said_in_one_line() -> None:
    figures = {
        "dep2": {"ranks": 2.0, "step_ms": 10.0, "megabytes": 5.0},
        "dep72": {"ranks": 72.0, "step_ms": 400.0, "megabytes": 60.0},
    }
    *each, growth = said(figures)
    assert len(each) == 2 and "dep72" in each[1] and "5.56 ms a rank" in each[1]
    assert growth == ("data parallel, 36 x the ranks: 40.0 x the time of a step, 12.0 x the memory")
