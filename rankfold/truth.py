"""The reference's taps and bounds for a run: with its routing, stage boundaries and aux."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

import reference
from model.batch import Batch
from model.megamoe.tiny import dequantise_experts
from properties import Placement, PlacementError
from rankfold.options import Options
from rankfold.run import Outcome
from sim import Topology

V = TypeVar("V")
Parts = Mapping[str, torch.Tensor]
RESIDUAL, ATTENTION, FFN = "the residual", "attention's output", "the FFN's output"


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What a run chose, where near ties leave it a choice."""

    routing: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """MoE layer -> experts, [T, K]."""
    selection: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """Sparse layer -> key blocks, [T, index heads, K]; -1 where there are fewer."""


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What a right run's taps are, in program order."""

    taps: dict[str, torch.Tensor]
    """float64 [T, ...]."""
    bounds: dict[str, float]
    """Largest deviation that rounding can explain."""
    parts: dict[str, Parts]
    """For taps that are sums: the parts, by name; "+" begins the name of one that may be added by
    mistake."""
    sources: dict[str, dict[str, str]]
    """The taps of these parts."""
    routing_rejected: tuple[tuple[int, int], ...]
    """(layer, token) that the run routed to experts that are not the best."""
    selection_rejected: tuple[tuple[int, int], ...] = ()
    """(layer, token) that the run had attend to blocks that are not the best."""


def truth_of(
    options: Options, weights: Mapping[str, torch.Tensor], batch: Batch, outcome: Outcome
) -> Truth:
    """Run the reference on the outcome's batch, following its choices where they are legal."""
    chosen = choices_of(options, batch, outcome)
    ranks = summed_ranks(options, outcome.topology)
    return truth_from(options, outcome, reference_of(options, weights, batch, ranks, chosen))


def summed_ranks(options: Options, topology: Topology) -> int:
    """How many ranks' addends the longest sum of a step adds.

    Attention and dense FFNs add those of the TP ranks; experts those of the DP x TP ranks over
    which each is sliced, or where each is whole on one rank, those of the ranks that a token's
    experts and the shared one are on. The other ranks add zeros.
    """
    spread = topology.tp * topology.dp
    if not topology.ep:
        return spread
    return min(spread, max(topology.tp, options.tiny.num_experts_per_tok + 1))


def reference_of(
    options: Options,
    weights: Mapping[str, torch.Tensor],
    batch: Batch,
    ranks: int,
    chosen: Choices | None = None,
) -> reference.Bounds:
    """The reference's run of a batch of whole sequences, with its bounds.

    Args:
        options: the model and its dtype.
        ranks: how many ranks' partial sums an all-reduce adds, see `summed_ranks`.
        chosen: what a run chose.
    """
    chosen = chosen or Choices()
    config = reference.M3Config.from_hf(options.tiny.text_config())
    plain = dequantise_experts(weights)
    return reference.bounds(
        config,
        reference.as_float64(config, {n.removeprefix("model."): w for n, w in plain.items()}),
        reference.Batch(
            token_ids=batch.token_ids, positions=batch.positions, seq_lens=batch.seq_lens
        ),
        dtype=options.torch_dtype,
        ranks=ranks,
        routing=chosen.routing,
        selection=chosen.selection,
        mxfp8_experts=options.mega and options.expert_dtype == "mxfp8",
    )


def truth_from(options: Options, outcome: Outcome, bounds: reference.Bounds) -> Truth:
    """The truth of an outcome from the reference's run of its batch."""
    likes = _in_program_order(options, outcome, bounds.result.taps)

    def known(by_tap: Mapping[str, V]) -> dict[str, V]:
        return {name: by_tap[like] for name, like in likes.items() if like in by_tap}

    return Truth(
        taps={name: bounds.result.taps[like] for name, like in likes.items()},
        bounds={name: bounds.taps[like] for name, like in likes.items()},
        parts=known(_parts(options, bounds.result)),
        sources=known(_sources(options)),
        routing_rejected=tuple(bounds.result.routing_rejected),
        selection_rejected=tuple(bounds.result.selection_rejected),
    )


def rows_of(bounds: reference.Bounds, rows: torch.Tensor) -> reference.Bounds:
    """Some rows of the reference's run. Their bounds are those of the whole: the largest error of
    any row, so no smaller than that of a part of them.

    Args:
        bounds: a run.
        rows: int64 [T], each at most once.
    """
    whole = bounds.result
    # One text's rows are a view of it.
    numbers = rows.tolist()
    part: slice | torch.Tensor = rows
    if numbers and numbers == [*range(numbers[0], numbers[0] + len(numbers))]:
        part = slice(numbers[0], numbers[0] + len(numbers))
    places = {row: place for place, row in enumerate(numbers)}

    def kept(rejected: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        return tuple((layer, places[row]) for layer, row in rejected if row in places)

    result = replace(
        whole,
        taps={name: tap[part] for name, tap in whole.taps.items()},
        parts={name: value[part] for name, value in whole.parts.items()},
        routing_margin={layer: gap[part] for layer, gap in whole.routing_margin.items()},
        routing_rejected=kept(whole.routing_rejected),
        selection_rejected=kept(whole.selection_rejected),
    )
    return replace(bounds, result=result)


def _parts(options: Options, result: reference.Result) -> dict[str, Parts]:
    """What taps are sums of: the stream before a part of a layer, and that part's output."""
    parts: dict[str, Parts] = {}
    taps, inner = result.taps, result.parts
    stream = taps["embed"]
    for layer in range(len(options.layers)):
        name = f"layers.{layer}"
        residual = taps[f"{name}.residual"]
        parts[f"{name}.residual"] = {RESIDUAL: stream, ATTENTION: taps[f"{name}.attn"]}
        # Whoever adds the residual too early puts it into the layer's output.
        parts[f"{name}.attn"] = {f"+{RESIDUAL}": stream}
        parts[f"{name}.ffn"] = {f"+{RESIDUAL}": residual}
        if layer in options.tiny.moe_layers:
            experts = {
                "the shared expert's output": inner[f"{name}.shared"],
                "the routed experts' output": inner[f"{name}.routed"],
            }
            parts[f"{name}.ffn"] = {**experts, **parts[f"{name}.ffn"]}
        parts[f"{name}.stream"] = {RESIDUAL: residual, FFN: taps[f"{name}.ffn"]}
        stream = taps[f"{name}.stream"]
    return parts


def _sources(options: Options) -> dict[str, dict[str, str]]:
    """The taps of what streams are sums of."""
    sources = {}
    for layer in range(len(options.layers)):
        name = f"layers.{layer}"
        sources[f"{name}.residual"] = {ATTENTION: f"{name}.attn"}
        sources[f"{name}.stream"] = {FFN: f"{name}.ffn"}
    return sources


def routing_of(options: Options, batch: Batch, outcome: Outcome) -> dict[int, torch.Tensor]:
    """The experts that the run chose, [T, K] for each MoE layer that has them whole."""
    width = (options.tiny.num_experts_per_tok,)
    return _chosen(options.tiny.moe_layers, "experts_chosen", width, batch, outcome)


def selection_of(options: Options, batch: Batch, outcome: Outcome) -> dict[int, torch.Tensor]:
    """The blocks that the run chose, [T, G, K] for each sparse layer that has them whole."""
    tiny = options.tiny
    width = (tiny.num_key_value_heads, tiny.sparse_topk_blocks)
    return _chosen(tiny.sparse_layers, "blocks_chosen", width, batch, outcome)


def _chosen(
    layers: Iterable[int], what: str, width: tuple[int, ...], batch: Batch, outcome: Outcome
) -> dict[int, torch.Tensor]:
    found = {}
    for layer in layers:
        name = f"layers.{layer}.{what}"
        local = {r: taps[name] for r, taps in enumerate(outcome.captured) if name in taps}
        if not local or (outcome.broke is not None and not outcome.recorded_whole(name)):
            continue
        placement = Placement.parse(next(iter(local.values())).declared)
        try:
            full = placement.full_values(
                outcome.topology, {r: tap.value for r, tap in local.items()}, batch.tokens
            )
        except PlacementError:
            continue
        chosen = next(iter(full.values())).long()
        if chosen.shape == (batch.tokens, *width):
            found[layer] = chosen
    return found


def choices_of(options: Options, batch: Batch, outcome: Outcome) -> Choices:
    """What a run chose, as far as is known."""
    return Choices(
        routing=routing_of(options, batch, outcome), selection=selection_of(options, batch, outcome)
    )


def chose_as(bounds: reference.Bounds, rows: torch.Tensor, choices: Choices) -> bool:
    """Whether a run chose what the reference chose for the same rows, int64 [T]."""
    taps = bounds.result.taps
    # Both sides are sets, and sorted.
    return all(
        torch.equal(chosen, taps[f"layers.{layer}.{what}"][rows].long())
        for what, of_layer in (
            ("experts_chosen", choices.routing),
            ("blocks_chosen", choices.selection),
        )
        for layer, chosen in of_layer.items()
    )


def _in_program_order(options: Options, outcome: Outcome, names: Iterable[str]) -> dict[str, str]:
    """The reference's taps with those of stage boundaries and aux hidden states put in: each tap
    of a run, in program order, with the reference's tap that is like it."""
    last_stage = outcome.topology.pp - 1
    stage_ends = {}
    for result in outcome.results:
        layers = [int(name.split(".")[1]) for name in result.taps if name.endswith(".attn")]
        if layers and result.stage < last_stage:
            stage_ends[max(layers)] = result.stage
    likes: dict[str, str] = {}
    for name in names:
        likes[name] = name
        parts = name.split(".")
        if parts[-1] == "ffn" and int(parts[1]) in stage_ends:
            layer, stage = int(parts[1]), stage_ends[int(parts[1])]
            for side in (f"stage.{stage}.send", f"stage.{stage + 1}.recv"):
                likes[f"{side}.hidden_states"] = name
                likes[f"{side}.residual"] = f"layers.{layer}.residual"
                for slot, aux_id in enumerate(i for i in options.aux if i <= layer + 1):
                    likes[f"{side}.aux_hidden_states_{slot}"] = _aux(aux_id)
    for aux_id in options.aux:
        likes[f"aux.{aux_id}"] = _aux(aux_id)
    return likes


def _aux(aux_id: int) -> str:
    """Aux hidden state k is the stream before layer k."""
    return "embed" if aux_id == 0 else f"layers.{aux_id - 1}.stream"
