"""Wrong parameters: not loaded, or loaded elsewhere (class I)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from properties.faults.fault import Fault
from properties.faults.patches import Method, minimax_m3, tp_size, wrapped


def _linear() -> Any:
    import vllm.model_executor.layers.linear as linear

    return linear


def _experts() -> Any:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    return RoutedExperts


@contextmanager
def bias_of_the_layer_before() -> Iterator[None]:
    """A router bias is loaded one MoE layer late."""

    def late(own: Method) -> Method:
        def load(self: Any, weights: Iterable[tuple[str, Tensor]]) -> Any:
            return own(self, _one_layer_late(weights))

        return load

    with wrapped(minimax_m3().MiniMaxM3Model, "load_weights", late):
        yield


def _one_layer_late(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    before: Tensor | None = None
    for name, value in weights:
        if name.endswith("e_score_correction_bias"):
            yield name, value if before is None else before
            before = value
        else:
            yield name, value


@contextmanager
def kv_heads_not_repeated() -> Iterator[None]:
    """With fewer key heads than ranks, rank r takes head r modulo their number, not r / repeats."""

    def modulo(own: Method) -> Method:
        def load(self: Any, param: Any, loaded: Tensor, shard: Any = None) -> None:
            repeats, heads = self.num_kv_head_replicas, self.total_num_kv_heads
            if shard in ("k", "v") and repeats > 1:
                # vLLM takes head rank // repeats: put there the one that this takes.
                ahead = self.tp_rank % heads - self.tp_rank // repeats
                loaded = loaded.roll(-ahead * self.head_size, 0)
            own(self, param, loaded, shard)

        return load

    with wrapped(_linear().QKVParallelLinear, "weight_loader_v2", modulo):
        yield


@contextmanager
def down_projection_of_the_neighbour() -> Iterator[None]:
    """The dense down projection is loaded from the next TP rank's columns."""

    def shifted(own: Method) -> Method:
        def load(self: Any, param: Any, loaded: Tensor) -> None:
            if ".mlp.down_proj" in self.prefix:
                loaded = loaded.roll(-(loaded.shape[1] // self.tp_size), 1)
            own(self, param, loaded)

        return load

    with wrapped(_linear().RowParallelLinear, "weight_loader_v2", shifted):
        yield


@contextmanager
def gate_and_up_swapped() -> Iterator[None]:
    """Gate and up projections are packed the other way round."""

    def swapped(own: Method) -> Method:
        def load(self: Any, param: Any, loaded: Tensor, shard: Any = None) -> None:
            own(self, param, loaded, 1 - shard if shard in (0, 1) else shard)

        return load

    with wrapped(_linear().MergedColumnParallelLinear, "weight_loader_v2", swapped):
        yield


@contextmanager
def two_experts_swapped() -> Iterator[None]:
    """Experts 0 and 1 are loaded into each other's slots."""

    def swapped(own: Method) -> Method:
        def load(self: Any, *args: Any, **kwargs: Any) -> Any:
            kwargs["expert_id"] = {0: 1, 1: 0}.get(kwargs["expert_id"], kwargs["expert_id"])
            return own(self, *args, **kwargs)

        return load

    with wrapped(_experts(), "weight_loader", swapped):
        yield


@contextmanager
def expert_offset_wrong() -> Iterator[None]:
    """Each rank's slice of an expert's down projection begins one feature late."""

    def shifted(own: Method) -> Method:
        def load(self: Any, **kwargs: Any) -> Any:
            loaded = kwargs["loaded_weight"]
            if self.moe_config.moe_parallel_config.tp_size > 1:
                loaded = loaded.roll(-1, kwargs["shard_dim"])
            return own(self, **{**kwargs, "loaded_weight": loaded})

        return load

    with wrapped(_experts(), "_load_w2", shifted):
        yield


@contextmanager
def renamed(change: dict[str, str]) -> Iterator[None]:
    """The backbone is given tensors of the checkpoint under other names.

    Args:
        change: parts of names, each to be read as the other.
    """

    def renaming(own: Method) -> Method:
        def load(self: Any, weights: Iterable[tuple[str, Tensor]]) -> Any:
            return own(self, ((_rename(name, change), value) for name, value in weights))

        return load

    with wrapped(minimax_m3().MiniMaxM3Model, "load_weights", renaming):
        yield


def _rename(name: str, change: dict[str, str]) -> str:
    return next((name.replace(old, new) for old, new in change.items() if old in name), name)


@contextmanager
def qk_norms_swapped() -> Iterator[None]:
    """The norms of queries and keys have each other's weights."""
    with renamed({".q_norm.": ".k_norm.", ".k_norm.": ".q_norm."}):
        yield


@contextmanager
def value_projection_not_loaded() -> Iterator[None]:
    """A name that the loader does not know is skipped without a word."""
    with renamed({".v_proj.": ".value_proj."}):
        yield


@contextmanager
def head_of_the_neighbour() -> Iterator[None]:
    """The output head's rows are those of the next TP rank."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    def shifted(own: Method) -> Method:
        def load(self: Any, param: Any, loaded: Tensor) -> None:
            rows = param.shape[0] if type(self).__name__ == "ParallelLMHead" else 0
            own(self, param, loaded.roll(-rows, 0) if tp_size() > 1 else loaded)

        return load

    with wrapped(VocabParallelEmbedding, "weight_loader", shifted):
        yield


def _fault(name: str, report: str, **fields: Any) -> Fault:
    return Fault(name=name, report=report, **fields)


OWN = "of this project"

FAULTS: tuple[Fault, ...] = (
    _fault(
        "router-bias-of-another-layer",
        OWN,
        mechanism="a router has the bias of the MoE layer before",
        apply=bias_of_the_layer_before,
        shows=("tp1", "tp2"),
        kinds=("holds another layer's weights", "is loaded twice"),
        at=("e_score_correction_bias",),
        needs=(("layers", "mm"),),
    ),
    _fault(
        "kv-heads-not-repeated",
        "vllm#38191, sglang#20967",
        mechanism="with fewer key heads than TP ranks, a rank's key and value heads are taken by "
        "its rank as if they were not repeated",
        apply=kv_heads_not_repeated,
        shows=("tp8", "tep8pp2"),
        hides=("tp2", "tp4"),
        kinds=("has the wrong part",),
        at=("layers.0.self_attn.k_proj", "layers.0.self_attn.v_proj"),
    ),
    _fault(
        "down-projection-of-the-neighbour",
        OWN,
        mechanism="a rank loads the down projection's columns of the next TP rank",
        apply=down_projection_of_the_neighbour,
        shows=("tp2", "tp4pp2"),
        hides=("tp1",),
        kinds=("has the wrong part",),
        at=("layers.0.mlp.down_proj",),
    ),
    _fault(
        "gate-and-up-swapped",
        OWN,
        mechanism="gate and up projections are packed in the wrong order",
        apply=gate_and_up_swapped,
        shows=("tp1", "tp2pp2"),
        kinds=("has its parts in the wrong order",),
        at=("layers.0.mlp.gate_up_proj",),
    ),
    _fault(
        "two-experts-swapped",
        OWN,
        mechanism="two experts are loaded into each other's slots",
        apply=two_experts_swapped,
        shows=("tp1", "tep2pp2"),
        kinds=("has an expert in the wrong slot",),
        at=("layers.1.block_sparse_moe.experts",),
    ),
    _fault(
        "expert-shard-at-a-wrong-offset",
        OWN,
        mechanism="each rank's slice of an expert's features begins one feature late",
        apply=expert_offset_wrong,
        shows=("tp2", "tp4pp2"),
        hides=("tep2",),
        kinds=("has the wrong part",),
        at=("layers.1.block_sparse_moe.experts",),
    ),
    _fault(
        "qk-norms-swapped",
        OWN,
        mechanism="the norms of queries and keys are loaded from each other's weights",
        apply=qk_norms_swapped,
        shows=("tp1", "tp2pp2"),
        kinds=("has other weights",),
        at=("layers.0.self_attn.q_norm", "layers.0.self_attn.k_norm"),
    ),
    _fault(
        "value-projection-not-loaded",
        OWN,
        mechanism="the loader passes over a name that it does not know",
        apply=value_projection_not_loaded,
        shows=("tp1", "tp2pp2"),
        kinds=("is not loaded",),
        at=("layers.0.self_attn.qkv_proj", "layers.0.self_attn.v_proj"),
    ),
    _fault(
        "head-of-the-neighbour",
        OWN,
        mechanism="the output head has the vocabulary rows of the next TP rank",
        apply=head_of_the_neighbour,
        shows=("tp2", "tep2pp2"),
        hides=("tp1",),
        kinds=("has the wrong part",),
        at=("lm_head",),
    ),
)
