"""Which placement each tap of a model has, as the model's own flags say.

Words: "replicate"; "partial:tp", addends over the TP ranks; "shard:tp", tokens over the TP ranks
in order, `ceil(T / TP)` rows each, whose rows beyond T are pads.
"""

from collections.abc import Iterator
from typing import Any

from vllm.distributed import get_pp_group, get_tensor_model_parallel_world_size

REPLICATE, PARTIAL_TP, SHARD_TP = "replicate", "partial:tp", "shard:tp"


def placements(model: Any) -> dict[str, str]:
    """Tap -> placement, of every tap inside this rank's stage; call it within the rank.

    What is not in it (embed, stage.*, logits, logprobs, aux.*) is replicated, except aux hidden
    states at PP = 1, TP > 1 without sequence parallelism: there vLLM leaves an FFN's all-reduce to
    the next norm, and captures `hidden + residual` before it. Such an aux is the full residual
    plus this rank's addend of the FFN, for which there is no word.

    Works for vLLM's own classes and the overlay's.
    """
    backbone = model.model
    several = get_tensor_model_parallel_world_size() > 1
    sharded = bool(getattr(backbone, "use_sequence_parallel", False))
    stream = SHARD_TP if sharded else REPLICATE

    def taps() -> Iterator[tuple[str, str]]:
        for i in range(backbone.start_layer, backbone.end_layer):
            layer, at = backbone.layers[i], f"layers.{i}"
            if i:
                # Complete once this layer's first norm has added it up.
                yield f"layers.{i - 1}.stream", stream
            reduced = getattr(layer.self_attn.o_proj, "reduce_results", True)
            yield f"{at}.attn", PARTIAL_TP if several and not reduced else REPLICATE
            yield f"{at}.residual", stream
            deferred = several and getattr(layer, "ffn_all_reduce_deferred", False)
            yield f"{at}.ffn", PARTIAL_TP if deferred and not sharded else stream
            if layer.is_moe_layer:
                # MegaMoE routes a rank's own tokens, also where the stream is replicated.
                own = several and _is_mega_moe(layer.block_sparse_moe)
                yield f"{at}.router", SHARD_TP if own else REPLICATE
                yield f"{at}.experts_chosen", SHARD_TP if own else REPLICATE
        if get_pp_group().is_last_rank:
            yield f"layers.{backbone.end_layer - 1}.stream", stream
            yield "norm", stream

    return dict(taps())


def _is_mega_moe(block: Any) -> bool:
    return type(block.experts).__name__ == "DeepGemmMegaMoEExperts"
