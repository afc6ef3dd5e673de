"""Stand-in programs are right for every distribution of tokens, under every schedule; controls too.

What a program says of itself is its own truth, so it is also shown that a wrong one is caught.
"""

from __future__ import annotations

import pytest
import torch

from properties.faults.controls import CONTROLS, Control
from properties.faults.judged import judge_program
from properties.faults.program import Program, Seat, Truth, spread
from properties.faults.programs import all_to_all, communicator, gather_scatter, row_parallel, tiny
from sim import Schedule, Topology

PROGRAMS = (
    gather_scatter.PROGRAM,
    communicator.PROGRAM,
    all_to_all.PROGRAM,
    all_to_all.UNSPLIT,
    row_parallel.BIAS_ON_RANK_0,
    row_parallel.BIAS_DIVIDED,
    row_parallel.BIAS_AFTER_SCATTER,
    row_parallel.REDUCED_ONCE,
)
TOPOLOGIES = ("tp1", "dp2", "dp4", "tp2", "dp2tp2", "dp4tp2")
TOKENS = ((2,), (3, 1, 4, 2), (0, 3, 1, 0), (1,), (0,))
SCHEDULES = (Schedule(), Schedule(seed=3), Schedule(seed=1, late=True))

of_programs = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
of_controls = pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.name)


@of_programs
@pytest.mark.parametrize("word", TOPOLOGIES)
def test_right_programs_hold(program: Program, word: str) -> None:
    topology = Topology.parse(word)
    for tokens in TOKENS:
        for schedule in SCHEDULES:
            judged = judge_program(program, topology, spread(tokens, topology), schedule)
            assert judged.ok, (tokens, str(schedule), judged.headline)


@of_programs
def test_every_tap_is_compared(program: Program) -> None:
    topology = Topology.parse("dp2tp2")
    judged = judge_program(program, topology, (3, 1))
    names = {name for taps in judged.captured for name in taps}
    assert names == {tap.name for tap in judged.taps}


@of_programs
def test_bounds_are_wide_enough_and_tell_a_wrong_value(program: Program) -> None:
    """Errors stay well inside their bounds, and these far below the values."""
    judged = judge_program(program, Topology.parse("dp2tp2"), (3, 2))
    values = {name: tap.value for taps in judged.captured for name, tap in taps.items()}
    for tap in judged.taps:
        if not values[tap.name].is_floating_point():
            assert tap.bound == 0
            continue
        assert tap.max_abs_err <= tap.bound / 4
        assert tap.bound < 0.01 * float(values[tap.name].abs().max())


def test_truth_is_that_of_one_rank() -> None:
    """However tokens and experts are spread, the outputs are those of one rank with all tokens."""
    alone = judge_program(gather_scatter.PROGRAM, Topology(), (6,))
    spread_out = judge_program(gather_scatter.PROGRAM, Topology.parse("dp2tp2"), (4, 2))
    whole = alone.captured[0]["dp0.stream"].value
    parts = [spread_out.captured[0]["dp0.stream"].value, spread_out.captured[2]["dp1.stream"].value]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-5, atol=1e-5)


def test_a_program_that_breaks_is_judged_until_then() -> None:
    def breaks(seat: Seat) -> None:
        gather_scatter.step(seat)
        if seat.rank == 1:
            raise RuntimeError("out of luck")

    wrong = Program(
        name="breaks", what="raises at its end", step=breaks, truth=gather_scatter.PROGRAM.truth
    )
    judged = judge_program(wrong, Topology.parse("dp2"), (2, 1))
    verdict = judged.headline
    assert verdict is not None and verdict.name == "run" and verdict.kind == "rank_failed"
    assert "out of luck" in verdict.what
    assert judged.taps and all(tap.ok for tap in judged.taps)


def test_a_wrong_program_is_caught() -> None:
    def truth(topology: Topology, tokens: tuple[int, ...]) -> Truth:
        right = row_parallel.BIAS_ON_RANK_0.truth(topology, tokens)
        return Truth(taps=right.taps, bounds=right.bounds)

    def on_every_rank(seat: Seat) -> None:
        y = row_parallel.addend(seat, tiny.weights().embed[tiny.own_ids(seat)])
        y = y + tiny.weights().bias
        seat.tap(seat.own("addend"), y, "partial:tp")
        seat.tap(seat.own("output"), row_parallel.summed(seat, y))

    wrong = Program(name="bias", what="its bias on every rank", step=on_every_rank, truth=truth)
    verdict = judge_program(wrong, Topology.parse("tp2"), (3,)).headline
    assert verdict is not None and verdict.at == "dp0.addend"


@pytest.mark.parametrize(("word", "tokens"), [("dp2", (3,)), ("tp2pp2", (3,))])
def test_what_cannot_run_is_refused(word: str, tokens: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="runs on one stage, with tokens for each DP rank"):
        judge_program(gather_scatter.PROGRAM, Topology.parse(word), tokens)


def test_too_many_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="use 64 at most"):
        tiny.token_ids((65,))


@of_controls
def test_controls_are_not_flagged(control: Control) -> None:
    for word in control.topologies:
        for schedule in SCHEDULES:
            judged = control.judge(Topology.parse(word), schedule)
            assert not judged.flagged, judged.own.headline


@of_controls
def test_waste_is_measured_where_there_is_some(control: Control) -> None:
    judged = control.judge(Topology.parse("tp4"))
    assert (judged.waste > 1.5) == (control.lean is not None)


def test_a_redundant_all_reduce_is_noted_by_its_operands_alone() -> None:
    control = next(c for c in CONTROLS if c.name == "reduced-again-before-norm")
    judged = control.judge(Topology.parse("tp2"))
    assert not judged.flagged
    assert "adds up, 2 times" in judged.noted
