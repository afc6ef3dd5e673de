"""Taps: copies of what flows through vLLM's modules, taken by forward hooks.

Nothing is patched: hooks find modules by their names, so they also work on a changed vLLM whose
names stand. Values are copied at once, because norms and all-reduces then work in place on them.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

REPLICATE = "replicate"

_NO_BLOCK = torch.iinfo(torch.int64).max


@dataclass(frozen=True, kw_only=True, eq=False)
class Captured:
    """One tap on one rank."""

    name: str
    """embed; layers.{i}.blocks_chosen (of a sparse layer), .attn, .residual, .router,
    .experts_chosen, .ffn, .stream; stage.{s}.recv.{key}, stage.{s}.send.{key}; norm; logits;
    logprobs; aux.{id}."""
    value: torch.Tensor
    """A copy; [T, ...]."""
    declared: str
    """What the code's own flags say of it: "replicate", "partial:tp" for a value that is still to
    be summed over the TP ranks, "shard:tp" for one that has a share of the tokens, or
    "heads:tp:4" for one that has a share of 4 heads."""


class Recorder:
    """Collects one step's taps. Each tap is recorded at most once a step."""

    def __init__(self) -> None:
        self._captured: dict[str, Captured] | None = None
        self._rows: int | None = None
        self.latest: dict[str, Captured] = {}
        """What the step in progress, or else the last one, has recorded."""

    @property
    def recording(self) -> bool:
        """Whether taps are wanted."""
        return self._captured is not None

    def start(self, rows: int | None = None) -> None:
        """Begin to record, with nothing recorded; of each value at most so many rows."""
        self._captured = self.latest = {}
        self._rows = rows

    def stop(self) -> dict[str, Captured]:
        """End recording; the taps by name, in the order of the computation."""
        captured, self._captured = self._captured, None
        return captured or {}

    def record(self, name: str, value: torch.Tensor | None, declared: str = REPLICATE) -> None:
        """Copy `value` under `name`; does nothing while not recording, or for None."""
        if self._captured is None or value is None:
            return
        if name in self._captured:
            raise RuntimeError(f"tap {name} was passed twice in one step")
        value = value.detach() if value.requires_grad else value
        if self._rows is not None:
            value = value[: self._rows]
        self._captured[name] = Captured(name=name, value=value.clone(), declared=declared)

    def record_all(self, prefix: str, values: Mapping[str, Any]) -> None:
        """Record each tensor of `values` as "prefix.key"."""
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                self.record(f"{prefix}.{key}", value)


def attach(model: nn.Module, recorder: Recorder, placements: Mapping[str, str]) -> None:
    """Hook a MiniMaxM3SparseForCausalLM so that its forward passes feed `recorder`.

    placements: what the model's own flags say of each tap; what is not in it is replicated.
    """
    backbone: Any = model.model
    hooks = _Hooks(recorder, placements)
    if _present(backbone.embed_tokens):
        hooks.on(backbone.embed_tokens, "embed")
    for i, layer in _own_layers(backbone):
        if i:
            # The residual after the fused add and norm: the stream that the layer before put out.
            hooks.on(layer.input_layernorm, f"layers.{i - 1}.stream", part=1)
        hooks.on_layer(layer, f"layers.{i}")
    if _present(backbone.norm):
        hooks.on(backbone.norm, f"layers.{backbone.end_layer - 1}.stream", part=1)
        hooks.on(backbone.norm, "norm")


def attach_draft(model: nn.Module, recorder: Recorder, placements: Mapping[str, str]) -> None:
    """As `attach`, for a MiniMaxM3MTP of one predictor, whose taps are "mtp.{what}"."""
    backbone: Any = model.model
    layer = backbone.layers["0"]
    hooks = _Hooks(recorder, placements)
    hooks.on(layer.eh_proj, "mtp.eh")
    hooks.on_layer(layer.transformer_layer, "mtp")
    hooks.on(backbone, "mtp.stream")
    hooks.on(layer.final_layernorm, "mtp.norm")


@dataclass(frozen=True)
class _Hooks:
    """Forward hooks that feed a recorder."""

    recorder: Recorder
    placements: Mapping[str, str]

    def on(self, module: nn.Module, name: str, part: int = 0) -> None:
        """Record what a module returns, or that part of it if it returns several."""
        declared = self.placements.get(name, REPLICATE)

        def after(_module: nn.Module, _inputs: Any, output: Any) -> None:
            chosen = output[part] if isinstance(output, tuple) else output
            self.recorder.record(name, chosen, declared)

        module.register_forward_hook(after)

    def on_layer(self, layer: Any, at: str) -> None:
        """Record what is inside a decoder layer."""
        if hasattr(layer.self_attn, "indexer"):
            _on_selection(layer.self_attn, f"{at}.blocks_chosen", self.recorder)
        self.on(layer.self_attn, f"{at}.attn")
        # The fused add and norm returns (normed, residual).
        self.on(layer.post_attention_layernorm, f"{at}.residual", part=1)
        ffn = layer.block_sparse_moe if layer.is_moe_layer else layer.mlp
        if layer.is_moe_layer:
            self.on(ffn.gate, f"{at}.router")
            name = f"{at}.experts_chosen"
            declared = self.placements.get(name, REPLICATE)
            _on_choice(ffn.experts, _chosen(self.recorder, name, declared))
        self.on(ffn, f"{at}.ffn")


def _on_selection(attention: Any, name: str, recorder: Recorder) -> None:
    """Have the blocks recorded that a sparse layer attended to, int64 [T, heads, K]: each row
    ascending, with the -1 of no block last."""

    def after(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        if not recorder.recording:
            return
        # The layers share the buffer; until the next one has run it holds what this one read.
        context = importlib.import_module("vllm.forward_context").get_forward_context()
        tokens = context.attn_metadata[attention.layer_name].num_actual_tokens
        chosen = attention.topk_indices_buffer[:tokens].to(torch.int64)
        ascending = chosen.where(chosen >= 0, _NO_BLOCK).sort(dim=-1).values
        declared = f"heads:tp:{attention.total_idx_heads}"
        recorder.record(name, ascending.where(ascending < _NO_BLOCK, -1), declared)

    attention.register_forward_hook(after)


def _on_choice(experts: Any, capture: Callable[[torch.Tensor], None]) -> None:
    """Have vLLM's own hooks for the chosen experts call `capture`."""
    if hasattr(experts, "capture_fn"):
        experts.capture_fn = capture
    else:
        experts.router.set_capture_fn(capture)


def _own_layers(backbone: Any) -> Iterator[tuple[int, Any]]:
    """The layers of this stage with their indices in the whole model."""
    for i in range(backbone.start_layer, backbone.end_layer):
        yield i, backbone.layers[i]


def _present(module: nn.Module) -> bool:
    """False for the placeholder of a module that lives on another stage."""
    return type(module).__name__ != "PPMissingLayer"


def _chosen(recorder: Recorder, name: str, declared: str) -> Callable[[torch.Tensor], None]:
    def capture(ids: torch.Tensor) -> None:
        recorder.record(name, ids.to(torch.int64).sort(dim=-1).values, declared)

    return capture
