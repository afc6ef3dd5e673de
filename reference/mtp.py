"""MiniMax-M3's predictor of one more token (multi-token prediction), in float64 on one rank.

embedded = embed(tokens), 0 where the position is 0
stream = eh_proj [norm(embedded) | norm(hidden)]     tap mtp.eh
stream = one decoder layer of stream                 taps mtp.blocks_chosen, .attn, ..., .stream
logprobs = log_softmax(head(norm(stream)))           taps mtp.norm, .logits, .logprobs

The layer has sparse attention and experts, whatever the model's own layers have. Embedding and
head are the model's. Source: the idea is DeepSeek-V3's (2024, section 2.2), the details are those
of vLLM 0.33 (models/minimax_m3/nvidia/mtp.py). Which token and which hidden state make a row is
the caller's affair, as it is there.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from reference.bounds import Bounds, measured
from reference.config import M3Config
from reference.model import Batch, Follow, Result, check_inputs, fixed, probe, through
from reference.ops import gemma_norm, linear
from reference.rounding import EXACT, Kind, Rounding
from reference.weights import Weights, converted, expected_shapes

_PREFIX = "mtp.layers.0."
_ENTRY = ("enorm", "hnorm", "eh_proj")


def draft_shapes(config: M3Config) -> dict[str, tuple[int, ...]]:
    """Every weight that the predictor reads (names without the "model." prefix) and its shape."""
    hidden = config.hidden_size
    entry = {"enorm": (hidden,), "hnorm": (hidden,), "eh_proj": (hidden, 2 * hidden)}
    layer = expected_shapes(_predictor(config))
    return {f"{_PREFIX}{name}.weight": shape for name, shape in entry.items()} | {
        _in_checkpoint(name): shape for name, shape in layer.items()
    }


def draft(
    config: M3Config,
    weights: Weights,
    batch: Batch,
    hidden: Tensor,
    *,
    routing: Tensor | None = None,
    tie: float = 0.0,
    selection: Tensor | None = None,
    selection_tie: float = 0.0,
    rounding: Rounding = EXACT,
) -> Result:
    """Predict from a token and a hidden state in each row.

    config: of the model; its sparse_* sizes hold for the predictor too. weights: see
    `draft_shapes`. batch: tokens and positions as the predictor is given them, whole sequences.
    hidden [T, H]: the hidden states given, any float dtype. routing [T, K] and selection
    [T, G, K] are followed as in `forward`. The layer is number 0 in what the result names.
    Raises ValueError for weights, tokens, hidden states or choices that do not fit.
    """
    follow = Follow(
        routing=None if routing is None else {0: routing},
        tolerance=fixed(tie),
        selection=None if selection is None else {0: selection},
        selection_tolerance=fixed(selection_tie),
    )
    return probe(_run(config, weights, batch, hidden, follow, rounding), -1)


def draft_bounds(
    config: M3Config,
    weights: Weights,
    batch: Batch,
    hidden: Tensor,
    *,
    dtype: torch.dtype,
    ranks: int,
    routing: Tensor | None = None,
    selection: Tensor | None = None,
    probes: int = 3,
    safety: float = 4.0,
    seed: int = 0,
    accumulate: torch.dtype = torch.float32,
    mxfp8_experts: bool = False,
) -> Bounds:
    """`bounds` of the predictor alone: `hidden` is what the subject was given, without error."""
    return measured(
        partial(_run, config, weights, batch, hidden),
        None if routing is None else {0: routing},
        None if selection is None else {0: selection},
        dtype=dtype,
        ranks=ranks,
        probes=probes,
        safety=safety,
        seed=seed,
        accumulate=accumulate,
        mxfp8_experts=mxfp8_experts,
    )


def _run(
    config: M3Config,
    weights: Weights,
    batch: Batch,
    hidden: Tensor,
    follow: Follow,
    rounding: Rounding,
) -> Result:
    """All probes, as `run` in model.py."""
    predictor = _predictor(config)
    w = converted(weights, draft_shapes(config))
    check_inputs(predictor, batch, follow)
    shape = (len(batch.token_ids), config.hidden_size)
    if tuple(hidden.shape) != shape or not hidden.is_floating_point():
        raise ValueError(
            f"hidden must be floats of shape {shape}, not {hidden.dtype} of shape "
            f"{tuple(hidden.shape)}"
        )
    enorm, hnorm, eh_proj = (w[f"{_PREFIX}{name}.weight"] for name in _ENTRY)
    embedded = w["embed_tokens.weight"][batch.token_ids]
    embedded = embedded.masked_fill((batch.positions == 0)[:, None], 0.0)
    both = [
        gemma_norm(
            x.to(torch.float64).expand(rounding.probes, -1, -1),
            weight,
            config.rms_norm_eps,
            rounding,
        )
        for x, weight in ((embedded, enorm), (hidden, hnorm))
    ]
    eh = linear(torch.cat(both, dim=-1), eh_proj, rounding, Kind.STORED)
    of_layer = {name: w[_in_checkpoint(name)] for name in expected_shapes(predictor)}
    result = through(predictor, of_layer, batch, {"eh": eh}, eh, follow, rounding)
    return replace(
        result,
        taps={_tap(name): tap for name, tap in result.taps.items()},
        parts={_tap(name): part for name, part in result.parts.items()},
    )


def _predictor(config: M3Config) -> M3Config:
    """The predictor as a model of one layer."""
    return replace(config, num_hidden_layers=1, moe_layer_freq=(1,), sparse_layers=(0,))


def _in_checkpoint(name: str) -> str:
    """The predictor's name of what a model of one layer calls `name`."""
    if name == "norm.weight":
        return _PREFIX + "final_layernorm.weight"
    return name.replace("layers.0.", _PREFIX + "transformer_layer.")


def _tap(name: str) -> str:
    return "mtp." + name.removeprefix("layers.0.")
