"""What a rank is asked to do, on whichever transport: build a model and keep it, and step it.

All are top-level functions of the rank's context, so that they also go to another process. Models
stay in `ctx.kept`; what comes back is plain data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from model.batch import Batch
from model.device import moved
from model.facts import facts
from model.handover.layout import Held
from model.provenance import Loaded, Numbering
from model.subject import StepResult, Subject
from properties.poison import poisoned
from rankfold.options import Options
from rankfold.run import build
from sim import RankContext


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Some tokens of one head, in the caches of a rank."""

    slot: int
    """The request, as the caches count them."""
    layer: str
    head: int
    """Of the whole model."""
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, eq=False)
class RankBuilt:
    """What is to be known of one rank's model."""

    facts: Mapping[str, Any]
    loaded: Loaded | None
    """What was loaded where, if it was asked for."""


def build_model(
    ctx: RankContext,
    number: int,
    options: Options,
    weights: Mapping[str, torch.Tensor],
    numbering: Numbering | None,
) -> RankBuilt:
    """Build a model and keep it under this number."""
    subject = ctx.kept[number] = build(ctx, options, weights, numbering)
    loaded, subject.loaded = subject.loaded, None
    return RankBuilt(facts=facts(subject.model), loaded=loaded)


def step_model(
    ctx: RankContext,
    number: int,
    batch: Batch | Sequence[Batch],
    aux: tuple[int, ...],
    poison: bool,
) -> StepResult:
    """Step a model.

    batch: of all ranks, or of each DP rank.
    poison: whether to fill this process's uninitialised memory; folded ranks share theirs, which
    is filled around the whole run.
    """
    subject = ctx.kept[number]
    subject.capture_aux(aux)
    own = batch if isinstance(batch, Batch) else batch[_dp_rank(ctx)]
    with poisoned() if poison else nullcontext():
        return subject.step(moved(own))


def held_caches(ctx: RankContext, number: int) -> tuple[Held, ...]:
    """What a model's caches hold on this rank."""
    held: tuple[Held, ...] = ctx.kept[number].held
    return held


def read_caches(
    ctx: RankContext, number: int, wanted: Mapping[int, Sequence[Slice]]
) -> list[torch.Tensor]:
    """What the caches hold of these heads and tokens, each [tokens, features].

    wanted: of each rank.
    """
    subject = ctx.kept[number]
    return [
        subject.caches.read(part.slot, part.layer, part.start, part.stop)[
            :, _place(subject, part)
        ].cpu()
        for part in wanted.get(ctx.rank, ())
    ]


def write_caches(
    ctx: RankContext, number: int, given: Mapping[int, Sequence[tuple[Slice, torch.Tensor]]]
) -> None:
    """Write [tokens, features] each to the caches.

    given: of each rank.
    """
    subject = ctx.kept[number]
    for part, values in given.get(ctx.rank, ()):
        place = _place(subject, part)
        subject.caches.write(part.slot, part.layer, part.start, place, values)


def cache_contents(
    ctx: RankContext, number: int, dp_rank: int, slot: int, tokens: int
) -> dict[str, torch.Tensor]:
    """What the caches of the ranks of a DP rank hold of a request, by layer, each [tokens, heads,
    features]; nothing on the other ranks."""
    if _dp_rank(ctx) != dp_rank:
        return {}
    caches = ctx.kept[number].caches
    return {layer: caches.read(slot, layer, 0, tokens).cpu() for layer in caches.specs}


def hold_request(ctx: RankContext, number: int, dp_rank: int, slot: int, tokens: int) -> None:
    """Count so many tokens of a request as held by the ranks of a DP rank."""
    if _dp_rank(ctx) == dp_rank:
        ctx.kept[number].caches.hold(slot, tokens)


def free_request(ctx: RankContext, number: int, dp_rank: int, slot: int) -> None:
    """Give up what the ranks of a DP rank hold of a request."""
    if _dp_rank(ctx) == dp_rank:
        ctx.kept[number].caches.free(slot)


def _dp_rank(ctx: RankContext) -> int:
    return ctx.topology.coordinates(ctx.rank)["dp"]


def _place(subject: Subject, part: Slice) -> int:
    held: Held = next(each for each in subject.held if each.layer == part.layer)
    return held.place(part.head)


def partial_step(ctx: RankContext, number: int) -> StepResult:
    """What this rank recorded of a step that broke."""
    return ctx.kept[number].partial_result()


def drop_model(ctx: RankContext, number: int) -> None:
    """Let go of a model."""
    ctx.kept.pop(number, None)
