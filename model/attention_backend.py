"""vLLM's attention backend interface over the causal attention kernel, without a KV cache.

vLLM's `Attention.forward` stays its own: it finds this backend through the platform and passes it
the metadata of the forward context. Every sequence of a batch is given whole, so nothing is cached.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)

from model.kernels.attention import causal_attention


@dataclass(frozen=True, kw_only=True)
class WholeSequences(AttentionMetadata):
    """The batch is made of whole sequences, one after another."""

    seq_lens: tuple[int, ...]
    """Tokens of each sequence, in order; they sum to the tokens of the batch."""


class FoldedAttentionBackend(AttentionBackend):
    """Names our classes to vLLM. There is no cache, hence no separate step to fill it."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
    ]
    # vLLM then never asks for a cache update of its own before `forward`.
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        # The name that vLLM reserves for third-party backends.
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type["FoldedAttentionImpl"]:
        return FoldedAttentionImpl

    @staticmethod
    def get_builder_cls() -> type["WholeSequencesBuilder"]:
        return WholeSequencesBuilder


class WholeSequencesBuilder(AttentionMetadataBuilder[WholeSequences]):
    """Builds `WholeSequences` from what vLLM's model runner knows of a batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> WholeSequences:
        """Raises NotImplementedError if a sequence has earlier tokens, which only a cache holds."""
        queries = common_attn_metadata.query_start_loc_cpu.diff().tolist()
        contexts = common_attn_metadata.seq_lens.tolist()
        if queries != contexts:
            raise NotImplementedError(
                f"sequences of {contexts} tokens bring {queries} new ones, but there is no KV "
                "cache: give every sequence whole"
            )
        return WholeSequences(seq_lens=tuple(queries))


class FoldedAttentionImpl(AttentionImpl[WholeSequences]):
    """Causal grouped-query attention; refuses at construction what it does not compute."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
    ) -> None:
        refused = {
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
            "attn_type": None if attn_type == AttentionType.DECODER else attn_type,
        }
        for name, value in refused.items():
            if value is not None:
                raise NotImplementedError(
                    f"the attention stand-in has no {name} (asked for {value!r}); "
                    "it computes plain causal attention"
                )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: WholeSequences,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend over whole sequences, into `output`.

        query, output: [T, heads, D]; key, value: [T, kv_heads, D]; kv_cache is not looked at.
        Raises RuntimeError without `WholeSequences`: zeros would pass for an answer.
        """
        if not isinstance(attn_metadata, WholeSequences):
            raise RuntimeError(
                f"{layer.layer_name}: attention metadata is {type(attn_metadata).__name__}; "
                "put WholeSequences into set_forward_context's attn_metadata"
            )
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("the attention stand-in has no quantised output")
        causal_attention(query, key, value, attn_metadata.seq_lens, self.scale, output)
        return output
