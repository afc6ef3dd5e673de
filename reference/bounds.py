"""How far a correct subject of a given precision may be from the reference, tap by tap."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from reference.config import M3Config
from reference.model import Batch, Follow, LayerTolerance, Result, is_choice, probe, run
from reference.rounding import Perturbed, Rounding, unit_roundoff
from reference.weights import Weights


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Bounds of one batch, with the exact run that they belong to."""

    taps: dict[str, float]
    """Tap name -> bound on max |subject - reference|. `experts_chosen` and `blocks_chosen` have
    0: ids must agree, since a legal tie was already followed."""
    tie: dict[int, float]
    """MoE layer -> tolerance for following a subject's routing (`tie` of `forward`): twice the
    bound on one selection score, because two scores may move towards each other."""
    selection_tie: dict[int, float]
    """Sparse layer -> the same for its blocks. It is large beside a float32 model's other bounds:
    blocks are scored in bfloat16 (see Kind.INDEXED)."""
    result: Result
    """The exact run with the choices used: that of `forward` with the same routing, selection and
    ties."""


def bounds(
    config: M3Config,
    weights: Weights,
    batch: Batch,
    *,
    dtype: torch.dtype,
    ranks: int,
    routing: Mapping[int, Tensor] | None = None,
    selection: Mapping[int, Tensor] | None = None,
    probes: int = 3,
    safety: float = 4.0,
    seed: int = 0,
    accumulate: torch.dtype = torch.float32,
    mxfp8_experts: bool = False,
) -> Bounds:
    """Bound each tap by `safety` times the largest move seen in `probes` perturbed runs.

    dtype: in which the subject stores weights and activations. ranks: how many ranks' partial
    sums an all-reduce of the subject adds. accumulate: in which it accumulates and computes
    norms, rotary tables, the router and logprobs; float32 also for a float64 subject, unless
    its kernels are float64 throughout. mxfp8_experts: whether its routed experts round their
    operands to MXFP8 (their weights are given here as what they then stand for). routing,
    selection: as in `forward`; legality is judged with the tolerance measured here, layer by
    layer, so that one pass answers everything.

    bound(tap) = safety * max over probes and elements |perturbed - exact|
               + unit_roundoff(dtype) * max |exact|
    All runs share one routing and one selection. The random sign of each rounding makes errors
    add up as in practice; `safety` covers the chance that a subject's add up worse than in all
    probes.
    """
    return measured(
        partial(run, config, weights, batch),
        routing,
        selection,
        dtype=dtype,
        ranks=ranks,
        probes=probes,
        safety=safety,
        seed=seed,
        accumulate=accumulate,
        mxfp8_experts=mxfp8_experts,
    )


def measured(
    run: Callable[[Follow, Rounding], Result],
    routing: Mapping[int, Tensor] | None,
    selection: Mapping[int, Tensor] | None,
    *,
    dtype: torch.dtype,
    ranks: int,
    probes: int,
    safety: float,
    seed: int,
    accumulate: torch.dtype,
    mxfp8_experts: bool,
) -> Bounds:
    """`bounds` of anything that runs all probes of a rounding; arguments as there."""
    generator = torch.Generator().manual_seed(seed)
    u_store = unit_roundoff(dtype)
    u_acc = unit_roundoff(accumulate)
    noise = Perturbed(
        u_store=u_store,
        u_acc=u_acc,
        ranks=ranks,
        generator=generator,
        probes=probes,
        quantises=mxfp8_experts,
    )
    tie: dict[int, float] = {}
    selection_tie: dict[int, float] = {}

    def kept(into: dict[int, float]) -> LayerTolerance:
        def tolerance(layer: int, scores: Tensor) -> float:
            into[layer] = 2 * (safety * _largest_move(scores) + u_acc * _largest(scores[0]))
            return into[layer]

        return tolerance

    follow = Follow(
        routing=routing,
        tolerance=kept(tie),
        selection=selection,
        selection_tolerance=kept(selection_tie),
    )
    probed = run(follow, noise)
    taps = {
        name: 0.0 if is_choice(name) else safety * _largest_move(tap) + u_store * _largest(tap[0])
        for name, tap in probed.taps.items()
    }
    return Bounds(taps=taps, tie=tie, selection_tie=selection_tie, result=probe(probed, 0))


def _largest_move(probed: Tensor) -> float:
    return _largest(probed[1:] - probed[0])


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0
