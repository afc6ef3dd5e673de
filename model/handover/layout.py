"""Which heads of which layers a rank's caches hold, in numbers that all ranks share."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from model.tiny import TinyM3
from sim import Topology

if TYPE_CHECKING:
    from model.kv_cache import KVCaches


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a rank's cache of one layer holds."""

    layer: str
    """vLLM's name of the layer, which counts layers from the first stage on."""
    heads: tuple[int, ...]
    """The heads of the whole model, in the order of the cache's."""

    def place(self, head: int) -> int:
        """Where a head is in the cache."""
        return self.heads.index(head)


def held_by(caches: KVCaches, tiny: TinyM3, topology: Topology, rank: int) -> tuple[Held, ...]:
    """What a rank's caches hold.

    Keys and values are sharded by head over the TP ranks, or repeated where there are more ranks
    than heads; the indexer's keys have one head, which every TP rank has.
    """
    interface = importlib.import_module("vllm.v1.kv_cache_interface")
    tp, tp_rank = topology.tp, topology.coordinates(rank)["tp"]
    held = []
    for layer, spec in caches.specs.items():
        if isinstance(spec, interface.MLAAttentionSpec):
            heads: tuple[int, ...] = (0,)
        else:
            heads = heads_of(tiny.num_key_value_heads, tp, tp_rank)
        if len(heads) != spec.num_kv_heads:
            raise RuntimeError(
                f"rank {rank}: the cache of {layer} has {spec.num_kv_heads} heads; TP rank "
                f"{tp_rank} of {tp} should have {len(heads)}"
            )
        held.append(Held(layer=layer, heads=heads))
    return tuple(held)


def heads_of(total: int, tp: int, tp_rank: int) -> tuple[int, ...]:
    """The key heads of a TP rank, of so many in all."""
    if total >= tp:
        each = total // tp
        return tuple(range(tp_rank * each, (tp_rank + 1) * each))
    return (tp_rank * total // tp,)
