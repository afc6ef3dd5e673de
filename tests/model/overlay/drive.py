"""Builds the overlay's model, or vLLM's own, on every rank of a folded world, and steps it.

It needs nothing of `model.subject` but the configuration, so that these tests stand on vLLM's own
interfaces: groups, `load_weights`, `IntermediateTensors` and the transport between stages.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch

from model import overlay
from model.batch import Batch
from model.checkpoint import checkpoint
from model.kv_cache import KVCaches
from model.megamoe.tiny import MegaTinyM3, quantise_experts
from model.overlay import SEQUENCE_PARALLEL_KEY
from model.rank_state import RANK_LOCAL
from model.subject import vllm_config
from sim import Entry, RankContext, World, label_group

GROUPS = ("world", "tp", "pp", "dp", "ep")


@dataclass(frozen=True, kw_only=True)
class Arm:
    """What to run."""

    word: str
    layers: str = "dmmm"
    tokens: int = 8
    sp: bool = True
    mega: bool = True
    aux: tuple[int, ...] = ()
    dtype: torch.dtype = torch.bfloat16
    padded: int = 0
    """How many of the last tokens the model runner marks as padding."""
    expert_dtype: str = "bf16"
    """Format of the routed experts, bf16 or mxfp8."""

    def but(self, **changes: Any) -> Arm:
        """The same with `changes`."""
        return replace(self, **changes)

    @property
    def tiny(self) -> MegaTinyM3:
        return MegaTinyM3(layers=self.layers, expert_dtype=self.expert_dtype)

    @property
    def batch(self) -> Batch:
        return Batch.random(self.tokens, self.tiny.vocab_size, seed=0)

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        return _weights(self.tiny, self.dtype)


@dataclass(frozen=True, kw_only=True, eq=False)
class Ran:
    """What one rank has after a step."""

    whose: str
    """Whose classes ran, in the overlay's words."""
    sequence_parallel: bool
    handed_on: dict[str, torch.Tensor] = field(default_factory=dict)
    """Copies of what a stage before the last hands on, without relayed aux."""
    logprobs: torch.Tensor | None = None
    aux: tuple[torch.Tensor, ...] = ()
    mask_after: torch.Tensor | None = None
    """The forward context's padding mask when the forward pass is over."""
    chosen: dict[int, torch.Tensor] = field(default_factory=dict)
    """MoE layer -> expert ids that the router chose for this rank's rows."""
    seen: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tap -> copy of what passed there."""
    placements: dict[str, str] = field(default_factory=dict)
    """What the overlay says of the taps."""
    routed: torch.Tensor | None = None
    """[n, K] expert ids of the last MegaMoE launch, -1 for none."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """One step of all ranks."""

    ranks: list[Ran]
    ledger: list[Entry]

    @property
    def logprobs(self) -> torch.Tensor:
        """[T, V], which the ranks of the last stage have alike."""
        last = [r.logprobs for r in self.ranks if r.logprobs is not None]
        assert last and all(torch.equal(last[0], other) for other in last)
        return last[0]

    @property
    def aux(self) -> tuple[torch.Tensor, ...]:
        """The last stage's aux hidden states; the same on its ranks."""
        first, *others = [r.aux for r in self.ranks if r.logprobs is not None]
        for other in others:
            assert len(other) == len(first)
            assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
        return first


class Built:
    """A world with its models, which steps any number of arms that differ only in their input."""

    def __init__(self, arm: Arm) -> None:
        arm.weights  # noqa: B018 made before the ranks start
        self._world = World(arm.word, rank_local=RANK_LOCAL)
        self._models = self._world.run(lambda ctx: _build(ctx, arm))

    def step(self, arm: Arm) -> Step:
        """The step's results; the ledger is that of the step alone."""
        self._world.ledger.clear()
        ranks = self._world.run(lambda ctx: _step(arm, *self._models[ctx.rank]))
        return Step(ranks=ranks, ledger=list(self._world.ledger.entries))

    def close(self) -> None:
        self._world.close()


def run(arm: Arm) -> Step:
    """Build and step `arm`, in a world of its own."""
    built = Built(arm)
    try:
        return built.step(arm)
    finally:
        built.close()


@cache
def _weights(tiny: MegaTinyM3, dtype: torch.dtype) -> Mapping[str, torch.Tensor]:
    weights = checkpoint(tiny, 0, dtype)
    return quantise_experts(weights) if tiny.expert_dtype == "mxfp8" else weights


def configure(arm: Arm, ctx: RankContext) -> Any:
    """The VllmConfig of one rank."""
    config = vllm_config(arm.tiny, ctx.topology, arm.dtype, ctx.rank)
    if arm.mega:
        config.kernel_config.moe_backend = "deep_gemm_mega_moe"
    if not arm.sp:
        config.additional_config = {SEQUENCE_PARALLEL_KEY: False}
    return config


def _build(ctx: RankContext, arm: Arm) -> tuple[Any, Any, KVCaches]:
    state = importlib.import_module("vllm.distributed.parallel_state")
    loader = importlib.import_module("vllm.model_executor.model_loader.utils")
    workspace = importlib.import_module("vllm.v1.worker.workspace")
    backend = torch.distributed.get_backend()
    config = configure(arm, ctx)
    with importlib.import_module("vllm.config").set_current_vllm_config(config):
        state.init_distributed_environment(ctx.world_size, ctx.rank, "env://", ctx.rank, backend)
        state.initialize_model_parallel(ctx.topology.tp, ctx.topology.pp, backend=backend)
        for name in GROUPS:
            label_group(getattr(state, f"_{name.upper()}").device_group, name)
            label_group(getattr(state, f"_{name.upper()}").cpu_group, f"{name}.cpu")
        workspace.init_workspace_manager(torch.device("cpu"))
        before = torch.get_default_dtype()
        torch.set_default_dtype(arm.dtype)
        try:
            model = overlay.model_class(config)(vllm_config=config)
        finally:
            torch.set_default_dtype(before)
        model.load_weights(arm.weights.items())
        loader.process_weights_after_loading(model, config.model_config, torch.device("cpu"))
        caches = KVCaches(config, requests=8)
    return config, model.eval(), caches


@torch.no_grad()
def _step(arm: Arm, config: Any, model: Any, caches: KVCaches) -> Ran:
    context = importlib.import_module("vllm.forward_context")
    tensors = importlib.import_module("vllm.sequence").IntermediateTensors
    state = importlib.import_module("vllm.distributed.parallel_state")
    relay = importlib.import_module("model.overlay.relay")
    placements = importlib.import_module("model.overlay.placements")
    tp, pp = state.get_tp_group(), state.get_pp_group()
    model.set_aux_hidden_state_layers(arm.aux)
    seen: dict[str, torch.Tensor] = {}
    hooks = _watch(model, seen)
    received = None
    if not pp.is_first_rank:
        received = tensors(pp.recv_tensor_dict(all_gather_group=tp))
    batch = arm.batch
    mask = torch.arange(batch.tokens) >= batch.tokens - arm.padded if arm.padded else None
    paged = caches.place(batch)
    with context.set_forward_context(
        paged.metadata,
        config,
        num_tokens=batch.tokens,
        slot_mapping=paged.slot_mapping,
        is_padding=mask,
    ):
        output = model(batch.token_ids, batch.positions, received)
        mask_after = context.get_forward_context().is_padding
    for hook in hooks:
        hook.remove()
    common: dict[str, Any] = {
        "whose": overlay.describe(model),
        "sequence_parallel": bool(getattr(model.model, "use_sequence_parallel", False)),
        "placements": placements.placements(model),
        "routed": _last_routed(model, -(-batch.tokens // tp.world_size)),
        "mask_after": mask_after,
        "seen": seen,
        "chosen": {int(k.split(".")[1]): v for k, v in seen.items() if k.endswith("chosen")},
    }
    if not pp.is_last_rank:
        handed_on = {name: value.clone() for name, value in output.tensors.items()}
        assert all(value.is_contiguous() for value in output.tensors.values())
        output = relay.relay_aux_hidden_states(model, received, output)
        pp.send_tensor_dict(output.tensors, all_gather_group=tp)
        return Ran(handed_on=handed_on, **common)
    hidden, aux = output if isinstance(output, tuple) else (output, [])
    logprobs = torch.log_softmax(model.compute_logits(hidden).float(), dim=-1)
    return Ran(logprobs=logprobs, aux=tuple(value.clone() for value in aux), **common)


def _last_routed(model: Any, rows: int) -> torch.Tensor | None:
    for module in model.modules():
        if type(module).__name__ == "DeepGemmMegaMoEExperts":
            # One buffer serves all layers.
            return module.get_symm_buffer().topk_idx[:rows].clone()
    return None


def _watch(model: Any, seen: dict[str, torch.Tensor]) -> list[Any]:
    """Copy what passes at the taps, by hooks on vLLM's module names."""
    backbone, hooks = model.model, []

    def watch(module: Any, name: str, part: int = 0) -> None:
        def after(_module: Any, _inputs: Any, output: Any) -> None:
            seen[name] = (output[part] if isinstance(output, tuple) else output).clone()

        hooks.append(module.register_forward_hook(after))

    for i in range(backbone.start_layer, backbone.end_layer):
        layer = backbone.layers[i]
        if i:
            watch(layer.input_layernorm, f"layers.{i - 1}.stream", part=1)
        watch(layer.self_attn, f"layers.{i}.attn")
        watch(layer.post_attention_layernorm, f"layers.{i}.residual", part=1)
        watch(layer.block_sparse_moe if layer.is_moe_layer else layer.mlp, f"layers.{i}.ffn")
        if layer.is_moe_layer:
            experts, name = layer.block_sparse_moe.experts, f"layers.{i}.experts_chosen"
            watch(layer.block_sparse_moe.gate, f"layers.{i}.router")
            if type(experts).__name__ == "DeepGemmMegaMoEExperts":
                experts.capture_fn = lambda ids, name=name: seen.update({name: ids.clone()})
    if type(backbone.norm).__name__ != "PPMissingLayer":
        watch(backbone.norm, f"layers.{backbone.end_layer - 1}.stream", part=1)
        watch(backbone.norm, "norm")
    return hooks
