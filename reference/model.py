"""MiniMax-M3 in float64 on one rank, with a named tap after every block.

stream = embed(tokens)                       tap embed
for each layer:
    stream += attention(norm(stream))        taps .blocks_chosen, .attn, .residual (the new stream)
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
from reference.sparse import select
from reference.weights import Weights, as_float64

Taps = dict[str, Tensor]
"""Tap name -> value with T rows, in the order of computation; float64, `experts_chosen` and
`blocks_chosen` int64."""

LayerTolerance = Callable[[int, Tensor], float]
"""(layer, scores of all probes) -> how far below the k-th best a choice may be."""


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
    .experts_chosen; in sparse layers .blocks_chosen [T, G, K]; norm; logits; logprobs."""
    routing_margin: dict[int, Tensor]
    """MoE layer -> [T] gap between the k-th and the next selection score."""
    routing_rejected: tuple[tuple[int, int], ...]
    """(layer, token) whose proposed experts were illegal; the reference's own were used."""
    selection_rejected: tuple[tuple[int, int], ...]
    """(layer, token) some index head of which had illegal blocks proposed; for that head the
    reference's own were used."""
    parts: Taps
    """What the .ffn of a MoE layer is a sum of: layers.{i}.shared and .routed."""


@dataclass(frozen=True, kw_only=True)
class Follow:
    """A subject's choices, and how far from the best they may be and still be followed."""

    routing: Mapping[int, Tensor] | None
    tolerance: LayerTolerance
    """(layer, selection scores [P, T, E]) -> legal distance of an expert below the k-th best."""
    selection: Mapping[int, Tensor] | None
    selection_tolerance: LayerTolerance
    """(layer, block scores [P, T, G, B]) -> that of a block."""


def forward(
    config: M3Config,
    weights: Weights,
    batch: Batch,
    *,
    routing: Mapping[int, Tensor] | None = None,
    tie: Mapping[int, float] | float = 0.0,
    selection: Mapping[int, Tensor] | None = None,
    selection_tie: Mapping[int, float] | float = 0.0,
    rounding: Rounding = EXACT,
) -> Result:
    """Run the model.

    weights: names without the "model." prefix, any float dtype (see `as_float64`).
    routing: MoE layer -> [T, K] expert ids that a subject chose. Near ties may fall the other
    way in lower precision, so a legal choice is followed: every id distinct and its selection
    score (sigmoid + bias) no lower than the k-th best minus `tie` (one number, or by layer).
    An illegal row is reported and the reference's own choice used.
    selection: sparse layer -> [T, G, K] blocks that a subject chose, -1 where there are fewer,
    in any order; followed where legal within `selection_tie`, head by head: see `select` in
    sparse.py.
    rounding: with anything but EXACT the taps are those of its last probe.
    Raises ValueError for weights, token ids or choices that do not fit the configuration.
    """

    follow = Follow(
        routing=routing,
        tolerance=fixed(tie),
        selection=selection,
        selection_tolerance=fixed(selection_tie),
    )
    return probe(run(config, weights, batch, follow, rounding), -1)


def fixed(tie: Mapping[int, float] | float) -> LayerTolerance:
    """A tolerance that is one number, or one by layer."""
    return lambda layer, _: tie.get(layer, 0.0) if isinstance(tie, Mapping) else tie


def is_choice(tap: str) -> bool:
    """Whether a tap is ids that were chosen: they are one for all probes, and agree or do not."""
    return tap.endswith(("experts_chosen", "blocks_chosen"))


def probe(probed: Result, index: int) -> Result:
    """One probe of what `run` returned."""
    taps = {name: tap if is_choice(name) else tap[index] for name, tap in probed.taps.items()}
    return Result(
        taps=taps,
        routing_margin=probed.routing_margin,
        routing_rejected=probed.routing_rejected,
        selection_rejected=probed.selection_rejected,
        parts={name: part[index] for name, part in probed.parts.items()},
    )


def run(
    config: M3Config, weights: Weights, batch: Batch, follow: Follow, rounding: Rounding
) -> Result:
    """All probes of `rounding` in one pass: taps have a leading dim P, those of choices not.

    Probe 0 decides the routing and the blocks of all. Other arguments as in `forward`.
    """
    w = as_float64(config, weights)
    check_inputs(config, batch, follow)
    stream = w["embed_tokens.weight"][batch.token_ids].expand(rounding.probes, -1, -1)
    return through(config, w, batch, {"embed": stream}, stream, follow, rounding)


def through(
    config: M3Config,
    w: Weights,
    batch: Batch,
    taps: Taps,
    stream: Tensor,
    follow: Follow,
    rounding: Rounding,
) -> Result:
    """From the stream [P, T, H] before the first layer to the end; `taps` come before the others.

    w: float64 and complete, see `as_float64`.
    """
    taps = dict(taps)
    parts: Taps = {}
    margins: dict[int, Tensor] = {}
    rejected: list[tuple[int, int]] = []
    blocks_rejected: list[tuple[int, int]] = []

    def norm(x: Tensor, name: str) -> Tensor:
        return gemma_norm(x, w[name + ".weight"], config.rms_norm_eps, rounding)

    def add(stream: Tensor, block: Tensor) -> Tensor:
        y = stream + block
        return rounding(y, y.abs(), 1, Kind.STORED)

    for i, is_moe in enumerate(config.moe_layer_freq):
        name = f"layers.{i}"
        h = norm(stream, f"{name}.input_layernorm")
        blocks = None
        if i in config.sparse_layers:
            wanted = (follow.selection or {}).get(i)
            margin = partial(follow.selection_tolerance, i)
            selected = select(
                config, w, i, h, batch.positions, batch.seq_lens, wanted, margin, rounding
            )
            blocks = taps[f"{name}.blocks_chosen"] = selected.chosen
            blocks_rejected += [(i, token) for token in selected.rejected]
        attn = attention(config, w, i, h, batch.positions, batch.seq_lens, blocks, rounding)
        residual = add(stream, attn)
        taps |= {f"{name}.attn": attn, f"{name}.residual": residual}
        h = norm(residual, f"{name}.post_attention_layernorm")
        if is_moe:
            proposed = (follow.routing or {}).get(i)
            routed = route(config, w, i, h, proposed, partial(follow.tolerance, i), rounding)
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
        taps=taps,
        routing_margin=margins,
        routing_rejected=tuple(rejected),
        selection_rejected=tuple(blocks_rejected),
        parts=parts,
    )


def check_inputs(config: M3Config, batch: Batch, follow: Follow) -> None:
    """Raise ValueError for token ids or choices that do not fit the configuration."""
    tokens = len(batch.token_ids)
    if tokens and not 0 <= int(batch.token_ids.min()) <= int(batch.token_ids.max()) < (
        config.vocab_size
    ):
        raise ValueError(f"token_ids must lie in 0..{config.vocab_size - 1}")
    for what, given, kind, layers, of, width in (
        (
            "routing",
            follow.routing or {},
            "MoE",
            config.moe_layers,
            "ids",
            (config.num_experts_per_tok,),
        ),
        (
            "selection",
            follow.selection or {},
            "sparse",
            config.sparse_layers,
            "blocks",
            (config.num_key_value_heads, config.sparse_topk_blocks),
        ),
    ):
        for layer, chosen in given.items():
            if layer not in layers:
                raise ValueError(f"{what} names layer {layer}; {kind} layers are {layers}")
            if tuple(chosen.shape) != (tokens, *width) or chosen.is_floating_point():
                raise ValueError(
                    f"{what} of layer {layer} must be integer {of} of shape {(tokens, *width)}, "
                    f"not {chosen.dtype} of shape {tuple(chosen.shape)}"
                )
