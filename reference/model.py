"""MiniMax-M3 in float64 on one rank, with a named tap after every block.

stream = embed(tokens)                       tap embed
for each layer:
    stream += attention(norm(stream))        taps .attn, .residual (the new stream)
    stream += ffn(norm(stream))              taps .router, .experts_chosen, .ffn, .stream
logprobs = log_softmax(head(norm(stream)))   taps norm, logits, logprobs
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from reference.attention import attention
from reference.config import M3Config
from reference.moe import dense, mixture, route
from reference.ops import gemma_norm, linear, log_softmax
from reference.rounding import EXACT, Kind, Rounding
from reference.weights import Weights, as_float64

Taps = dict[str, Tensor]
"""Tap name -> value with T rows, in the order of computation; float64, `experts_chosen` int64."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One forward's tokens: whole sequences, one after another."""

    token_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64, the rotary position of each token."""
    seq_lens: tuple[int, ...]
    """Rows of each sequence; they sum to T. T and any length may be 0."""

    def __post_init__(self) -> None:
        for name in ("token_ids", "positions"):
            value: Tensor = getattr(self, name)
            if value.dtype != torch.int64 or value.dim() != 1:
                raise ValueError(
                    f"{name} must be a 1-d int64 tensor, not {value.dtype} "
                    f"of shape {tuple(value.shape)}"
                )
        total = sum(self.seq_lens)
        if min(self.seq_lens, default=0) < 0 or not (
            total == len(self.token_ids) == len(self.positions)
        ):
            raise ValueError(
                f"seq_lens {self.seq_lens} must be non-negative and sum to the number of "
                f"token_ids ({len(self.token_ids)}) and positions ({len(self.positions)})"
            )


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a forward produced."""

    taps: Taps
    """embed; layers.{i}.attn, .residual, .ffn, .stream; in MoE layers also .router and
    .experts_chosen; norm; logits; logprobs."""
    routing_margin: dict[int, Tensor]
    """MoE layer -> [T] gap between the k-th and the next selection score."""
    routing_rejected: tuple[tuple[int, int], ...]
    """(layer, token) whose proposed experts were illegal; the reference's own were used."""
    parts: Taps
    """What the .ffn of a MoE layer is a sum of: layers.{i}.shared and .routed."""


def forward(
    config: M3Config,
    weights: Weights,
    batch: Batch,
    *,
    routing: Mapping[int, Tensor] | None = None,
    tie: Mapping[int, float] | float = 0.0,
    rounding: Rounding = EXACT,
) -> Result:
    """Run the model.

    weights: names without the "model." prefix, any float dtype (see `as_float64`).
    routing: MoE layer -> [T, K] expert ids that a subject chose. Near ties may fall the other
    way in lower precision, so a legal choice is followed: every id distinct and its selection
    score (sigmoid + bias) no lower than the k-th best minus `tie` (one number, or by layer).
    An illegal row is reported and the reference's own choice used.
    rounding: with anything but EXACT the taps are those of its last probe.
    Raises ValueError for weights, token ids or routing that do not fit the configuration.
    """

    def tolerance(layer: int, selection: Tensor) -> float:
        return tie.get(layer, 0.0) if isinstance(tie, Mapping) else tie

    probed = run(config, weights, batch, routing=routing, tolerance=tolerance, rounding=rounding)
    return probe(probed, -1)


def probe(probed: Result, index: int) -> Result:
    """One probe of what `run` returned."""
    taps = {
        name: tap if name.endswith("experts_chosen") else tap[index]
        for name, tap in probed.taps.items()
    }
    return Result(
        taps=taps,
        routing_margin=probed.routing_margin,
        routing_rejected=probed.routing_rejected,
        parts={name: part[index] for name, part in probed.parts.items()},
    )


def run(
    config: M3Config,
    weights: Weights,
    batch: Batch,
    *,
    routing: Mapping[int, Tensor] | None,
    tolerance: Callable[[int, Tensor], float],
    rounding: Rounding,
) -> Result:
    """All probes of `rounding` in one pass: taps have a leading dim P, `experts_chosen` not.

    Probe 0 decides the routing of all. tolerance(layer, selection scores [P, T, E]) is the
    legal distance below the k-th best. Other arguments as in `forward`.
    """
    w = as_float64(config, weights)
    _check_inputs(config, batch, routing or {})
    taps: Taps = {}
    parts: Taps = {}
    margins: dict[int, Tensor] = {}
    rejected: list[tuple[int, int]] = []

    def norm(x: Tensor, name: str) -> Tensor:
        return gemma_norm(x, w[name + ".weight"], config.rms_norm_eps, rounding)

    def add(stream: Tensor, block: Tensor) -> Tensor:
        y = stream + block
        return rounding(y, y.abs(), 1, Kind.STORED)

    stream = w["embed_tokens.weight"][batch.token_ids].expand(rounding.probes, -1, -1)
    taps["embed"] = stream
    for i, is_moe in enumerate(config.moe_layer_freq):
        name = f"layers.{i}"
        h = norm(stream, f"{name}.input_layernorm")
        attn = attention(config, w, i, h, batch.positions, batch.seq_lens, rounding)
        residual = add(stream, attn)
        taps |= {f"{name}.attn": attn, f"{name}.residual": residual}
        h = norm(residual, f"{name}.post_attention_layernorm")
        if is_moe:
            proposed = (routing or {}).get(i)
            routed = route(config, w, i, h, proposed, partial(tolerance, i), rounding)
            taps |= {f"{name}.router": routed.logits, f"{name}.experts_chosen": routed.chosen}
            margins[i] = routed.margin
            rejected += [(i, token) for token in routed.rejected]
            mixed = mixture(config, w, i, h, routed, rounding)
            parts |= {f"{name}.shared": mixed.shared, f"{name}.routed": mixed.routed}
            ffn = mixed.out
        else:
            ffn = dense(config, w, i, h, rounding)
        stream = add(residual, ffn)
        taps |= {f"{name}.ffn": ffn, f"{name}.stream": stream}
    taps["norm"] = norm(stream, "norm")
    taps["logits"] = linear(taps["norm"], w["lm_head.weight"], rounding, Kind.STORED)
    taps["logprobs"] = log_softmax(taps["logits"], rounding)
    return Result(
        taps=taps, routing_margin=margins, routing_rejected=tuple(rejected), parts=parts
    )


def _check_inputs(config: M3Config, batch: Batch, routing: Mapping[int, Tensor]) -> None:
    tokens = len(batch.token_ids)
    if tokens and not 0 <= int(batch.token_ids.min()) <= int(batch.token_ids.max()) < (
        config.vocab_size
    ):
        raise ValueError(f"token_ids must lie in 0..{config.vocab_size - 1}")
    shape = (tokens, config.num_experts_per_tok)
    for layer, chosen in routing.items():
        if layer not in config.moe_layers:
            raise ValueError(f"routing names layer {layer}; MoE layers are {config.moe_layers}")
        if tuple(chosen.shape) != shape or chosen.is_floating_point():
            raise ValueError(
                f"routing of layer {layer} must be integer ids of shape {shape}, "
                f"not {chosen.dtype} of shape {tuple(chosen.shape)}"
            )
