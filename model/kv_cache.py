"""The KV caches of one rank: their memory, who has which page, and what vLLM is told of a step.

vLLM's model runner does this with its block tables on a GPU. Here the pages of a request are
scattered over the cache by a fixed permutation, so that a wrong block table shows, and memory that
nothing was written to holds NaN, so that reading it shows too.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from model import device
from model.batch import Batch

_FIRST_PAGES = 8
"""Pages of each request at first; a longer one makes the caches grow."""


@dataclass(frozen=True, kw_only=True)
class Paged:
    """What the forward context needs to know of a step's KV caches, by layer name."""

    metadata: dict[str, Any]
    slot_mapping: dict[str, torch.Tensor]
    """int64 [T]: page * B + place in the page for each new token."""


class KVCaches:
    """The caches of a rank's attention layers and indexers, kept from step to step.

    Build it when the model is built, with vLLM's configuration current.
    """

    def __init__(self, config: Any, requests: int) -> None:
        """Find the layers that have a cache, and give them one.

        Args:
            config: the rank's VllmConfig, whose layers have registered themselves.
            requests: how many sequences there may be at a time.
        """
        base = importlib.import_module("vllm.model_executor.layers.attention_layer_base")
        layers = config.compilation_config.static_forward_context.items()
        self._layers = {
            n: layer for n, layer in layers if isinstance(layer, base.AttentionLayerBase)
        }
        self._specs = {
            name: layer.get_kv_cache_spec(config) for name, layer in self._layers.items()
        }
        self._builders = self._made_builders(config)
        self._block = int(config.cache_config.block_size)
        self._held = [0] * requests
        """Tokens of each request that the caches hold."""
        self._caches: dict[str, torch.Tensor] = {}
        self._pages = torch.empty(requests, 0, dtype=torch.int64)
        """[requests, most pages of one]: which pages are whose."""
        self._grow(_FIRST_PAGES)

    def place(self, batch: Batch) -> Paged:
        """Find the slots of a step's new tokens, and count them as held from now on.

        Raises ValueError if a sequence neither begins nor goes on where its request is.
        """
        self._check(batch)
        sequences = [
            (request, context, new)
            for request, context, new in zip(
                batch.requests, batch.context_lens, batch.seq_lens, strict=True
            )
            if new
        ]
        self._make_room(max((context + new for _, context, new in sequences), default=0))
        for request, context, new in sequences:
            if context == 0:
                self._forget(request)
            self._held[request] = context + new
        table = self._pages[[request for request, _, _ in sequences]]
        slots = [
            slot
            for request, context, new in sequences
            for slot in self._slots(request, context, context + new)
        ]
        slot_mapping = torch.tensor(slots, dtype=torch.int64, device=device.current())
        return self._told(sequences, table, slot_mapping)

    def read(self, request: int, layer: str, start: int, stop: int) -> torch.Tensor:
        """What a layer's cache holds of a request's tokens, as a copy [tokens, heads, features]."""
        page, place = self._where(request, start, stop)
        cache = self._caches[layer]
        return cache[page.to(cache.device), :, place.to(cache.device)]

    def write(self, request: int, layer: str, start: int, head: int, values: torch.Tensor) -> None:
        """Put tokens of one head there that another rank has computed, [tokens, features].

        They count as held only once `hold` says so.
        """
        stop = start + values.shape[0]
        self._make_room(stop)
        page, place = self._where(request, start, stop)
        cache = self._caches[layer]
        cache[page.to(cache.device), head, place.to(cache.device)] = values.to(cache.device)

    def hold(self, request: int, tokens: int) -> None:
        """Count so many tokens of a request as held, since others have written them."""
        self._held[request] = tokens

    def free(self, request: int) -> None:
        """Give up what the caches hold of a request, written or held."""
        self._erase(self._pages[request])
        self._held[request] = 0

    @property
    def specs(self) -> Mapping[str, Any]:
        """vLLM's KVCacheSpec of each layer that has a cache on this rank, by the layer's name."""
        return self._specs

    def _where(self, request: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The page and the place in it of each of a request's tokens, int64 [tokens]."""
        slots = torch.tensor(self._slots(request, start, stop), dtype=torch.int64)
        return slots // self._block, slots % self._block

    def _make_room(self, tokens: int) -> None:
        """See that every request has pages for so many tokens."""
        if -(-tokens // self._block) > self._pages.shape[1]:
            self._grow(2 * -(-tokens // self._block))

    def _told(
        self,
        sequences: list[tuple[int, int, int]],
        table: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> Paged:
        """The metadata that vLLM's own builders make of it."""
        queries = [new for _, _, new in sequences]
        lengths = [context + new for _, context, new in sequences]
        starts = torch.tensor([0, *accumulate(queries)], dtype=torch.int32)
        seq_lens = torch.tensor(lengths, dtype=torch.int32)
        here = device.current()
        common = _backend().CommonAttentionMetadata(
            query_start_loc=starts.to(here),
            query_start_loc_cpu=starts,
            seq_lens=seq_lens.to(here),
            seq_lens_cpu_upper_bound=seq_lens,
            num_reqs=len(sequences),
            num_actual_tokens=sum(queries),
            max_query_len=max(queries, default=0),
            max_seq_len=max(lengths, default=0),
            block_table_tensor=table.to(device=here, dtype=torch.int32),
            slot_mapping=slot_mapping,
        )
        metadata: dict[str, Any] = {}
        for builder, names in self._builders:
            metadata |= dict.fromkeys(names, builder.build(0, common))
        return Paged(metadata=metadata, slot_mapping=dict.fromkeys(self._layers, slot_mapping))

    def _made_builders(self, config: Any) -> list[tuple[Any, list[str]]]:
        """One builder for the layers of each kind, as the model runner has it."""
        by_kind: dict[type, list[str]] = {}
        for name, layer in self._layers.items():
            by_kind.setdefault(layer.get_attn_backend().get_builder_cls(), []).append(name)
        return [
            (kind(self._specs[names[0]], names, config, device.current()), names)
            for kind, names in by_kind.items()
        ]

    def _check(self, batch: Batch) -> None:
        for request, context, new in zip(
            batch.requests, batch.context_lens, batch.seq_lens, strict=True
        ):
            if request >= len(self._held):
                raise ValueError(
                    f"request {request}: the caches hold {len(self._held)} requests, 0 to "
                    f"{len(self._held) - 1}"
                )
            if new and context not in (0, self._held[request]):
                raise ValueError(
                    f"request {request} is said to have {context} tokens in the caches; they hold "
                    f"{self._held[request]}"
                )

    def _slots(self, request: int, start: int, stop: int) -> list[int]:
        """Where the tokens of a request at the positions from `start` to `stop` are."""
        block, pages = self._block, self._pages[request].tolist()
        return [pages[p // block] * block + p % block for p in range(start, stop)]

    def _forget(self, request: int) -> None:
        """Overwrite what the caches hold of a request: nobody may read it any more."""
        used = self._pages[request, : -(-self._held[request] // self._block)]
        if len(used):
            self._erase(used)

    def _erase(self, pages: torch.Tensor) -> None:
        for cache in self._caches.values():
            cache.index_fill_(0, pages.to(cache.device), torch.nan)

    def _grow(self, most: int) -> None:
        """Give every request so many pages, with what it holds moved there."""
        requests, before = self._pages.shape
        # Page 0 is nobody's, as in vLLM.
        count = requests * most
        order = torch.randperm(count, generator=torch.Generator().manual_seed(count)) + 1
        pages, old = order.view(requests, most), self._pages
        for name, layer in self._layers.items():
            cache = _cache_of(self._specs[name], 1 + count)
            if before:
                moved = self._caches[name][old.flatten().to(cache.device)]
                cache[pages[:, :before].flatten().to(cache.device)] = moved
            self._caches[name] = cache
            layer.bind_kv_cache(cache)
        self._pages = pages


def _cache_of(spec: Any, pages: int) -> torch.Tensor:
    """Memory for so many pages of a layer, [pages, heads, B, features], full of NaN."""
    interface = importlib.import_module("vllm.v1.kv_cache_interface")
    *shape, row = interface.compute_layer_kv_cache_shape_bytes(spec, pages)
    features = row // spec.dtype.itemsize
    return torch.full((*shape, features), torch.nan, dtype=spec.dtype, device=device.current())


def _backend() -> Any:
    return importlib.import_module("vllm.v1.attention.backend")
