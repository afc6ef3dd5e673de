"""The draft: vLLM's predictor of one more token (MTP) on one rank, and the driver that steps it.

The predictor is a decoder layer of MiniMax-M3 with sparse attention and experts, between a
projection of [embedding | hidden state] and a head. It runs on one stage. In vLLM it shares the
model's embedding, head and top-k buffer; here it is built alone, with a buffer of its own.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from model import device, dp, overrides, taps
from model.batch import Batch
from model.groups import join_groups
from model.kv_cache import KVCaches
from model.subject import _current, _default_dtype, vllm_config
from model.taps import Captured
from model.tiny import ShapeError, TinyM3
from sim import RankContext

PREFIX = "model.mtp.layers.0."


def draft_checkpoint(tiny: TinyM3, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The predictor's weights by Hugging Face name, cut from a model of one sparse MoE layer.

    Args:
        tiny: the model's sizes.
        weights: the checkpoint of `one_layer(tiny)`; its layer, final norm, embedding and head
            become the predictor's. What the predictor has beyond them is made of its rows.
    """
    hidden = tiny.hidden_size
    named = {}
    for name, value in weights.items():
        if name.startswith("model.layers.0."):
            name = name.replace("model.layers.0.", PREFIX + "transformer_layer.")
        elif name == "model.norm.weight":
            name = PREFIX + "final_layernorm.weight"
        named[name] = value
    embedding = weights["model.embed_tokens.weight"]
    wide = torch.cat((embedding[:hidden], embedding[hidden : 2 * hidden]), dim=-1)
    named[PREFIX + "eh_proj.weight"] = wide * (2 * hidden) ** -0.5
    for place, name in enumerate(("enorm", "hnorm")):
        named[f"{PREFIX}{name}.weight"] = embedding[-1 - place] * 0.2
    return named


def one_layer(tiny: TinyM3) -> TinyM3:
    """The predictor as a model of one layer."""
    return replace(tiny, layers="m", attention="sparse", mtp_modules=1)


class Draft:
    """One rank's predictor, built by vLLM's own code; all ranks build and step it together.

    Raises ShapeError if the topology has stages or DP ranks, or cannot cut the layer, and
    RuntimeError before `model.subject.prepare`.
    """

    def __init__(
        self,
        ctx: RankContext,
        tiny: TinyM3,
        weights: Mapping[str, torch.Tensor],
        dtype: torch.dtype = torch.float32,
        requests: int = 8,
    ) -> None:
        """Build the predictor.

        Args:
            ctx: this rank.
            tiny: the model's sizes.
            weights: as `draft_checkpoint` returns them.
            dtype: of weights and activations.
            requests: sequences that the KV caches can hold at a time.
        """
        if not overrides.installed():
            raise RuntimeError("call model.subject.prepare() on the main thread first")
        if ctx.topology.pp > 1 or ctx.topology.dp > 1:
            raise ShapeError(f"{ctx.topology}: the predictor runs on one stage and DP rank; use tp")
        one_layer(tiny).validate(ctx.topology)
        self._recorder = taps.Recorder()
        self._config = vllm_config(one_layer(tiny), ctx.topology, dtype, ctx.rank)
        self._config.speculative_config = _speculative(self._config, one_layer(tiny))
        with _current(self._config):
            join_groups(ctx)
            self.model = _build(self._config, weights, dtype)
            self._caches = KVCaches(self._config, requests)
        # The layer leaves attention's sum to its next norm, and sums its FFN's itself.
        placements = {"mtp.attn": "partial:tp"} if ctx.topology.tp > 1 else {}
        taps.attach_draft(self.model, self._recorder, placements)

    @torch.no_grad()
    def step(self, batch: Batch, hidden: torch.Tensor) -> dict[str, Captured]:
        """Predict from each token and the hidden state [T, H] beside it; this rank's taps by name:
        mtp.eh, .blocks_chosen, .attn, .residual, .router, .experts_chosen, .ffn, .stream, .norm,
        .logits, .logprobs."""
        self._recorder.start()
        paged = self._caches.place(batch)
        rows = dp.agree(self._config, batch.tokens)
        with dp.forward_context(
            self._config, paged.metadata, rows, slot_mapping=paged.slot_mapping
        ):
            stream = self.model(batch.token_ids, batch.positions, hidden)
        logits = self.model.compute_logits(stream)
        self._recorder.record("mtp.logits", logits)
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        self._recorder.record("mtp.logprobs", torch.log_softmax(logits.to(wide), dim=-1))
        return self._recorder.stop()


def _speculative(config: Any, tiny: TinyM3) -> Any:
    """vLLM's own SpeculativeConfig for a checkpoint that has the predictor."""
    with tempfile.TemporaryDirectory(prefix="rankfold") as directory:
        tiny.write_config_dir(directory)
        return importlib.import_module("vllm.config").SpeculativeConfig(
            method="mtp",
            model=directory,
            num_speculative_tokens=1,
            target_model_config=config.model_config,
            target_parallel_config=config.parallel_config,
        )


def _build(config: Any, weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Any:
    mtp = importlib.import_module("vllm.models.minimax_m3.nvidia.mtp")
    loader = importlib.import_module("vllm.model_executor.model_loader.utils")
    workspace = importlib.import_module("vllm.v1.worker.workspace")
    workspace.init_workspace_manager(device.current())
    with _default_dtype(dtype), device.on_device():
        model = mtp.MiniMaxM3MTP(vllm_config=config)
        attention = model.model.layers["0"].transformer_layer.self_attn
        # vLLM's proposer lends it the model's buffer.
        buffer = torch.empty(
            config.scheduler_config.max_num_batched_tokens,
            attention.num_idx_heads,
            attention.impl.topk_blocks,
            dtype=torch.int32,
        )
        for module in model.modules():
            if hasattr(module, "topk_indices_buffer"):
                module.topk_indices_buffer = buffer
    model.load_weights(weights.items())
    loader.process_weights_after_loading(model, config.model_config, device.current())
    return model.eval()
