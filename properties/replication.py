"""What is declared replicated is the same on every rank, bit for bit, also across stages.

Ranks that compute the same thing from the same inputs get the same bits; where they differ, a
later slice-and-gather (as in the pipeline send) would mix rows of different values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from properties.captured import Captured
from properties.verdict import Verdict
from sim import Topology
from sim.buffers import same_bits


def same_across_ranks(topology: Topology, captured: Sequence[Mapping[str, Captured]]) -> Verdict:
    """Every tap declared replicated has the same bits on all TP ranks that have it."""
    names = dict.fromkeys(name for taps in captured for name in taps)
    count = 0
    for name in names:
        for group in topology.groups["tp"]:
            taps = {r: captured[r][name] for r in group if name in captured[r]}
            if not taps or any(tap.declared != "replicate" for tap in taps.values()):
                continue
            count += 1
            missing = [rank for rank in group if rank not in taps]
            majority, odd = _sides({rank: tap.value for rank, tap in taps.items()})
            if not (missing or odd):
                continue
            if missing:
                where, why = f"ranks {missing} of {list(group)}", "these ranks do not have it"
            else:
                where = f"ranks {odd} against ranks {majority}"
                why = _difference(taps[odd[0]].value, taps[majority[0]].value)
            return Verdict(
                name="replication",
                ok=False,
                what=f"{name} is not the same on all TP ranks",
                where=f"{name}, {where}",
                why=why,
                kind="ranks differ",
                at=name,
            )
    return Verdict(
        name="replication",
        ok=True,
        what=f"{count} replicated values have the same bits on all TP ranks",
    )


def _sides(values: Mapping[int, torch.Tensor]) -> tuple[list[int], list[int]]:
    """The ranks that share the most common value, and the others."""
    sides: list[list[int]] = []
    for rank, value in values.items():
        side = next((side for side in sides if same_bits(values[side[0]], value)), None)
        if side is None:
            sides.append([rank])
        else:
            side.append(rank)
    majority = max(sides, key=len)
    return majority, sorted(set(values) - set(majority))


def same_across_stages(topology: Topology, captured: Sequence[Mapping[str, Captured]]) -> Verdict:
    """Every rank of a stage receives what its peer of the stage before has sent, bit for bit."""
    count = 0
    for column in topology.groups["pp"]:
        for stage in range(1, len(column)):
            sender, receiver = captured[column[stage - 1]], captured[column[stage]]
            sent = _under(sender, f"stage.{stage - 1}.send.")
            got = _under(receiver, f"stage.{stage}.recv.")
            wrong = sorted(set(sent) ^ set(got)) or [
                key for key in sent if not same_bits(sent[key].value, got[key].value)
            ]
            if wrong:
                return Verdict(
                    name="stage transfer",
                    ok=False,
                    what=f"stage {stage} did not receive what stage {stage - 1} sent",
                    where=f"{', '.join(wrong)}, rank {column[stage - 1]} to {column[stage]}",
                    why="every TP rank sends a slice and the receivers gather them: stage outputs "
                    "must cover all tokens and be the same on all TP ranks",
                    kind="not as sent",
                    at=f"stage.{stage}.recv.{wrong[0]}",
                )
            count += len(sent)
    return Verdict(
        name="stage transfer",
        ok=True,
        what=f"{count} tensors arrived at the next stage as they were sent",
    )


def _under(taps: Mapping[str, Captured], prefix: str) -> dict[str, Captured]:
    return {n.removeprefix(prefix): tap for n, tap in taps.items() if n.startswith(prefix)}


def _difference(a: torch.Tensor, b: torch.Tensor) -> str:
    if a.shape != b.shape:
        return f"shapes {list(a.shape)} and {list(b.shape)}"
    if a.dtype != b.dtype:
        return f"dtypes {a.dtype} and {b.dtype}"
    worst = float((a.double() - b.double()).abs().max())
    return f"largest difference {worst:.3g}"
