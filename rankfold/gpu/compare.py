"""The verdicts on a launch: its own checks, and its agreement with folded ranks."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch

from rankfold.gpu.plan import PLAIN, SP_OFF, SP_ON, Plan
from rankfold.gpu.record import Measured, Record
from rankfold.gpu.rows import Row, not_run, passed
from sim.ledger import Entry, first_difference

_CHOICES = (".experts_chosen", ".blocks_chosen")
"""Taps that hold what was chosen; all others hold values."""


def agreement(
    plan: Plan, name: str, record: Record, folded: Mapping[str, Measured]
) -> Iterator[Row]:
    """The rows of one launch.

    Args:
        plan: what ran.
        name: how rows call the launch: the topology and the transport.
        record: what came of it.
        folded: the same variants on folded ranks.
    """
    for variant, _ in plan.variants:
        title = f"{name}, {variant}"
        ours, theirs = folded[variant], record.measured.get(variant)
        if theirs is None:
            yield passed(title, False, f"the ranks broke: {_line(record.broke)}")
            continue
        yield _own_checks(title, theirs)
        yield _outputs(title, ours, theirs)
        mine, other = ours.outcome.ledger.entries, theirs.outcome.ledger.entries
        if record.transport != "gloo":
            mine, other = announced(of_gpu_tensors(mine)), announced(other)
        wrong = first_difference(mine, other)
        count = len(theirs.outcome.ledger)
        yield passed(
            f"{title}: ledger",
            wrong is None,
            wrong or f"{count} operations, the same as on folded ranks",
        )


def of_gpu_tensors(entries: Sequence[Entry]) -> list[Entry]:
    """The ledger of CPU ranks as ranks with GPU tensors have it.

    vLLM's stages send a tensor over the group's CPU side if it is on the CPU, else over its device
    side; what announces it is on the CPU either way (`GroupCoordinator.send_tensor_dict`).
    """
    moved = []
    numbers: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for entry in entries:
        group = entry.group
        if entry.op == "send" and group.endswith(".cpu") and "float" in entry.dtype:
            group = group.removesuffix(".cpu")
        sequence = entry.sequence
        if entry.op == "send":
            sequence = numbers[group, entry.ranks]
            numbers[group, entry.ranks] += 1
        moved.append(entry._replace(group=group, sequence=sequence))
    return moved


def announced(entries: Sequence[Entry]) -> list[Entry]:
    """The ledger without the sizes of announcements, which name the device that tensors are on."""
    return [
        entry._replace(bytes=0, shapes=())
        if entry.op == "send" and entry.group.endswith(".cpu") and entry.dtype == "uint8"
        else entry
        for entry in entries
    ]


def _own_checks(title: str, measured: Measured) -> Row:
    if not measured.failed:
        said = f"{measured.held} checks hold against the float64 reference"
        return passed(f"{title}: checks", True, said)
    first = measured.failed[0]
    return passed(f"{title}: checks", False, f"{first.name}: {first.what} ({first.where})")


def _outputs(title: str, ours: Measured, theirs: Measured) -> Row:
    """Every tap, up to where rounding may have turned a near tie between experts or blocks."""
    name, compared = f"{title}: outputs", 0
    closest = (-1.0, "")
    for rank, (mine, other) in enumerate(
        zip(ours.outcome.captured, theirs.outcome.captured, strict=True)
    ):
        if list(mine) != list(other):
            return passed(name, False, f"rank {rank} has the taps {list(other)}")
        for tap in mine:
            a, b = mine[tap].value, other[tap].value
            if a.shape != b.shape:
                return passed(name, False, f"{tap} of rank {rank}: shape {list(b.shape)}")
            if tap.endswith(_CHOICES):
                if not torch.equal(a, b):
                    break
                continue
            if tap not in ours.bounds or not a.numel():
                continue  # of parts and of padding alone there is no bound
            delta = float((a.double() - b.double()).abs().nan_to_num(nan=0.0).max())
            bound = ours.bounds[tap] + theirs.bounds[tap]
            compared += 1
            if delta > bound:
                said = f"{tap} of rank {rank} differs by {delta:.3g}, bound {bound:.3g}"
                return passed(name, False, said)
            closest = max(
                closest, (delta / bound if bound else 0.0, f"{tap} {delta:.2g} of {bound:.2g}")
            )
    if not compared:
        return not_run(name, "other experts were chosen at near ties before the first tap")
    total = sum(not tap.endswith(_CHOICES) for taps in ours.outcome.captured for tap in taps)
    part = "" if compared == total else f" of {total}, up to near ties or without bound"
    said = f"within bound; nearest: {closest[1]}" if closest[0] else "equal bit for bit"
    return passed(name, True, f"{compared} taps{part} {said}")


def stages(plan: Plan, name: str, record: Record, alone: Record | None) -> Iterator[Row]:
    """Several stages against one, at the same TP: bit for bit.

    Args:
        plan: of the launch with several stages.
        name: of that launch.
        record: of that launch.
        alone: of the launch with one stage; None if there is none on the same transport.
    """
    if plan.topology.pp == 1:
        return
    for variant, _ in plan.variants:
        title = f"{name}, {variant}: equals {plan.alone}"
        ours = record.measured.get(variant)
        theirs = None if alone is None else alone.measured.get(variant)
        if ours is None or theirs is None:
            whose = plan.topology if ours is None else plan.alone
            yield not_run(title, f"there is no whole run of {whose} on the same transport")
            continue
        delta = (ours.outcome.logprobs.double() - theirs.outcome.logprobs.double()).abs()
        largest = float(delta.max()) if delta.numel() else 0.0
        said = f"logprobs of {delta.shape[0]} tokens: largest difference {largest:.3g}"
        bound = ours.bounds["logprobs"] + theirs.bounds["logprobs"]
        if largest and largest <= bound and record.real_mega_moe and variant != PLAIN:
            # What these kernels promise of the order of their sums is not known here.
            yield not_run(title, f"{said}, within rounding; MegaMoE's kernels may sum in any order")
        else:
            yield passed(title, not largest, said)


def step_times(plan: Plan, name: str, record: Record) -> Iterator[Row]:
    """The step time with sequence parallelism on and off."""
    if plan.timing is None:
        return
    title = f"{name}: step time, SP on and off"
    on, off = (record.step_ms.get(arm, []) for arm in (SP_ON, SP_OFF))
    if not on or not off:
        yield not_run(title, "the ranks broke before it")
        return
    shown = "; ".join(
        f"{arm} {', '.join(f'{ms:.2f}' for ms in runs)} ms"
        for arm, runs in (("on", on), ("off", off))
    )
    ratio = statistics.mean(on) / statistics.mean(off)
    yield passed(
        title,
        True,
        f"{shown}; ratio of means {ratio:.3f}. {plan.timing.tokens} tokens, {plan.timing.steps} "
        "steps a run, runs in turns; a tiny model with each operation recorded: a measurement "
        "without a threshold",
    )


def _line(text: str) -> str:
    return text.splitlines()[0] if text else "no reason is known"
