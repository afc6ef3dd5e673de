"""`rankfold check`: run vLLM's MiniMax-M3 on a folded topology and judge every tap."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

import reference
from model.batch import Batch
from model.checkpoint import checkpoint
from model.facts import facts
from model.rank_state import RANK_LOCAL
from model.subject import StepResult, Subject, check, prepare
from model.taps import Captured
from model.tiny import TinyM3
from properties import TapVerdict, Verdict, compare_taps, same_across_ranks, same_across_stages
from rankfold import report
from rankfold.errors import UsageError
from sim import Ledger, RankContext, Topology, World, label_group

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}

PLUMBING = ("vllm/distributed/", "vllm/model_executor/custom_op.py")
"""vLLM files whose frames only pass a call on to torch.distributed."""

V = TypeVar("V")
MOST_TOKENS = 2048
"""Tokens of one step; vLLM's scheduler hands out no more by default."""

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to check."""

    topology: Topology
    tokens: int = 8
    sequences: int = 1
    seed: int = 0
    dtype: str = "float32"
    layers: str = "dmmm"
    against: Topology | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UsageError(f"dtype {self.dtype!r}: use {', '.join(DTYPES)}")
        if not 0 <= self.tokens <= MOST_TOKENS:
            raise UsageError(f"{self.tokens} tokens: use 0 to {MOST_TOKENS}")
        if not 1 <= self.sequences <= max(self.tokens, 1):
            raise UsageError(
                f"{self.sequences} sequences of {self.tokens} tokens: use 1 to as many"
            )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One step of one topology."""

    topology: Topology
    results: list[StepResult]
    ledger: Ledger
    facts: Mapping[str, object]

    @property
    def captured(self) -> list[Mapping[str, Captured]]:
        """Each rank's taps."""
        return [result.taps for result in self.results]

    @property
    def logprobs(self) -> torch.Tensor:
        """[T, V], of the first rank of the last stage."""
        return next(r.logprobs for r in self.results if r.logprobs is not None)


def run_check(options: Options, progress: Progress) -> report.Report:
    """Run the subject and the reference, and compare.

    Args:
        options: what to check.
        progress: told what is being done, for a person who waits.

    Raises:
        UsageError, ShapeError, TopologyError: the input makes no sense.
        SimError: the run broke.
    """
    started = time.perf_counter()
    # Ranks take turns, so one rank's math threads would only get in the way of the next one's.
    torch.set_num_threads(1)
    tiny = TinyM3(layers=options.layers)
    for topology in filter(None, (options.topology, options.against)):
        check(tiny, topology)
    dtype = DTYPES[options.dtype]
    progress("importing vLLM")
    prepare()
    weights = checkpoint(tiny, options.seed, dtype)
    batch = Batch.random(options.tokens, tiny.vocab_size, options.seed, options.sequences)

    outcome = step(options.topology, tiny, weights, batch, dtype, progress)
    progress("computing the reference in float64")
    bounds = _reference(tiny, weights, batch, dtype, outcome)
    taps = compare_taps(
        options.topology,
        outcome.captured,
        _with_stages(outcome, bounds.result.taps),
        _with_stages(outcome, bounds.taps),
    )
    checks = [
        _oracle(taps),
        _routing(bounds.result),
        same_across_ranks(options.topology, outcome.captured),
        same_across_stages(options.topology, outcome.captured),
        _agreement(outcome.ledger),
    ]
    against = None
    if options.against is not None:
        other = step(options.against, tiny, weights, batch, dtype, progress)
        verdict, against = _against(outcome, other, bounds.taps["logprobs"])
        checks.append(verdict)
    return report.Report(
        topology=options.topology.word,
        ranks=options.topology.world_size,
        tokens=options.tokens,
        seed=options.seed,
        transport="folded",
        subject=report.Subject(**outcome.facts),  # type: ignore[arg-type]
        checks=checks,
        taps=taps,
        ledger=_traffic(outcome.ledger),
        seconds=round(time.perf_counter() - started, 3),
        against=against,
        dtype=options.dtype,
        layers=options.layers,
        sequences=options.sequences,
    )


def step(
    topology: Topology,
    tiny: TinyM3,
    weights: Mapping[str, torch.Tensor],
    batch: Batch,
    dtype: torch.dtype,
    progress: Progress,
) -> Outcome:
    """Build the subject on every rank of a folded world and run one step."""
    with World(topology, rank_local=RANK_LOCAL, plumbing=PLUMBING) as world:
        progress(f"building {topology} on {world.size} folded ranks")
        subjects = world.run(build, tiny, weights, dtype)
        world.ledger.clear()
        progress(f"running {topology}")
        results = world.run(lambda ctx: subjects[ctx.rank].step(batch))
        which = facts(subjects[-1].model)
        return Outcome(topology=topology, results=results, ledger=world.ledger, facts=which)


def build(
    ctx: RankContext, tiny: TinyM3, weights: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> Subject:
    """Build this rank's subject and name its groups for reports."""
    subject = Subject(ctx, tiny, weights, dtype)
    for label, group in subject.labels().items():
        label_group(group, label)
    return subject


def _reference(
    tiny: TinyM3,
    weights: Mapping[str, torch.Tensor],
    batch: Batch,
    dtype: torch.dtype,
    outcome: Outcome,
) -> reference.Bounds:
    routing = {}
    for layer in tiny.moe_layers:
        name = f"layers.{layer}.experts_chosen"
        chosen = [taps[name].value for taps in outcome.captured if name in taps]
        if chosen and chosen[0].shape == (batch.tokens, tiny.num_experts_per_tok):
            routing[layer] = chosen[0]
    plain = {name.removeprefix("model."): weight for name, weight in weights.items()}
    config = reference.M3Config.from_hf(tiny.text_config())
    return reference.bounds(
        config,
        reference.as_float64(config, plain),
        reference.Batch(
            token_ids=batch.token_ids, positions=batch.positions, seq_lens=batch.seq_lens
        ),
        dtype=dtype,
        ranks=outcome.topology.tp,
        routing=routing,
    )


def _with_stages(outcome: Outcome, by_tap: Mapping[str, V]) -> dict[str, V]:
    """The reference's taps with those of the stage boundaries put in, in program order."""
    last_layers = {}
    for result in outcome.results:
        layers = [int(n.split(".")[1]) for n in result.taps if n.startswith("layers.")]
        last_layers[max(layers, default=-1)] = result.stage
    merged = {}
    for name, value in by_tap.items():
        merged[name] = value
        parts = name.split(".")
        if len(parts) == 3 and parts[2] == "ffn" and int(parts[1]) in last_layers:
            stage = last_layers[int(parts[1])]
            for boundary in (f"stage.{stage}.send", f"stage.{stage + 1}.recv"):
                merged[f"{boundary}.hidden_states"] = value
                merged[f"{boundary}.residual"] = by_tap[f"layers.{parts[1]}.residual"]
    return merged


def _oracle(taps: list[TapVerdict]) -> Verdict:
    wrong = [tap for tap in taps if not tap.ok]
    if not wrong:
        return Verdict(
            name="oracle",
            ok=True,
            what=f"{len(taps)} taps are within their rounding bounds of the float64 reference",
        )
    first, rest = wrong[0], len(wrong) - 1
    follows = f"; {rest} later taps follow from it" if rest else ""
    return Verdict(
        name="oracle",
        ok=False,
        what=f"{first.name} is off by {first.max_abs_err:.3g} (bound {first.bound:.2g})",
        where=f"{first.name}, expected {first.expected}; {first.where}",
        why=first.why + follows,
    )


def _routing(result: reference.Result) -> Verdict:
    if not result.routing_rejected:
        return Verdict(name="routing", ok=True, what="every token went to its best experts")
    layer, token = result.routing_rejected[0]
    return Verdict(
        name="routing",
        ok=False,
        what=f"{len(result.routing_rejected)} tokens were routed to experts that are not the best",
        where=f"layers.{layer}.experts_chosen, token {token}",
        why="the choice differs by more than rounding can explain: wrong router input, bias or ids",
    )


def _agreement(ledger: Ledger) -> Verdict:
    groups = {(entry.group, entry.ranks) for entry in ledger.entries}
    return Verdict(
        name="ledger",
        ok=True,
        what=f"{len(ledger)} operations on {len(groups)} groups agree; nothing is pending",
    )


def _against(a: Outcome, b: Outcome, bound: float) -> tuple[Verdict, report.Against]:
    exact = (a.topology.tp, a.topology.dp, a.topology.ep) == (
        b.topology.tp,
        b.topology.dp,
        b.topology.ep,
    )
    deltas = (a.logprobs.double() - b.logprobs.double()).abs()
    delta = float(deltas.max()) if deltas.numel() else 0.0
    allowed = 0.0 if exact else 2 * bound
    how = "bit for bit" if exact else f"within rounding ({allowed:.2g})"
    result = report.Against(topology=b.topology.word, max_abs_delta=delta, bound=allowed)
    ok = delta <= allowed
    return (
        Verdict(
            name="against",
            ok=ok,
            what=f"logprobs of {a.topology} and {b.topology} "
            + (f"are equal {how}" if ok else f"differ by {delta:.3g}, not equal {how}"),
            where="" if ok else "logprobs",
            why="" if ok else "the same TP degree sums the same terms in the same order",
        ),
        result,
    )


def _traffic(ledger: Ledger) -> report.Traffic:
    by_op: dict[str, report.OpTraffic] = {}
    for (group, op), (count, size) in ledger.totals().items():
        of_op = by_op.setdefault(op, report.OpTraffic())
        of_op.count += count
        of_op.bytes += size
        of_op.groups[group] = {"count": count, "bytes": size}
    return report.Traffic(
        collectives=len(ledger), bytes=sum(of_op.bytes for of_op in by_op.values()), by_op=by_op
    )
