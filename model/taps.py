"""Taps: copies of what flows through vLLM's modules, taken by forward hooks.

Nothing is patched: hooks find modules by their names, so they also work on a changed vLLM whose
names stand. Values are copied at once, because norms and all-reduces then work in place on them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

REPLICATE = "replicate"


@dataclass(frozen=True, kw_only=True, eq=False)
class Captured:
    """One tap on one rank."""

    name: str
    """embed; layers.{i}.attn, .residual, .router, .experts_chosen, .ffn, .stream;
    stage.{s}.recv.{key}, stage.{s}.send.{key}; norm; logits; logprobs; aux.{id}."""
    value: torch.Tensor
    """A copy; [T, ...]."""
    declared: str
    """What the code's own flags say of it: "replicate", "partial:tp" for a value that is still to
    be summed over the TP ranks, or "shard:tp" for one that has a share of the tokens."""


class Recorder:
    """Collects one step's taps. Each tap is recorded at most once a step."""

    def __init__(self) -> None:
        self._captured: dict[str, Captured] | None = None
        self.latest: dict[str, Captured] = {}
        """What the step in progress, or else the last one, has recorded."""

    def start(self) -> None:
        """Begin to record, with nothing recorded."""
        self._captured = self.latest = {}

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
        self._captured[name] = Captured(name=name, value=value.detach().clone(), declared=declared)

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

    def hook(module: nn.Module, name: str, part: int = 0) -> None:
        declared = placements.get(name, REPLICATE)

        def after(_module: nn.Module, _inputs: Any, output: Any) -> None:
            chosen = output[part] if isinstance(output, tuple) else output
            recorder.record(name, chosen, declared)

        module.register_forward_hook(after)

    if _present(backbone.embed_tokens):
        hook(backbone.embed_tokens, "embed")
    for i, layer in _own_layers(backbone):
        at = f"layers.{i}"
        if i:
            # The residual after the fused add and norm: the stream that the layer before put out.
            hook(layer.input_layernorm, f"layers.{i - 1}.stream", part=1)
        hook(layer.self_attn, f"{at}.attn")
        # The fused add and norm returns (normed, residual).
        hook(layer.post_attention_layernorm, f"{at}.residual", part=1)
        ffn = layer.block_sparse_moe if layer.is_moe_layer else layer.mlp
        if layer.is_moe_layer:
            hook(ffn.gate, f"{at}.router")
            name = f"{at}.experts_chosen"
            _on_choice(ffn.experts, _chosen(recorder, name, placements.get(name, REPLICATE)))
        hook(ffn, f"{at}.ffn")
    if _present(backbone.norm):
        hook(backbone.norm, f"layers.{backbone.end_layer - 1}.stream", part=1)
        hook(backbone.norm, "norm")


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
