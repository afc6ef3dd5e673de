"""Negative controls: programs that were taken for wrong, or are merely wasteful, and are right.

A check that calls one of these wrong is no check. What is wasteful may be said, as waste.
"""

from __future__ import annotations

from dataclasses import dataclass

from properties.faults.judged import Judged, judge_program
from properties.faults.program import Program, spread
from properties.faults.programs import all_to_all, row_parallel
from sim import Schedule, Topology


@dataclass(frozen=True, kw_only=True)
class Control:
    """A right program, with the report that took it for wrong or wasteful."""

    name: str
    report: str
    program: Program
    why: str
    """Why it is right, in one sentence."""
    topologies: tuple[str, ...] = ("tp2", "dp2tp2", "tp4")
    tokens: tuple[int, ...] = (3, 1, 4, 2)
    """Tokens of the DP ranks, over and over."""
    lean: Program | None = None
    """The program that does the same with less traffic, where this one wastes some."""

    def judge(self, topology: Topology, schedule: Schedule | None = None) -> ControlJudged:
        """Run it, and its lean twin if it has one, and apply every check."""
        tokens = spread(self.tokens, topology)
        own = judge_program(self.program, topology, tokens, schedule)
        twin = judge_program(self.lean, topology, tokens, schedule) if self.lean else None
        return ControlJudged(own=own, lean=twin)


@dataclass(frozen=True, kw_only=True)
class ControlJudged:
    """What the checks say of a control."""

    own: Judged
    lean: Judged | None

    @property
    def flagged(self) -> bool:
        """Whether a check calls its values wrong, or the run broke. That must not be."""
        return not all(check.ok for check in self.own.checks if check.name != "sanitizer")

    @property
    def noted(self) -> str:
        """What the sanitizer says of its operations, if anything: waste is worth saying."""
        return next((c.what for c in self.own.checks if c.name == "sanitizer" and not c.ok), "")

    @property
    def waste(self) -> float:
        """Bytes moved by the operation that wastes most, as a multiple of what the lean twin moves
        by it; 1.0 without a twin or traffic."""
        lean = self.lean.ledger.totals() if self.lean else {}
        return max(
            (
                size / lean[operation][1]
                for operation, (_, size) in self.own.ledger.totals().items()
                if lean.get(operation, (0, 0))[1]
            ),
            default=1.0,
        )


CONTROLS: tuple[Control, ...] = (
    Control(
        name="bias-on-rank-0",
        report="text-generation-inference#1036, nano-vllm#99",
        program=row_parallel.BIAS_ON_RANK_0,
        why="the bias is in one addend alone, so the sum has it once",
    ),
    Control(
        name="bias-after-scatter",
        report="Megatron-LM#236",
        program=row_parallel.BIAS_AFTER_SCATTER,
        why="after the reduce-scatter every row is on one rank, which adds the bias to it once",
    ),
    Control(
        name="bias-divided",
        report="FastDeploy#5247, mlc-llm#3494",
        program=row_parallel.BIAS_DIVIDED,
        why="each of the R addends has one R-th of the bias",
    ),
    Control(
        name="reduced-again-before-norm",
        report="TensorRT-LLM#14974",
        program=row_parallel.REDUCED_AGAIN,
        why="an RMS norm does not depend on the scale of its input, but for epsilon",
        lean=row_parallel.REDUCED_ONCE,
    ),
    Control(
        name="dispatched-by-every-tp-rank",
        report="vllm#24134",
        program=all_to_all.UNSPLIT,
        why="every TP rank dispatches all tokens and gets them all back: TP times the traffic and "
        "the work, and right",
        tokens=(16, 12),
        lean=all_to_all.PROGRAM,
    ),
)
"""Every control. NeMo Automodel#3507 is not among them: its text was not to be found."""
