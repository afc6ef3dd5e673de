"""One fault against all checks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from model.handover.wire import Disturbance
from properties import Verdict
from properties.faults import Fault
from properties.faults.deployment import DeploymentFault
from properties.faults.handover import HandOverFault
from properties.faults.judged import judge_program
from properties.faults.program import ProgramFault, spread
from rankfold.corpus import batch_of
from rankfold.data_parallel import examine
from rankfold.deployment.check import examine as examine_deployment
from rankfold.deployment.drive import Load
from rankfold.deployment.fleet import Deployment
from rankfold.deployment.load import mixed_load
from rankfold.examiner import Examiner, References
from rankfold.example import Example
from rankfold.options import MEGA_MOE, Options
from rankfold.processes import RankProcesses
from rankfold.rig import Rig
from rankfold.serving.plan import decode_first
from sim import Topology
from sim.gloo.pool import Pool

TOKENS = (5, 1, 2, 3, 9)
"""Numbers of tokens to try: first one that TP 2 and TP 4 do not divide, with more than each."""
VOCABULARY = 256


class Judged(Protocol):
    """What the checks say of a run."""

    @property
    def checks(self) -> list[Verdict]: ...
    @property
    def headline(self) -> Verdict | None: ...


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What the checks made of one fault."""

    fault: Fault
    verdict: Verdict | None
    """The headline; None if nothing caught it."""
    by: tuple[str, ...]
    """The checks that failed, in the order in which they are read; the headline's first."""
    seconds: float
    """From switching the fault on to the first verdict that fails, worlds and models included."""
    topology: str = ""
    """The smallest configuration found that fails in the same way."""
    tokens: int = 0
    missed: tuple[str, ...] = field(default=())
    """Topologies that should show the fault and did not."""

    @property
    def caught(self) -> bool:
        """Whether a check failed."""
        return self.verdict is not None

    @property
    def right_class(self) -> bool:
        """Whether the headline names the class of the fault."""
        return self.verdict is not None and self.verdict.kind in self.fault.kinds

    @property
    def right_place(self) -> bool:
        """Whether the headline names the layer or the operation."""
        return self.verdict is not None and is_at(self.fault, self.verdict)


def is_at(fault: Fault, verdict: Verdict) -> bool:
    """Whether a verdict places a fault where it is."""
    place = f"{verdict.at}\n{verdict.where}"
    return any(part in place for part in fault.at)


def unfit(fault: Fault) -> str:
    """Why rank processes cannot show a fault at all; "" if they can."""
    if isinstance(fault, ProgramFault):
        return "its stand-in program runs on folded ranks"
    if isinstance(fault, HandOverFault):
        return "what is handed over and when is decided beside the ranks, where no process looks"
    if "late" in dict(fault.needs):
        return "only folded ranks can be made to deliver late"
    return ""


def try_fault(fault: Fault, references: References, pool: Pool | None = None) -> Trial:
    """Switch a fault on, look for it on its topologies, and then for a smaller case of it.

    Args:
        fault: over processes one that is not `unfit`.
        references: shared by trials.
        pool: where processes for the ranks come from; None folds them.
    """
    started = time.perf_counter()
    # In processes the fault is switched on there.
    here = fault.apply() if pool is None else nullcontext()
    with here, _runner(fault, references, pool) as run:
        found: tuple[str, int, Judged] | None = None
        missed = []
        for word in fault.shows:
            for tokens in run.tokens:
                judged = run.judge(word, tokens)
                if judged.headline is not None:
                    found = (word, tokens, judged)
                    break
            if found:
                break
            missed.append(word)
        seconds = time.perf_counter() - started
        if found is None:
            return Trial(fault=fault, verdict=None, by=(), seconds=seconds, missed=tuple(missed))
        word, tokens, judged = found
        verdict = judged.headline
        assert verdict is not None
        smallest = _smallest(run, word, tokens, verdict)
    failed = [check.name for check in judged.checks if not check.ok]
    return Trial(
        fault=fault,
        verdict=verdict,
        by=tuple(dict.fromkeys((verdict.name, *failed))),
        seconds=seconds,
        topology=word,
        tokens=run.size(word, smallest),
        missed=tuple(missed),
    )


def _smallest(run: Runner, word: str, tokens: int, verdict: Verdict) -> int:
    """The fewest tokens that fail in the same way on a topology."""
    for fewer in sorted(run.smaller(tokens)):
        again = run.judge(word, fewer).headline
        if again is not None and (again.name, again.kind) == (verdict.name, verdict.kind):
            return fewer
    return tokens


class Runner(Protocol):
    """Runs one fault's example on a topology."""

    tokens: Sequence[int]

    def judge(self, word: str, tokens: int) -> Judged:
        """Run and judge."""
        ...

    def smaller(self, tokens: int) -> Iterator[int]:
        """Fewer tokens to try."""
        ...

    def size(self, word: str, tokens: int) -> int:
        """Tokens of a run, of all DP ranks together."""
        ...

    def __enter__(self) -> Runner: ...
    def __exit__(self, *error: object) -> None: ...


def _runner(fault: Fault, references: References, pool: Pool | None) -> Runner:
    if isinstance(fault, ProgramFault):
        return _OfProgram(fault)
    if isinstance(fault, DeploymentFault):
        return _OfDeployment(fault, references, pool)
    if isinstance(fault, HandOverFault):
        return _OfHandOver(fault, references)
    return _OfModel(fault, references, pool)


class _OfModel:
    """On vLLM's model."""

    def __init__(self, fault: Fault, references: References, pool: Pool | None) -> None:
        self._fields: dict[str, Any] = dict(fault.needs)
        processes = None if pool is None else RankProcesses(pool, fault=fault.name)
        self._examiner = Examiner(references, processes=processes)
        lens = self._fields.pop("seq_lens", None)
        self.tokens: Sequence[int] = TOKENS if lens is None else (sum(lens),)
        self._lens = lens

    def judge(self, word: str, tokens: int) -> Judged:
        return self._examiner.examine(example_of(word, tokens, self._fields, self._lens))

    def smaller(self, tokens: int) -> Iterator[int]:
        # A fault that needs sequences of certain lengths has no smaller ones.
        if self._lens is None:
            yield from (fewer for fewer in TOKENS if fewer < tokens)

    def size(self, word: str, tokens: int) -> int:
        return tokens

    def __enter__(self) -> _OfModel:
        return self

    def __exit__(self, *error: object) -> None:
        self._examiner.close()


def example_of(
    word: str, tokens: int, fields: dict[str, Any], seq_lens: tuple[int, ...] | None = None
) -> Example:
    """The example of a fault: its own fields, and plain ones for the rest."""
    topology = Topology.parse(word)
    lens = seq_lens or ((tokens - 1, 1) if tokens > 2 else (tokens,))
    plain: dict[str, Any] = {"layers": ("dm" * topology.pp)[: max(2, topology.pp)]}
    if fields.get("moe_backend") == MEGA_MOE:
        plain["dtype"] = "bfloat16"
    made = {**plain, **fields}
    if made.get("attention", "dense") != "dense" and not (made.get("chunk") or made.get("decode")):
        lens = decode_first(lens)
    made.setdefault("token_ids", batch_of(lens, VOCABULARY))
    return Example(topology=word, seq_lens=lens, **made)


class _OfDpRanks:
    """On DP ranks with tokens of their own: the number of tokens is the most that one may have."""

    def __init__(self, fault: ProgramFault | DeploymentFault) -> None:
        self._fault = fault
        self.tokens: Sequence[int] = (max(fault.tokens),)

    def _given(self, word: str, tokens: int) -> tuple[int, ...]:
        given = spread(self._fault.tokens, Topology.parse(word))
        return tuple(min(of_rank, tokens) for of_rank in given)

    def smaller(self, tokens: int) -> Iterator[int]:
        yield from range(1, tokens)

    def size(self, word: str, tokens: int) -> int:
        return sum(self._given(word, tokens))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None


class _OfProgram(_OfDpRanks):
    """On a stand-in program."""

    def __init__(self, fault: ProgramFault) -> None:
        super().__init__(fault)
        self._program, self._schedule = fault.program, fault.schedule

    def judge(self, word: str, tokens: int) -> Judged:
        given = self._given(word, tokens)
        return judge_program(self._program, Topology.parse(word), given, self._schedule)


class _OfDeployment(_OfDpRanks):
    """On vLLM's model."""

    def __init__(self, fault: DeploymentFault, references: References, pool: Pool | None) -> None:
        super().__init__(fault)
        processes = None if pool is None else RankProcesses(pool, fault=fault.name)
        self._rig = Rig(weights=references.weights, processes=processes)

    def judge(self, word: str, tokens: int) -> Judged:
        judged, _ = examine(self._rig, dp_options(word, self._given(word, tokens)))
        return judged

    def __exit__(self, *error: object) -> None:
        self._rig.close()


class _OfHandOver:
    """On workers that hand KV caches over: the number is that of requests."""

    def __init__(self, fault: HandOverFault, references: References) -> None:
        self._fault = fault
        self.tokens: Sequence[int] = (fault.requests,)
        self._rig = Rig(weights=references.weights)

    def judge(self, word: str, tokens: int) -> Judged:
        return examine_hand_overs(self._rig, word, tokens)

    def smaller(self, tokens: int) -> Iterator[int]:
        yield from (fewer for fewer in (1, 2, 4) if fewer < tokens)

    def size(self, word: str, tokens: int) -> int:
        return tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._rig.close()


def examine_hand_overs(rig: Rig, word: str, requests: int) -> Judged:
    """What the checks say of a few requests that are handed over by a disturbed wire."""
    deployment = Deployment.parse(word)
    options = Options(topology=deployment.decode.topology, layers="dm", attention="model")
    load = Load(requests=mixed_load(requests, 2, options.tiny, 0), disturbance=Disturbance())
    return examine_deployment(rig, options, deployment, load)


def dp_options(word: str, tokens: tuple[int, ...]) -> Options:
    """The smallest model that a fault of DP ranks needs, and so many tokens of each."""
    return Options(topology=Topology.parse(word), tokens=sum(tokens), dp_tokens=tokens, layers="dm")
