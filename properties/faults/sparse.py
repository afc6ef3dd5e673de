"""KV caches and chosen blocks: slots, block tables, positions, index heads (class J)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from properties.faults.fault import Fault
from properties.faults.patches import (
    Method,
    minimax_m3,
    own_layers,
    replaced,
    tp_size,
    when_built,
    wrapped,
)

MODEL = ("attention", "model")
"""The field of an example that has sparse layers: all but the first."""
LONG = ("seq_lens", (17,))
"""Tokens with which the tiny model's sparse layers drop blocks; they have room for twelve."""
THREE = ("layers", "dmm")
"""Layers of which two are sparse."""

Change = Callable[[Any, Any], Mapping[str, Any]]
"""From a sparse layer and vLLM's forward context to the fields of it that are other ones."""


def _around_sparse_layers(change: Change) -> Any:
    """A patch that shows another forward context to each sparse layer."""
    return _around(minimax_m3().MiniMaxM3SparseAttention, change)


def _around(owner: Any, change: Change) -> Any:
    """A patch that shows another forward context to each layer of a class."""
    from vllm.forward_context import get_forward_context

    def changed(own: Method) -> Method:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            context = get_forward_context()
            with ExitStack() as stack:
                for name, value in change(self, context).items():
                    stack.enter_context(replaced(context, name, value))
                return own(self, *args, **kwargs)

        return forward

    return wrapped(owner, "forward", changed)


def _indexer() -> Any:
    from vllm.models.minimax_m3.common.indexer import MiniMaxM3Indexer

    return MiniMaxM3Indexer


@contextmanager
def slots_missing() -> Iterator[None]:
    """The forward context has no slots for the sparse layers: vLLM takes it for a profiling run."""
    with _around_sparse_layers(lambda layer, context: {"slot_mapping": {}}):
        yield


def _one_on(context: Any, name: str, cache: torch.Tensor, page: int) -> dict[str, Any]:
    slots = context.slot_mapping[name]
    return {"slot_mapping": {**context.slot_mapping, name: (slots + 1) % (len(cache) * page)}}


@contextmanager
def slots_one_on() -> Iterator[None]:
    """Keys and values are written one slot after their own."""

    def change(layer: Any, context: Any) -> Mapping[str, Any]:
        cache = layer.kv_cache
        return _one_on(context, layer.layer_name, cache, cache.size(2))

    with _around_sparse_layers(change):
        yield


@contextmanager
def dense_slots_one_on() -> Iterator[None]:
    """Keys and values of a layer with dense attention are written one slot after their own."""

    def change(layer: Any, context: Any) -> Mapping[str, Any]:
        cache = layer.attn.kv_cache
        return _one_on(context, layer.attn.layer_name, cache, cache.size(2))

    with _around(minimax_m3().MiniMaxM3Attention, change):
        yield


@contextmanager
def index_slots_one_on() -> Iterator[None]:
    """Index keys are written one slot after their own."""

    def change(layer: Any, context: Any) -> Mapping[str, Any]:
        cache = layer.indexer.index_cache
        return _one_on(context, cache.prefix, cache.kv_cache, cache.kv_cache.size(1))

    with _around_sparse_layers(change):
        yield


@contextmanager
def blocks_of_the_layer_before() -> Iterator[None]:
    """Every second sparse layer attends to the blocks that the one before it has chosen."""

    def share(backbone: Any) -> None:
        attentions = [layer.self_attn for layer in own_layers(backbone)]
        for attention in [each for each in attentions if hasattr(each, "indexer")][1::2]:
            attention.indexer.forward = lambda *args, **kwargs: None

    with when_built(share):
        yield


@contextmanager
def index_heads_of_the_neighbour() -> Iterator[None]:
    """The index query projection is loaded from the next TP rank's heads."""
    from vllm.model_executor.layers.linear import MinimaxM3QKVParallelLinearWithIndexer

    def shifted(own: Method) -> Method:
        def load(self: Any, param: Any, loaded: torch.Tensor, shard: Any = None) -> None:
            if shard == "index_q" and tp_size() > 1:
                loaded = loaded.roll(-self.num_index_heads * self.index_head_size, 0)
            own(self, param, loaded, shard)

        return load

    with wrapped(MinimaxM3QKVParallelLinearWithIndexer, "weight_loader_v2", shifted):
        yield


@contextmanager
def index_heads_turned() -> Iterator[None]:
    """A rank's index heads choose for each other's key heads."""

    def turned(own: Method) -> Method:
        def forward(self: Any, index_query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            heads = self.impl.num_index_heads
            by_head = index_query.view(len(index_query), heads, -1)
            return own(self, by_head.roll(-1, 1).flatten(1), *args, **kwargs)

        return forward

    with wrapped(_indexer(), "forward", turned):
        yield


@contextmanager
def block_table_of_another_request() -> Iterator[None]:
    """The requests of a prefill have their block tables in the opposite order."""

    def change(layer: Any, context: Any) -> Mapping[str, Any]:
        metadata = context.attn_metadata[layer.layer_name]
        if metadata.prefill is None:
            return {}
        prefill = replace(metadata.prefill, block_table=metadata.prefill.block_table.flip(0))
        swapped = replace(metadata, prefill=prefill)
        return {"attn_metadata": {**context.attn_metadata, layer.layer_name: swapped}}

    with _around_sparse_layers(change):
        yield


@contextmanager
def chunk_forgets_its_context() -> Iterator[None]:
    """The sparse layers take each chunk of a prompt for the prompt's beginning."""

    def change(layer: Any, context: Any) -> Mapping[str, Any]:
        changed = {}
        for name in (layer.layer_name, layer.indexer.index_cache.prefix):
            metadata = context.attn_metadata[name]
            if metadata.prefill is not None:
                none = torch.zeros_like(metadata.prefill.context_lens)
                changed[name] = replace(
                    metadata, prefill=replace(metadata.prefill, context_lens=none)
                )
        return {"attn_metadata": {**context.attn_metadata, **changed}}

    with _around_sparse_layers(change):
        yield


@contextmanager
def decode_positions_one_late() -> Iterator[None]:
    """Positions are advanced before a decode step instead of after it."""
    from vllm.forward_context import get_forward_context

    def late(own: Method) -> Method:
        def forward(self: Any, input_ids: Any, positions: Any, *args: Any, **kwargs: Any) -> Any:
            split = [
                metadata.num_decode_tokens
                for metadata in get_forward_context().attn_metadata.values()
                if hasattr(metadata, "num_decode_tokens")
            ]
            decodes = torch.arange(len(positions)) < max(split, default=0)
            # A prompt of one token counts as a decode, and is none.
            positions = positions + (decodes & (positions > 0))
            return own(self, input_ids, positions, *args, **kwargs)

        return forward

    with wrapped(minimax_m3().MiniMaxM3SparseForCausalLM, "forward", late):
        yield


@contextmanager
def chunk_not_cached_at_stage_1() -> Iterator[None]:
    """The second pipeline stage does not write what later chunks of a prompt bring."""
    from vllm.distributed.parallel_state import get_pp_group

    def change(layer: Any, context: Any) -> Mapping[str, Any]:
        prefill = context.attn_metadata[layer.layer_name].prefill
        if get_pp_group().rank_in_group != 1 or prefill is None:
            return {}
        if not bool((prefill.context_lens > 0).any()):
            return {}
        names = layer.layer_name, layer.indexer.index_cache.prefix
        unwritten = {name: torch.full_like(context.slot_mapping[name], -1) for name in names}
        return {"slot_mapping": {**context.slot_mapping, **unwritten}}

    with _around_sparse_layers(change):
        yield


FAULTS: tuple[Fault, ...] = (
    Fault(
        name="slot-mapping-missing",
        report="found in design: vLLM takes a missing slot mapping for a profiling run",
        mechanism="the sparse layers find no slots in the forward context, and return zeros",
        apply=slots_missing,
        shows=("tp1", "tp2pp2", "tep4pp2"),
        # What the buffer of chosen blocks holds then is what was in its memory.
        kinds=("not computed", "wrong blocks"),
        at=("layers.1.",),
        needs=(MODEL,),
    ),
    Fault(
        name="slots-one-on",
        report="vllm#36580: slots of a chunk are not those of its positions",
        mechanism="keys and values are written into the slot after their own",
        apply=slots_one_on,
        shows=("tp1", "tp2pp2"),
        kinds=("poison",),
        at=("layers.1.attn",),
        needs=(MODEL,),
    ),
    Fault(
        name="dense-slots-one-on",
        report="vllm#36580, in the layers with dense attention",
        mechanism="keys and values of the dense layers are written into the slot after their own",
        apply=dense_slots_one_on,
        shows=("tp1", "tp2pp2"),
        kinds=("poison",),
        at=("layers.0.attn",),
        needs=(MODEL,),
    ),
    Fault(
        name="index-slots-one-on",
        report="vllm#36580, for the indexer's own cache",
        mechanism="index keys are written into the slot after their own",
        apply=index_slots_one_on,
        shows=("tp1", "tp2pp2"),
        kinds=("wrong blocks",),
        at=("layers.1.blocks_chosen",),
        needs=(MODEL, LONG),
    ),
    Fault(
        name="blocks-of-the-layer-before",
        report="sglang#36527: layers that share a choice attend to other blocks",
        mechanism="every second sparse layer reads the choice that the one before it left in the "
        "buffer",
        apply=blocks_of_the_layer_before,
        shows=("tp1", "tp2", "tep4"),
        kinds=("stale",),
        at=("layers.2.blocks_chosen",),
        needs=(MODEL, LONG, THREE),
    ),
    Fault(
        name="index-heads-of-the-neighbour",
        report="of this project",
        mechanism="a rank loads the index query heads of the next TP rank",
        apply=index_heads_of_the_neighbour,
        shows=("tp2", "tp4", "tp8"),
        hides=("tp1",),
        kinds=("has the wrong part",),
        at=("layers.1.self_attn.index_q_proj",),
        needs=(MODEL,),
    ),
    Fault(
        name="index-heads-turned",
        report="of this project: right where a rank has one head",
        mechanism="the index heads of a rank choose blocks for each other's key heads",
        apply=index_heads_turned,
        shows=("tp1", "tp2"),
        hides=("tp4", "tp8"),
        kinds=("wrong heads",),
        at=("layers.1.blocks_chosen",),
        needs=(MODEL, LONG),
    ),
    Fault(
        name="block-table-of-another-request",
        report="vllm-tt-plugin#103: a row of the block table names another request's blocks",
        mechanism="two requests of a prefill read each other's keys and values",
        apply=block_table_of_another_request,
        shows=("tp1", "tp2pp2"),
        kinds=("wrong values",),
        at=("layers.1.attn",),
        needs=(MODEL, ("seq_lens", (8, 8))),
    ),
    Fault(
        name="decode-positions-one-late",
        report="sglang#25015",
        mechanism="positions are advanced before a decode step, not after it",
        apply=decode_positions_one_late,
        shows=("tp1", "tp2", "tep2"),
        kinds=("wrong values",),
        at=("layers.0.attn",),
        needs=(MODEL, ("seq_lens", (9,)), ("decode", 2)),
    ),
    Fault(
        name="chunk-not-cached-at-stage-1",
        report="tt-metal#54413; vllm#52909: a chunked prefill at PP 2 is another one",
        mechanism="the second stage caches the first chunk of a prompt, and no other",
        apply=chunk_not_cached_at_stage_1,
        shows=("pp2", "tp2pp2"),
        hides=("tp1", "tp2"),
        kinds=("poison",),
        at=("layers.1.attn",),
        needs=(MODEL, ("seq_lens", (11,)), ("chunk", 5)),
    ),
    Fault(
        name="chunk-forgets-its-context",
        report="vllm#52909: a chunked prefill gives other values than the whole prompt",
        mechanism="the sparse layers count a chunk's positions from 0",
        apply=chunk_forgets_its_context,
        shows=("tp1", "tp2pp2"),
        kinds=("wrong blocks",),
        at=("layers.1.blocks_chosen",),
        needs=(MODEL, ("seq_lens", (11,)), ("chunk", 5)),
    ),
)
