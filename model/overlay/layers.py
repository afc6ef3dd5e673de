"""MiniMax-M3's decoder layer on a token-sharded stream, and its two kinds of FFN.

    shard -> norm -> all-gather -> attention -> reduce-scatter -> norm -> FFN -> shard

A dense FFN has TP-sharded weights, so it needs all tokens: it gathers, and reduce-scatters its
result. MegaMoE wants each token on one rank, so it works on the shard as it is.
"""

from functools import partial
from typing import Any

import torch
import vllm.models.minimax_m3.nvidia.model as minimax_m3
from vllm.models.common.ops.sequence_parallel import sp_reduce_scatter, sp_shard

from model.megamoe.block import MiniMaxM3MegaMoE
from model.overlay import config
from model.overlay.rebind import rebound
from model.overlay.stream import gather_tokens, sharded_padding_mask


class MiniMaxM3SequenceParallelMLP(minimax_m3.MiniMaxM3MLP):
    """Dense FFN from token shard to token shard."""

    def __init__(self, *args: Any, reduce_results: bool = False, **kwargs: Any) -> None:
        # Under pipeline parallelism the layer asks each FFN to reduce its own output. This one
        # does, by its reduce-scatter: an all-reduce in down_proj would sum it twice.
        super().__init__(*args, reduce_results=False, **kwargs)

    def forward(self, x: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """[ceil(T / TP), H] -> [ceil(T / TP), H], where T is `num_tokens`."""
        return self.reduce_output(super().forward(gather_tokens(x, num_tokens)))

    def reduce_output(self, partial_sum: torch.Tensor) -> torch.Tensor:
        """This rank's addend of all tokens -> the sum of its own tokens."""
        return sp_reduce_scatter(partial_sum)


class MiniMaxM3ReplicatedMegaMoE(MiniMaxM3MegaMoE):
    """MegaMoE in a stream that is replicated over the TP ranks.

    Its expert-parallel ranks are the TP ranks, and each would dispatch every token. So a rank
    takes its share of the tokens, and gathers the others' results.
    """

    def forward(
        self, hidden_states: torch.Tensor, is_padding: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[T, H] -> [T, H], both equal on all TP ranks; is_padding: bool [T], or None to go by
        the forward context's mask."""
        num_tokens = hidden_states.shape[0]
        with sharded_padding_mask(hidden_states, is_padding):
            mine = super().forward(sp_shard(hidden_states))
        return gather_tokens(mine, num_tokens)


class MiniMaxM3DecoderLayer(minimax_m3.MiniMaxM3DecoderLayer):
    """vLLM's decoder layer with MegaMoE, and with its stream sharded by token where that is on."""

    def __init__(self, *, vllm_config: Any, prefix: str, **kwargs: Any) -> None:
        sequence_parallel = config.use_sequence_parallel(vllm_config)
        classes = {
            "MiniMaxM3MoE": partial(
                MiniMaxM3MegaMoE if sequence_parallel else MiniMaxM3ReplicatedMegaMoE,
                vllm_config=vllm_config,
            ),
            "MiniMaxM3MLP": (
                MiniMaxM3SequenceParallelMLP if sequence_parallel else minimax_m3.MiniMaxM3MLP
            ),
        }
        rebound(super().__init__, **classes)(vllm_config=vllm_config, prefix=prefix, **kwargs)
        self.use_sequence_parallel = sequence_parallel

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """positions: [T]; hidden_states, residual: this rank's shards under sequence
        parallelism, else all tokens. Both are overwritten, as by vLLM's layer."""
        if not self.use_sequence_parallel:
            return super().forward(positions, hidden_states, residual)
        num_tokens = positions.shape[0]
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)

        hidden_states = self.self_attn(
            positions=positions,
            hidden_states=self.gather_for_attention(hidden_states, num_tokens),
        )
        # No all-reduce fused into this norm: the scatter has reduced.
        hidden_states, residual = self.post_attention_layernorm(
            self.scatter_attention_output(hidden_states), residual
        )
        if self.is_moe_layer:
            hidden_states = self.block_sparse_moe(hidden_states)
        else:
            hidden_states = self.mlp(hidden_states, num_tokens)
        return hidden_states, residual

    def gather_for_attention(self, hidden_states: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """The shard of each rank -> all tokens, without pad rows."""
        return gather_tokens(hidden_states, num_tokens)

    def scatter_attention_output(self, partial_sum: torch.Tensor) -> torch.Tensor:
        """This rank's heads' addend of all tokens -> the sum of its own tokens."""
        return sp_reduce_scatter(partial_sum)

    @property
    def ffn_all_reduce_deferred(self) -> bool:
        """Whether the next norm has to sum the FFN's output over the TP ranks."""
        if self.use_sequence_parallel or self.is_moe_layer:
            return False
        return super().ffn_all_reduce_deferred
