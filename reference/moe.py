"""Feed-forward blocks: dense, and mixture of experts with sigmoid routing and a shared expert."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from reference.config import M3Config
from reference.ops import ELEMENTARY, all_reduced, linear, row_parallel, swiglu_oai
from reference.rounding import Kind, Rounding
from reference.weights import Weights

Tolerance = Callable[[Tensor], float]
"""Selection scores [P, T, E] of a layer -> how far below the k-th best a choice may be."""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Which experts a layer used, and how close the choice was."""

    logits: Tensor
    """[P, T, E] router logits."""
    chosen: Tensor
    """[T, K] int64 expert ids, ascending in each row; the same for all probes."""
    mix: Tensor
    """[P, T, K] weight of each chosen expert, routed scaling included."""
    margin: Tensor
    """[T] selection score of the k-th best minus that of the next; inf if there is none."""
    rejected: tuple[int, ...]
    """Rows whose proposed experts were not a legal tie; the reference's own were used."""


def dense(config: M3Config, weights: Weights, layer: int, x: Tensor, rounding: Rounding) -> Tensor:
    """The dense FFN of one layer: x [P, T, H] -> [P, T, H]."""
    return all_reduced(*_ffn(config, weights, f"layers.{layer}.mlp.", x, rounding), rounding)


def route(
    config: M3Config,
    weights: Weights,
    layer: int,
    x: Tensor,
    proposed: Tensor | None,
    tolerance: Tolerance,
    rounding: Rounding,
) -> Routing:
    """Choose K experts per token by sigmoid score plus bias; follow `proposed` if legal.

    x [P, T, H]; proposed [T, K] integer ids that a subject chose, or None. A row of it is legal
    if its ids exist, differ, and each has selection score >= (k-th best) - tolerance.
    """
    prefix = f"layers.{layer}.block_sparse_moe."
    logits = linear(x, weights[prefix + "gate.weight"], rounding, Kind.ACCUMULATOR)
    score = torch.sigmoid(logits)
    score = rounding(score, score * (1 + logits.abs()), ELEMENTARY, Kind.ACCUMULATOR)
    selection = score
    if config.use_routing_bias:
        selection = score + weights[prefix + "e_score_correction_bias"]
        selection = rounding(selection, selection.abs(), 1, Kind.ACCUMULATOR)

    k = config.num_experts_per_tok
    # Stable: among equal scores the lowest id comes first.
    ranked, order = selection[0].sort(dim=-1, descending=True, stable=True)
    below = ranked[:, k] if k < ranked.shape[1] else torch.full_like(ranked[:, 0], -torch.inf)
    margin = ranked[:, k - 1] - below
    chosen, rejected = order[:, :k], ()
    threshold = ranked[:, k - 1] - tolerance(selection)
    if proposed is not None:
        legal = _legal(selection[0], threshold, proposed)
        chosen = torch.where(legal[:, None], proposed.to(torch.int64), chosen)
        rejected = tuple((~legal).nonzero().flatten().tolist())
    chosen = chosen.sort(dim=-1).values

    picked = score.gather(-1, chosen.expand(score.shape[0], -1, -1))
    mix = picked / picked.sum(-1, keepdim=True) * config.routed_scaling_factor
    mix = rounding(mix, mix, k + 2, Kind.ACCUMULATOR)
    return Routing(logits=logits, chosen=chosen, mix=mix, margin=margin, rejected=rejected)


def _legal(selection: Tensor, threshold: Tensor, proposed: Tensor) -> Tensor:
    """[T] bool: which rows of proposed [T, K] are distinct, existing, good enough experts."""
    exists = (proposed >= 0) & (proposed < selection.shape[-1])
    ids = proposed.to(torch.int64).where(exists, 0)
    good = selection.gather(-1, ids) >= threshold[:, None]
    ascending = proposed.sort(dim=-1).values
    distinct = ascending[:, 1:] != ascending[:, :-1]
    return (exists & good).all(-1) & distinct.all(-1)


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """A MoE layer's output and what it is a sum of, each [P, T, H]."""

    out: Tensor
    routed: Tensor
    shared: Tensor
    """Zeros where the model has no shared expert."""


def mixture(
    config: M3Config, weights: Weights, layer: int, x: Tensor, routing: Routing, rounding: Rounding
) -> Mixture:
    """sum_k mix_k expert_k(x) + shared(x), of x [P, T, H]; shared is not scaled."""
    prefix = f"layers.{layer}.block_sparse_moe."
    experts = range(config.num_local_experts)
    gate_EIH, up_EIH, down_EHI = (
        torch.stack([weights[f"{prefix}experts.{e}.{name}.weight"] for e in experts])
        for name in ("w1", "w3", "w2")
    )
    # Every expert on every token, times 0 where it was not chosen: for the small models that
    # are checked this is far cheaper than one small product per expert.
    x_experts = _quantised(x, rounding)
    h = _hidden(config, gate_EIH.flatten(0, 1), up_EIH.flatten(0, 1), x_experts, rounding)
    h_PETI = (
        _quantised(h, rounding)
        .reshape(*x.shape[:2], len(experts), config.intermediate_size)
        .transpose(1, 2)
    )
    out_PETH, squares_PETH = row_parallel(h_PETI, down_EHI, rounding)
    mix_PTE = torch.zeros_like(routing.logits).scatter(
        -1, routing.chosen.expand_as(routing.mix), routing.mix
    )
    mix_PET1 = mix_PTE.mT[..., None]
    # One more store than the expert's own: its output times its weight.
    weighted = rounding(mix_PET1 * out_PETH, mix_PET1 * out_PETH.abs(), 1, Kind.STORED)
    routed, squares = weighted.sum(1), (mix_PET1.square() * squares_PETH).sum(1)
    shared = torch.zeros_like(routed)
    if config.n_shared_experts:
        shared, shared_squares = _ffn(config, weights, prefix + "shared_experts.", x, rounding)
        squares = squares + shared_squares
    # The sum over experts, stored once before the all-reduce.
    y = rounding(routed + shared, squares.sqrt(), config.num_experts_per_tok + 1, Kind.STORED)
    return Mixture(out=all_reduced(y, squares, rounding), routed=routed, shared=shared)


def _quantised(x: Tensor, rounding: Rounding) -> Tensor:
    """x [..., K] as experts in MXFP8 see it: blocks of 32 along K share a scale (OCP MX v1.0)."""
    if not rounding.quantises:
        return x
    blocks = x.abs().reshape(*x.shape[:-1], -1, 32)
    largest = blocks.amax(-1, keepdim=True).expand_as(blocks).reshape(x.shape)
    return rounding(x, largest, 1, Kind.QUANTISED)


def _ffn(
    config: M3Config, weights: Weights, prefix: str, x: Tensor, rounding: Rounding
) -> tuple[Tensor, Tensor]:
    """down(swiglu(gate x, up x)) and its squared terms, not yet reduced: see `row_parallel`."""
    gate, up, down = (weights[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down"))
    return row_parallel(_hidden(config, gate, up, x, rounding), down, rounding)


def _hidden(config: M3Config, gate: Tensor, up: Tensor, x: Tensor, rounding: Rounding) -> Tensor:
    return swiglu_oai(
        linear(x, gate, rounding, Kind.STORED),
        linear(x, up, rounding, Kind.STORED),
        config.swiglu_limit,
        config.swiglu_alpha,
        config.swiglu_beta,
        rounding,
    )
