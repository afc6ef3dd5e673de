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
from model.provenance import Loaded, Numbering
from model.subject import StepResult
from properties.poison import poisoned
from rankfold.options import Options
from rankfold.run import build
from sim import RankContext


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
    own = batch if isinstance(batch, Batch) else batch[ctx.topology.coordinates(ctx.rank)["dp"]]
    with poisoned() if poison else nullcontext():
        return subject.step(moved(own))


def partial_step(ctx: RankContext, number: int) -> StepResult:
    """What this rank recorded of a step that broke."""
    return ctx.kept[number].partial_result()


def drop_model(ctx: RankContext, number: int) -> None:
    """Let go of a model."""
    ctx.kept.pop(number, None)
