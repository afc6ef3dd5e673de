"""vLLM's attention backend interface over the paged-attention kernel.

vLLM's `Attention.forward` stays its own: it finds this backend through the platform, has it write
the new keys and values to their slots of the KV cache, and passes it the metadata of the forward
context.
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

from model.kernels.paged_attention import insert_kv, paged_attention


@dataclass(frozen=True, kw_only=True)
class PagedSequences(AttentionMetadata):
    """The batch is made of the newest tokens of sequences, one after another."""

    query_lens: tuple[int, ...]
    """New tokens of each sequence, in order; they sum to the tokens of the batch."""
    seq_lens: tuple[int, ...]
    """Tokens of each sequence in the cache, the new ones among them."""
    block_table: torch.Tensor
    """int32 [S, blocks]: the pages of each sequence."""


class FoldedAttentionBackend(AttentionBackend):
    """Names our classes to vLLM."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
    ]
    # vLLM then has `do_kv_cache_update` called before `forward`.
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        # The name that vLLM reserves for third-party backends.
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type["FoldedAttentionImpl"]:
        return FoldedAttentionImpl

    @staticmethod
    def get_builder_cls() -> type["PagedSequencesBuilder"]:
        return PagedSequencesBuilder


class PagedSequencesBuilder(AttentionMetadataBuilder[PagedSequences]):
    """Builds `PagedSequences` from what vLLM's model runner knows of a batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> PagedSequences:
        """A prefix that sequences have in common is not used: it changes no value."""
        return PagedSequences(
            query_lens=tuple(common_attn_metadata.query_start_loc_cpu.diff().tolist()),
            seq_lens=tuple(common_attn_metadata.seq_lens.tolist()),
            block_table=common_attn_metadata.block_table_tensor,
        )


class FoldedAttentionImpl(AttentionImpl[PagedSequences]):
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

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write key and value [T, kv_heads, D] to their slots of the cache, int64 [T]."""
        insert_kv(key, value, kv_cache, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: PagedSequences,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend to what the cache holds of each sequence, into `output`.

        query, output: [T, heads, D]; kv_cache: [pages, kv_heads, B, 2 D]; key and value are in the
        cache already. Raises RuntimeError without `PagedSequences`: zeros would pass for an answer.
        """
        if not isinstance(attn_metadata, PagedSequences):
            raise RuntimeError(
                f"{layer.layer_name}: attention metadata is {type(attn_metadata).__name__}; "
                "put PagedSequences into set_forward_context's attn_metadata"
            )
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("the attention stand-in has no quantised output")
        paged_attention(
            query,
            kv_cache,
            attn_metadata.block_table,
            attn_metadata.seq_lens,
            attn_metadata.query_lens,
            self.scale,
            output,
        )
        return output
